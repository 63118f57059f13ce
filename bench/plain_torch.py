"""The mathematics of each variant in few fast lines of plain torch: the baseline of bench/speed.py.

There are no guards against padding, underflow of features, or overflow and cancellation of sums.
All is float32. CHUNK and SEGMENT were the fastest of 32 to 256 and of 512 to 4,096: the data of a
segment stays in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize, scaled_dot_product_attention

CHUNK = 128
SEGMENT = 512


def _linear(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    q, k = (x.clamp(max=0).exp_().add_(x.relu()) for x in (query, key))  # elu(x) + 1
    if causal:
        return _attend_in_chunks(q, k, value)
    return (q @ (k.mT @ value)).div_(_dot_with_row(q, k.sum(-2, keepdim=True)))


def _taylor(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    q, k = normalize(query, dim=-1), normalize(key, dim=-1)
    if causal:
        return _attend_in_chunks(q, k, value, adds_one=True)
    total = _dot_with_row(q, k.sum(-2, keepdim=True)).add_(k.shape[-2])
    return (q @ (k.mT @ value)).add_(value.sum(-2, keepdim=True)).div_(total)


def _efficient(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    q = query.softmax(-1)
    if not causal:
        return q @ (key.softmax(-2).mT @ value)
    k = (key - key.amax(-2, keepdim=True)).exp_()
    return _attend_in_chunks(q / k.cumsum(-2), k, value, is_normalized=True)


def _linformer(
    query: Tensor, key: Tensor, value: Tensor, key_projection: Tensor, value_projection: Tensor
) -> Tensor:
    return scaled_dot_product_attention(query, key_projection @ key, value_projection @ value)


def _mean(value: Tensor, causal: bool) -> Tensor:
    if not causal:
        return value.mean(-2, keepdim=True).expand_as(value).contiguous()
    return value.cumsum(-2).div_(torch.arange(1, value.shape[-2] + 1, device=value.device)[:, None])


def _softmax(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=causal)


def _sigmoid(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    query, bias, outputs = query * query.shape[-1] ** -0.5, math.log(key.shape[-2]), []
    for start in range(0, query.shape[-2], CHUNK):  # a whole matrix would leave the cache
        end = start + CHUNK
        seen = slice(end if causal else None)
        weights = (query[..., start:end, :] @ key[..., seen, :].mT).sub_(bias).sigmoid_()
        outputs.append((weights.tril_(start) if causal else weights) @ value[..., seen, :])
    return torch.cat(outputs, -2)


def _dot_with_row(x: Tensor, row: Tensor) -> Tensor:
    """Returns dot products of rows with one row; four times as fast as a product with a column."""
    return (x * row).sum(-1, keepdim=True)


def _attend_in_chunks(
    query: Tensor, key: Tensor, value: Tensor, adds_one: bool = False, is_normalized: bool = False
) -> Tensor:
    """Returns the rows of tril(q k^T) v, divided by their sums unless `is_normalized`.

    With `adds_one`, the scores are q k^T + 1.

    Each chunk is a small triangle plus the running sum of the chunks before it. Lengths are
    multiples of CHUNK.
    """
    outputs, row_count = [], 0
    values, keys, ones = (value.new_zeros(1) for _ in range(3))
    for segment in zip(*(x.split(SEGMENT, -2) for x in (query, key, value)), strict=True):
        q, k, v = (x.unflatten(-2, (-1, CHUNK)) for x in segment)
        scores = ((q @ k.mT).add_(1) if adds_one else q @ k.mT).tril_()
        sum_before, values = _running_sums(values, k.mT @ v)
        output = (scores @ v).add_(q @ sum_before)
        if adds_one:
            sum_before, ones = _running_sums(ones, v.sum(-2, keepdim=True))
            output += sum_before
        if not is_normalized:
            sum_before, keys = _running_sums(keys, k.sum(-2, keepdim=True))
            total = _dot_with_row(q, sum_before).add_(scores.sum(-1, keepdim=True))
            if adds_one:
                chunks = torch.arange(q.shape[-3], device=q.device)[:, None, None]
                total += row_count + CHUNK * chunks
            output /= total
        outputs.append(output.flatten(-3, -2))
        row_count += SEGMENT
    return torch.cat(outputs, -2)


def _running_sums(state: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum before each chunk, and after the last one."""
    sums = parts.cumsum(-3).add_(state)
    return sums - parts, sums[..., -1:, :, :]


PLAIN_TORCH: Final[Mapping[str, Callable[..., Tensor]]] = {
    "efficient": _efficient,
    "linear": _linear,
    "linear_layer": lambda x, weight: linear(x, weight),
    "linformer": _linformer,
    "mean": _mean,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
    "taylor": _taylor,
}
