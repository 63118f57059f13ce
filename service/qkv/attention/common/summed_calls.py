"""What calls have in common whose queries read sums over keys.

A call has the fields `query_BHLD`, `key_BGSD`, `value_BGSE`, `key_lengths_B`, `causal` and
`query_offset`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from qkv.attention.common.score_blocks import score_dtype
from qkv.attention.common.visibility import row_blocks

_ELEMENTS: Final = 1 << 22  # of a block of rows of A


def item_offsets(call: Any) -> list[int] | None:
    """Returns each item's position of the first query; None if every query sees every key."""
    (B, _, L, _), S = call.query_BHLD.shape, call.key_BGSD.shape[2]
    if not call.causal:
        return None
    if call.query_offset != "end":
        return [call.query_offset] * B
    lengths = [S] * B if call.key_lengths_B is None else call.key_lengths_B.tolist()
    return [length - L for length in lengths]


def visible_counts(call: Any, offsets: list[int] | None) -> Tensor:
    """Returns the number of keys that each query sees, (B, L)."""
    (B, _, L, _), S, device = call.query_BHLD.shape, call.key_BGSD.shape[2], call.query_BHLD.device
    lengths_B = call.key_lengths_B
    if lengths_B is None:
        lengths_B = torch.full((B,), S, device=device)
    counts_BL: Tensor = lengths_B[:, None].expand(B, L)
    if offsets is None:
        return counts_BL
    # torch.tensor(offsets, device=device) would wait for the device
    offset_B = torch.tensor(offsets).to(device, non_blocking=True)
    row_BL = torch.arange(1, L + 1, device=device) + offset_B[:, None]
    return torch.minimum(row_BL.clamp(min=0), counts_BL)


def of_item(call: Any, b: int) -> Any:
    """Returns the call for one of its items."""
    item = slice(b, b + 1)
    lengths_B = None if call.key_lengths_B is None else call.key_lengths_B[item]
    return replace(
        call, query_BHLD=call.query_BHLD[item], key_BGSD=call.key_BGSD[item],
        value_BGSE=call.value_BGSE[item], key_lengths_B=lengths_B,
    )  # fmt: skip


def rows_by_head(call: Any, block: Callable[[slice], Tensor]) -> Callable[[slice], Tensor]:
    """Returns a function that computes rows of A, (B, H, R, S), from one by key head."""
    exact = score_dtype(call.query_BHLD.dtype)
    return lambda rows: block(rows).flatten(1, 2).to(exact)


def every_row(call: Any, block: Callable[[slice], Tensor]) -> Tensor:
    """Returns A, (B, H, L, S), from a function that computes rows of it, (B, G, K, R, S)."""
    (B, H, L, _), S = call.query_BHLD.shape, call.key_BGSD.shape[2]
    exact = score_dtype(call.query_BHLD.dtype)
    weights: Tensor = call.query_BHLD.new_zeros(B, H, L, S, dtype=exact)
    for rows in row_blocks(L, B * H * S, _ELEMENTS):
        weights[:, :, rows] = block(rows).flatten(1, 2)
    return weights


def gradients_by_heads(
    backward: Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]], call: Any, grad_BHLE: Tensor
) -> dict[str, Tensor]:
    """Returns gradients in the scores' dtype, computed one key head at a time.

    The float64 intermediates of all heads together would need many times the memory of the inputs.

    Args:
        backward: returns the gradients of query, key and value in float64, from a call for one key
            head and the K query heads that read it, and the gradient of its output.
        call: the call for all heads.
        grad_BHLE: the gradient of its output.
    """
    inputs = (call.query_BHLD, call.key_BGSD, call.value_BGSE)
    (H, G), dtype = (inputs[0].shape[1], inputs[1].shape[1]), score_dtype(inputs[0].dtype)
    query, key, value = (torch.empty_like(x, dtype=dtype) for x in inputs)
    for g in range(G):
        group, heads = slice(g, g + 1), slice(g * H // G, (g + 1) * H // G)
        some = replace(
            call, query_BHLD=inputs[0][:, heads], key_BGSD=inputs[1][:, group],
            value_BGSE=inputs[2][:, group],
        )  # fmt: skip
        query[:, heads], key[:, group], value[:, group] = backward(some, grad_BHLE[:, heads])
    return {"query": query, "key": key, "value": value}
