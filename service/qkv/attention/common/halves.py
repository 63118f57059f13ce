"""A call of a variant as two calls on halves of its items or heads, whose rows then fit memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

import torch

from qkv.attention.common.guards import of_items

Result = TypeVar("Result", bound=tuple[Any, ...])

_OF_HEADS: Final = ("alibi_slopes_H", "sinks_H")  # one number per query head


def in_halves(
    attend: Callable[[Any, frozenset[str]], Result], call: Any, outputs: frozenset[str]
) -> Result:
    """Runs `attend` on two halves: of the items, else of the key heads, else of the query heads.

    Args:
        attend: of a variant with scores. Its result is a NamedTuple of output, weights, scores and
            backend.
        call: its `Call`; B or H is above 1.
        outputs: the names of the outputs to return.
    """
    (B, H), G = call.query_BHLD.shape[:2], call.key_BGSD.shape[1]
    axis, size = (0, B) if B > 1 else (1, H)
    middle = (size if axis == 0 or G == 1 else G) // 2 * (1 if axis == 0 or G == 1 else H // G)
    parts = []
    for half in (slice(0, middle), slice(middle, size)):
        items, heads = (half, slice(0, H)) if axis == 0 else (slice(0, 1), half)
        with of_items(items):
            parts.append(attend(_part(call, items, heads), outputs))
    *tensors, backends = zip(*parts, strict=True)
    joined = (None if a[0] is None else torch.cat(a, axis) for a in tensors)
    backend = backends[0] if len(set(backends)) == 1 else "explicit"
    result: Callable[..., Result] = type(parts[0])
    return result(*joined, backend)


def _part(call: Any, items: slice, heads: slice) -> Any:
    """Returns the call of some items and query heads."""
    H, G = call.query_BHLD.shape[1], call.key_BGSD.shape[1]
    groups = slice(heads.start * G // H, -(-heads.stop * G // H))
    of_heads = {name: getattr(call, name, None) for name in _OF_HEADS}
    found = {name: term[heads] for name, term in of_heads.items() if term is not None}
    if (mask := call.mask_BHLS) is not None:  # an axis of size 1 is for all items or heads
        mask = mask[items if mask.shape[0] > 1 else slice(1)]
        found["mask_BHLS"] = mask[:, heads if mask.shape[1] > 1 else slice(1)]
    if call.key_lengths_B is not None:
        found["key_lengths_B"] = call.key_lengths_B[items]
    if getattr(call, "plane_BH", None) is not None:
        found["plane_BH"] = call.plane_BH[items, heads]
    return replace(
        call, query_BHLD=call.query_BHLD[items, heads], key_BGSD=call.key_BGSD[items, groups],
        value_BGSE=call.value_BGSE[items, groups], **found,
    )  # fmt: skip
