"""Dropout as a hash of (seed, plane, row, key): the same bits alone, in any batch, on any device.

The mask of a random generator would depend on the position of a request in its batch. The
definition, in unsigned 32-bit arithmetic, with `mix` the hash "lowbias32" of C. Wellons
(Prospecting for Hash Functions, 2018)::

    r = mix(mix(mix(low32(seed)) ^ high32(seed)) ^ plane)    plane = b * H + h within the request
    u = mix(mix(r ^ i) ^ mix(~j))                            i query row, j key
    kept where u >= floor(dropout * 2**32)
"""

from __future__ import annotations

import torch
from torch import Tensor

_SIGN = -(1 << 31)


def keep_mask(dropout: float, seed: int, plane_BH: Tensor, rows: slice, keys: slice) -> Tensor:
    """Returns True for each weight that dropout keeps: (B, H, R, S), for some rows and keys.

    Args:
        dropout: probability of dropping, 0 <= dropout < 1.
        seed: 0 <= seed < 2**64.
        plane_BH: int64, b * H + h of each plane within its own request.
        rows, keys: ranges within the whole matrix.
    """
    device = plane_BH.device
    seeded = _mix(_mix(_word(seed, device)) ^ _word(seed >> 32, device))
    plane_BH11 = _mix(seeded ^ plane_BH.to(torch.int32))[:, :, None, None]
    row_R1 = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=device)[:, None]
    key_S = torch.arange(keys.start, keys.stop, dtype=torch.int32, device=device)
    hash_BHRS = _mix(_mix(plane_BH11 ^ row_R1) ^ _mix(~key_S))
    threshold = int(dropout * 2**32)
    # int32 compares as signed; with the sign bit of both sides flipped it compares as unsigned
    return (hash_BHRS ^ _SIGN) >= threshold + _SIGN


def _word(value: int, device: torch.device) -> Tensor:
    low = value & 0xFFFFFFFF
    return torch.full((), low - (1 << 32) if low >> 31 else low, dtype=torch.int32, device=device)


def _mix(x: Tensor) -> Tensor:
    """Computes lowbias32 on int32. Products wrap; `>>` is arithmetic, so the sign is masked off."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)), (16, 1)):
        high = x >> shift
        high &= (1 << (32 - shift)) - 1
        high ^= x
        high *= factor
        x = high
    return x
