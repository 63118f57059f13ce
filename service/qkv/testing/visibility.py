"""The keys that each query may see, as one boolean tensor (B, H, L, S)."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.testing.call import Call


def first_position(call: Call) -> Tensor:
    """Returns the position of the first query on the key axis, (B, 1, 1, 1) or (1, 1, 1, 1)."""
    _, _, L, S = call.score_shape
    offset = call.parsed.get("query_offset", 0)
    if offset != "end":
        return torch.full((1, 1, 1, 1), offset)
    lengths = call.inputs.get("key_lengths")
    return torch.full((1, 1, 1, 1), S - L) if lengths is None else (lengths - L).view(-1, 1, 1, 1)


def visible_keys(call: Call) -> Tensor:
    """Returns the keys that each query sees: bool (B, H, L, S).

    Mask, `key_lengths`, `causal` with `query_offset` and `window` restrict them.
    """
    B, H, L, S = call.score_shape
    j = torch.arange(S)
    position = first_position(call) + torch.arange(L).view(1, 1, L, 1)
    visible = torch.ones(B, H, L, S, dtype=torch.bool)
    if call.parsed.get("causal"):
        visible &= j <= position
    left, right = call.parsed.get("window") or (None, None)
    if left is not None:
        visible &= j >= position - left
    if right is not None:
        visible &= j <= position + right
    if (lengths := call.inputs.get("key_lengths")) is not None:
        visible &= j < lengths.view(-1, 1, 1, 1)
    if (mask := call.inputs.get("mask")) is not None:
        visible &= mask
    return visible
