"""Slopes of ALiBi and sinks for tests of softmax: distances, and the textbook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor


def alibi(
    slopes_H: Tensor,
    L: int,
    S: int,
    query_offset: int | Literal["end"] = 0,
    lengths_B: Tensor | None = None,
) -> Tensor:
    """Returns slope * (j - p_i) in float64, (B or 1, H, L, S)."""
    ends = torch.tensor([S]) if lengths_B is None else lengths_B
    offset = ends - L if query_offset == "end" else torch.tensor([query_offset])
    position = offset[:, None, None, None] + torch.arange(L)[:, None]
    return slopes_H.double()[:, None, None] * (torch.arange(S) - position)


def textbook(
    tensors: Mapping[str, Tensor],
    visible: Tensor,
    scale: float,
    softcap: float | None = None,
    kept: Tensor | None = None,
    query_offset: Any = 0,
) -> Tensor:
    """Returns the output in differentiable torch.

    A sink is a column of the scores, and its column of the softmax is left out.

    Args:
        tensors: by argument, as `attend` takes them.
        visible: True where a query may attend to a key, broadcastable to (B, H, L, S).
        scale: of the scores.
        softcap: as `attend` takes it.
        kept: factors of dropout, (B, H, L, S).
        query_offset: as `attend` takes it.
    """
    query, key, value = (tensors[n] for n in ("query_BHLD", "key_BGSD", "value_BGSE"))
    K = query.shape[1] // key.shape[1]
    scores = scale * query @ key.repeat_interleave(K, 1).mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if (mask := tensors.get("mask_BHLS")) is not None and mask.is_floating_point():
        scores = scores + mask
    if (slopes := tensors.get("alibi_slopes_H")) is not None:
        L, S = scores.shape[-2:]
        one = torch.ones_like(slopes)
        distance = alibi(one, L, S, query_offset, tensors.get("key_lengths_B"))
        scores = scores + slopes[:, None, None] * distance
    scores = scores.masked_fill(~visible, -torch.inf)
    sinks = tensors.get("sinks_H")
    if sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    if kept is not None:
        weights = weights * kept
    return weights @ value.repeat_interleave(K, 1)
