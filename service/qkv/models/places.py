"""The place of one token in a tensor, and what it tells about the positions of a sequence.

A place is the part of a tensor that depends on the token: for each axis the indices where it does,
or None for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

Place: TypeAlias = tuple[frozenset[int] | None, ...]
"""The indices of each axis, or None for all."""


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors of arguments or of a result, also those in lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [x for each in value if each is not None for x in tensors_of(each)]


def is_number(x: object) -> TypeGuard[Tensor]:
    """True for a tensor of floating or complex numbers that is not nested."""
    if not isinstance(x, Tensor) or x.is_nested:
        return False
    return x.is_floating_point() or x.is_complex()


@torch.no_grad()
def disturbed(x: Tensor, place: Place) -> Tensor:
    """Returns a tensor with numbers at the place that are larger than all there, of both signs."""
    x = x.detach().clone()  # of the same strides, in whose order random numbers are drawn
    if not x.numel():
        return x
    grid = np.ix_(*(sorted(at or range(n)) for at, n in zip(place, x.shape, strict=True)))
    # neighbours have different signs: a constant may change nothing
    signs = torch.from_numpy(1 - sum(grid, np.zeros((), int)) % 2 * 2).to(x)
    part = x[grid]
    x[grid] = part * 1.25 + signs * (part.abs().amax() * 4 + 1)
    return x


@torch.no_grad()
def changed_place(before: Tensor, after: Tensor) -> Place | None:
    """Returns the place where two tensors differ by more than rounding; None if they do not.

    Several features count as all: of the others, some may keep their numbers by chance.
    """
    if before.shape != after.shape:
        return (None,) * before.ndim
    if before.ndim < 2:
        place = changed_place(before[None], after[None])
        return None if place is None else place[1:]
    table = np.asarray((after != before).cpu().numpy().any(-1))  # torch's takes ten times as long
    rows = torch.from_numpy(table).to(before.device)
    old, new = before[rows], after[rows]
    sizes = old.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(before.dtype).tiny)
    rounding = torch.finfo(before.dtype).eps ** 0.5
    near = torch.isclose(new / sizes, old / sizes, rounding, rounding, equal_nan=True)
    differs: np.ndarray = near.cpu().numpy() == 0
    table[table] = differs.any(-1)
    if not table.any():
        return None
    axes = range(table.ndim)
    lines = [np.flatnonzero(table.any(tuple(m for m in axes if m != n))) for n in axes]
    features = np.flatnonzero(differs.any(0))
    return (
        *(
            None if len(line) == n > 1 else frozenset(line.tolist())
            for line, n in zip(lines, before.shape, strict=False)
        ),
        None if len(features) > 1 else frozenset(features.tolist()),
    )


def middle(x: Tensor) -> Place:
    """Returns the place of the token in the middle of a sequence."""
    return (*(frozenset([(n - 1) // 2]) for n in x.shape[:-1]), None)


def is_confined(place: Place) -> bool:
    """True if a place distinguishes the positions of a sequence."""
    return sum(map(is_single, place)) >= min(2, len(place) - 1)


def is_single(indices: frozenset[int] | None) -> bool:
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
            if is_single(indices)
        )
    )


def is_elsewhere(entered: Place, left: Place) -> bool:
    """True if the token has one index of an axis at first, and others at last."""
    pairs = zip(entered, left, strict=True)
    return any(is_single(before) and after != before for before, after in pairs)


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
    if not any(has_same_positions(z, middle(z), y) for z in sequences) or is_single(place[-1]):
        return False
    if x.ndim != y.ndim:
        return any(not is_single(indices) for indices in place[1:-1])
    axes = zip(x.shape[:-1], entered[:-1], place[:-1], strict=True)
    return any(n > 1 and is_single(at) and not is_single(left) for n, at, left in axes)


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
