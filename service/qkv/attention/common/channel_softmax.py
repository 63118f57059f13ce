"""Efficient attention in float32, with e^k not shifted by a maximum.

`average_by_channels` averages values by a softmax of each key channel over positions, and these
averages by a softmax of queries over channels.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from qkv.attention.common.feature_sums import State, apply_state
from qkv.attention.common.row_masks import mask_padding
from qkv.attention.common.score_blocks import largest_size

__all__ = ["average_by_channels"]

_LEAST = -16.0  # smallest key: S over a channel's sum of e^k is below 2**24
_MOST = 2.0**24  # largest sum of e^k: no key is above 17
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
    fits = [least >= _LEAST for least in key.amin((1, 2, 3)).tolist()]
    if not any(fits):
        return None, fits
    values_BGED, ones_BG1D = State.of(mask_padding(padding_BS, key, -torch.inf), value, _power)
    average_BGED = values_BGED.div_(ones_BG1D)
    totals = ones_BG1D.amax((1, 2, 3)).tolist()
    sizes = average_BGED.abs().amax((1, 2, 3)).tolist()
    for b, (total, size) in enumerate(zip(totals, sizes, strict=True)):
        fits[b] &= total <= _MOST and _SIZES[0] <= size <= _SIZES[1]
    if not any(fits):
        return None, fits
    (output,) = apply_state(query_BGKLD, (average_BGED,), partial(torch.softmax, dim=-1))
    # an average is no larger than the values it averages, also after rounding. Rounding can exceed
    # that only where the averages of channels are not far smaller than the values
    for b, some in enumerate(value[:, 0, 0].abs().amax(-1).tolist()):
        if not 2 * sizes[b] <= some:
            bound = largest_size(value[b])
            output[b].clamp_(-bound, bound)
    return output, fits


def _power(x: Tensor) -> Tensor:
    """Returns e^x, in place. The error exceeds torch's by |x| eps, the time is half of torch's."""
    return x.mul(math.log2(math.e)).exp2_()
