"""Efficient attention in float32, with e^k not shifted by a maximum.

`average_by_channels` averages values by a softmax of each key channel over positions, and these
averages by a softmax of queries over channels.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from qkv.attention.common.feature_sums import SharedSums, apply_state
from qkv.attention.common.guards import are_deferred, items_within, largest_size
from qkv.attention.common.row_masks import mask_padding

_LEAST = -16.0  # smallest key: S over a channel's sum of e^k is below 2**24
_MAX_SUM = 2.0**24  # largest sum of e^k: no key is above 17
_SIZES = (2.0**-60, 1e15)  # sizes of averages between which nothing has overflowed


def average_by_channels(
    query_BGKLD: Tensor, key_BGSD: Tensor, value_BGSE: Tensor, padding_BS: Tensor | None
) -> tuple[Tensor | None, list[bool]]:
    """Returns softmax_D(Q) softmax_S(K)^T V, (B, G, K, L, E), and True for each item that is right.

    The first is None if no item is right. Each item is judged by itself, by its few averages
    instead of its keys and values. The underflow in a right item amounts to less than the smallest
    normal number.
    """
    key, value = mask_padding(padding_BS, key_BGSD), mask_padding(padding_BS, value_BGSE)
    fits = items_within(key.amin((1, 2, 3)), _LEAST, math.inf)
    if not any(fits):
        return None, fits
    values_BGED, ones_BG1D = SharedSums.of(mask_padding(padding_BS, key, -torch.inf), value, _power)
    average_BGED = values_BGED.div_(ones_BG1D)
    size_B = average_BGED.abs().amax((1, 2, 3))
    total_fits = items_within(ones_BG1D.amax((1, 2, 3)), 0.0, _MAX_SUM)
    size_fits = items_within(size_B, *_SIZES)
    fits = [all(three) for three in zip(fits, total_fits, size_fits, strict=True)]
    if not any(fits):
        return None, fits
    (output,) = apply_state(query_BGKLD, (average_BGED,), partial(torch.softmax, dim=-1))
    _clamp(output, value, size_B)
    return output, fits


def _clamp(output_BGKLE: Tensor, value_BGSE: Tensor, size_B: Tensor) -> None:
    """Clamps averages to the size of the values: they exceed it only by rounding.

    `size_B` is the largest average of a channel. Where it is far smaller than a value, nothing can
    exceed the values, and a CPU saves the pass over them.
    """
    if are_deferred():
        bound_B1111 = value_BGSE.abs().amax((1, 2, 3))[:, None, None, None, None]
        output_BGKLE.clamp_(-bound_B1111, bound_B1111)
        return
    some_B = value_BGSE[:, 0, 0].abs().amax(-1)
    for b, (size, some) in enumerate(zip(size_B.tolist(), some_B.tolist(), strict=True)):
        if not 2 * size <= some:
            bound = float(largest_size(value_BGSE[b]))
            output_BGKLE[b].clamp_(-bound, bound)


def _power(x: Tensor) -> Tensor:
    """Returns e^x, in place. The error exceeds torch's by |x| eps, the time is half of torch's."""
    return x.mul(math.log2(math.e)).exp2_()
