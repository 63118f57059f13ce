"""Tells which positions of a sequence the place of a token distinguishes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from qkv.models.function_places import Place, is_number


def middle(x: Tensor) -> Place:
    """Returns the place of the token in the middle of a sequence."""
    return (*(frozenset([(n - 1) // 2]) for n in x.shape[:-1]), None)


def is_confined(place: Place) -> bool:
    """True if a place distinguishes the positions of a sequence."""
    return sum(map(_is_single, place)) >= min(2, len(place) - 1)


def _is_single(indices: frozenset[int] | None) -> bool:
    """True for one index. Several may be features, as of two tensors side by side."""
    return indices is not None and len(indices) == 1


def has_same_positions(x: Tensor, place: Place, y: Tensor) -> bool:
    """True if y has the axes of an input x that distinguish its positions."""
    return (
        is_number(y)
        and y.ndim == x.ndim
        and all(
            y.shape[axis] == x.shape[axis]
            for axis, indices in enumerate(place)
            if _is_single(indices)
        )
    )


def is_elsewhere(entered: Place, left: Place) -> bool:
    """True if the token has one index of an axis at first, and others at last."""
    pairs = zip(entered, left, strict=True)
    return any(_is_single(before) and after != before for before, after in pairs)


def is_spread(
    x: Tensor, entered: Place, y: Tensor, place: Place, sequences: Sequence[Tensor]
) -> bool:
    """True if a token of x is in the features of several positions of an output y.

    A score for each pair of positions has it in one feature. One vector for all positions, and one
    item for the whole batch, have an axis of length 1.

    Args:
        x: one of the sequences that a module received.
        entered: place of the token in x.
        y: an output of the module.
        place: of the token in y.
        sequences: all of them: y has the positions of one.
    """
    if not any(has_same_positions(z, middle(z), y) for z in sequences) or _is_single(place[-1]):
        return False
    if x.ndim != y.ndim:
        return any(not _is_single(indices) for indices in place[1:-1])
    axes = zip(x.shape[:-1], entered[:-1], place[:-1], strict=True)
    return any(n > 1 and _is_single(at) and not _is_single(left) for n, at, left in axes)


def is_sequence(x: Tensor, module: nn.Module) -> bool:
    """True for (B, L, M), (L, B, M) or (L, M) with numbers that can be read.

    Four axes are (B, height, width, M) if a linear part of the module takes the last one. Otherwise
    they may be channels, heads or a mask.
    """
    is_grid = x.ndim == 4 and any(
        getattr(part, "in_features", None) == x.shape[-1] for part in module.children()
    )
    return (
        type(x) is Tensor  # no weight
        and (is_grid or x.ndim in (2, 3))
        and max(x.shape[:-1]) > 1
        and x.numel() > 0
        and not (x.is_meta or x.is_nested or isinstance(x, FakeTensor))
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def takes_width(module: nn.Module, x: Tensor) -> bool:
    """True if a matrix of a module may project the features of x."""
    return any(p.ndim > 1 and x.shape[-1] in p.shape for p in module.parameters())
