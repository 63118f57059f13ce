"""A wrapper of torch's fused kernel for exact attention; adapts inputs that the kernel rejects."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from qkv.attention.common.guards import holds, is_finite
from qkv.attention.common.head_terms import HeadTerms
from qkv.attention.common.score_blocks import is_safe
from qkv.attention.common.visibility import Visibility, row_blocks

BIAS_ELEMENTS = 1 << 22
"""The most elements of a block's bias: 4 MiB in bool, 16 MiB in float32."""


def is_supported(
    query_BHLD: Tensor, mask_BHLS: Tensor | None, terms: HeadTerms | None, scale: float
) -> bool:
    """Returns True if torch's kernel adds these biases in float32 and handles this scale.

    On a GPU the kernel needs floating biases in the dtype of the query. The kernel masks before it
    scales, and a scale that is 0 in float32 turns masked scores into NaN.
    """
    if scale and abs(scale) < 1e-30:
        return False
    is_floating = mask_BHLS is not None and mask_BHLS.dtype != torch.bool
    if query_BHLD.device.type == "cpu" or not (is_floating or terms is not None):
        return True
    return query_BHLD.dtype in (torch.float32, torch.float64)


def attend(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    visible: Visibility,
    terms: HeadTerms | None,
    scale: float,
) -> Tensor | None:
    """Runs torch's fused kernel; returns None if anything overflowed or is not finite.

    The scores are checked first, because a score that overflows to -inf leaves no trace in the
    output. An overflow of a sum of values is visible in the output: inf and NaN persist. The caller
    has checked the terms.
    """
    if not is_safe(query_BHLD, key_BGSD, None, scale):
        return None
    output = _in_blocks(query_BHLD, key_BGSD, value_BGSE, visible, terms, scale)
    return output if holds(is_finite(output, visible.dtype)) else None


def _in_blocks(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    visible: Visibility,
    terms: HeadTerms | None,
    scale: float,
) -> Tensor:
    """Runs the kernel in blocks of rows, in one call if it needs no bias or a small one."""
    B, H, L, D = query_BHLD.shape
    G, E = key_BGSD.shape[1], value_BGSE.shape[-1]
    is_plain = terms is None and (visible.is_all or visible.is_causal_only)
    if D == E and scale > 0 and is_plain:
        return scaled_dot_product_attention(
            query_BHLD, key_BGSD, value_BGSE,
            is_causal=visible.causal, scale=scale, enable_gqa=H != G,
        )  # fmt: skip
    if scale <= 0:  # the kernel masks before it scales: -inf would become inf or NaN
        query_BHLD, scale = query_BHLD * (-1 if scale < 0 else 0), abs(scale) or 1.0
    # the kernel needs D = E, and torch's fallback for D != E is quadratic in memory. Zeros change
    # neither scores nor output
    query = pad(query_BHLD, (0, E - D)) if E > D else query_BHLD
    key = pad(key_BGSD, (0, E - D)) if E > D else key_BGSD
    value = pad(value_BGSE, (0, D - E)) if D > E else value_BGSE

    def kernel(rows: slice, keys: slice, bias: Tensor | None, is_causal: bool = False) -> Tensor:
        key_BGSD, value_BGSD = key[:, :, keys], value[:, :, keys]
        if terms is not None:
            bias = terms.bias(bias, visible, rows, keys)
            if terms.sinks_H is not None:  # the sink is a key and a value of zeros
                key_BGSD, value_BGSD = (pad(x, (0, 0, 0, 1)) for x in (key_BGSD, value_BGSD))
        return scaled_dot_product_attention(
            query[:, :, rows], key_BGSD, value_BGSD, bias,
            is_causal=is_causal, scale=scale, enable_gqa=H != G,
        )[..., :E]  # fmt: skip

    every = slice(0, L)
    if terms is None and visible.is_causal_only:
        return kernel(every, slice(0, visible.S), None, is_causal=True)
    blocks = [every]
    if visible.varies_by_row or (terms is not None and terms.slopes_H is not None):
        planes = visible.bias_planes(1 if terms is None else H)
        blocks = row_blocks(L, planes * visible.S, BIAS_ELEMENTS)
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
