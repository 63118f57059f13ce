"""A call of a variant as two calls on halves of its items or heads, whose rows then fit memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from qkv.attention.common.guards import of_items

__all__ = ["in_halves"]

Result = TypeVar("Result", bound=tuple[Any, ...])


def in_halves(
    attend: Callable[..., Result],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    terms_H: tuple[Tensor | None, ...],
    plane_BH: Tensor | None = None,
    **parameters: Any,
) -> Result:
    """Runs `attend` on two halves: of the items, else of the key heads, else of the query heads.

    Args:
        attend: takes the tensors, the terms, and by name `plane_BH` and the parameters. Its result
            is a NamedTuple of output, weights, scores and backend.
        tensors: query, key, value, mask and key lengths; B or H is above 1.
        terms_H: tensors with one number per query head.
        plane_BH: as in `softmax.attend`; None: `attend` does not take it.
    """
    query, key, value, mask, lengths = tensors
    (B, H), G = query.shape[:2], key.shape[1]
    axis, size = (0, B) if B > 1 else (1, H)
    middle = (size if axis == 0 or G == 1 else G) // 2 * (1 if axis == 0 or G == 1 else H // G)
    parts = []
    for half in (slice(0, middle), slice(middle, size)):
        items, heads = (half, slice(0, H)) if axis == 0 else (slice(0, 1), half)
        groups = slice(heads.start * G // H, -(-heads.stop * G // H))
        if mask is not None:  # an axis of size 1 is for all items or heads
            part_mask = mask[items if mask.shape[0] > 1 else slice(1)]
            part_mask = part_mask[:, heads if mask.shape[1] > 1 else slice(1)]
        planes = {} if plane_BH is None else {"plane_BH": plane_BH[items, heads]}
        with of_items(items):
            part = attend(
                query[items, heads], key[items, groups], value[items, groups],
                None if mask is None else part_mask, None if lengths is None else lengths[items],
                *(None if term is None else term[heads] for term in terms_H),
                **planes, **parameters,
            )  # fmt: skip
        parts.append(part)
    *outputs, backends = zip(*parts, strict=True)
    joined = (None if a[0] is None else torch.cat(a, axis) for a in outputs)
    backend = backends[0] if len(set(backends)) == 1 else "explicit"
    result: Callable[..., Result] = type(parts[0])
    return result(*joined, backend)
