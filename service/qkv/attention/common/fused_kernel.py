"""torch's fused kernel for exact attention: whatever it does not take by itself is made to fit."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from qkv.attention.common.score_blocks import is_safe
from qkv.attention.common.visibility import Visibility, row_blocks

BIAS_ELEMENTS = 1 << 22
"""Of a block's bias: 4 MiB bool, 16 MiB float32."""


def is_supported(query_BHLD: Tensor, mask_BHLS: Tensor | None, scale: float) -> bool:
    """Whether torch's kernel adds this mask in float32 and multiplies by this scale.

    On a GPU it wants floating masks in the query's dtype; and a scale that vanishes in float32
    makes NaN of what it has masked by then.
    """
    if scale and abs(scale) < 1e-30:
        return False
    if query_BHLD.device.type == "cpu" or mask_BHLS is None or mask_BHLS.dtype == torch.bool:
        return True
    return query_BHLD.dtype in (torch.float32, torch.float64)


def attend(
    query_BHLD: Tensor, key_BGSD: Tensor, value_BGSE: Tensor, visible: Visibility, scale: float
) -> Tensor | None:
    """torch's fused kernel; None where anything overflowed or came that is not finite.

    Scores are looked at first, since one that is -inf on its way leaves no trace. What a sum of
    values comes to is seen in the output: what is inf or NaN once, stays so.
    """
    if not is_safe(query_BHLD, key_BGSD, None, scale):
        return None
    output = _in_blocks(query_BHLD, key_BGSD, value_BGSE, visible, scale)
    finite = math.isfinite(output.sum(dtype=visible.dtype).item())
    return output if finite else None


def _in_blocks(
    query_BHLD: Tensor, key_BGSD: Tensor, value_BGSE: Tensor, visible: Visibility, scale: float
) -> Tensor:
    """In one call where no bias or a small one is needed."""
    B, H, L, D = query_BHLD.shape
    G, E = key_BGSD.shape[1], value_BGSE.shape[-1]
    if D == E and scale > 0 and (visible.is_all or visible.is_causal_only):
        return scaled_dot_product_attention(
            query_BHLD, key_BGSD, value_BGSE,
            is_causal=visible.causal, scale=scale, enable_gqa=H != G,
        )  # fmt: skip
    if scale <= 0:  # the kernel scales after it has masked: -inf would turn to inf, or to NaN
        query_BHLD, scale = query_BHLD * (-1 if scale < 0 else 0), abs(scale) or 1.0
    # the kernel wants D = E; zeros change neither scores nor output, torch's own fallback for
    # D != E is quadratic in memory
    query = pad(query_BHLD, (0, E - D)) if E > D else query_BHLD
    key = pad(key_BGSD, (0, E - D)) if E > D else key_BGSD
    value = pad(value_BGSE, (0, D - E)) if D > E else value_BGSE

    def kernel(rows: slice, keys: slice, bias: Tensor | None, is_causal: bool = False) -> Tensor:
        return scaled_dot_product_attention(
            query[:, :, rows], key[:, :, keys], value[:, :, keys], bias,
            is_causal=is_causal, scale=scale, enable_gqa=H != G,
        )[..., :E]  # fmt: skip

    every = slice(0, L)
    if visible.is_causal_only:
        return kernel(every, slice(0, visible.S), None, is_causal=True)
    blocks = [every]
    if visible.varies_by_row:
        blocks = row_blocks(L, visible.bias_planes * visible.S, BIAS_ELEMENTS)
    if len(blocks) == 1:
        keys, bias = visible.block(every, query.device)
        if keys.start < keys.stop:
            return kernel(every, keys, bias)
    output = query.new_zeros(B, H, L, E)
    for rows in blocks:
        keys, bias = visible.block(rows, query.device)
        if keys.start < keys.stop:
            output[:, :, rows] = kernel(rows, keys, bias)
    return output
