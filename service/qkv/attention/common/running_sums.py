"""Sums of the rows up to each row, fast on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.attention.common.visibility import row_blocks

_CHUNK = 32  # rows that are summed one after another
_SEGMENT = 512  # rows of the chunks that are processed together
_SHORT = 128  # up to so many rows, one cumsum is as fast
_CACHED = 1 << 18  # numbers that fit into the cache


def running_sums(value_BHSE: Tensor, exact: torch.dtype) -> Tensor:
    """Returns the sum up to each row.

    torch's cumsum of a chunk accumulates in float64 and rounds each sum once. The total before a
    chunk is a sum of such sums in float64. It is rounded and added, which makes 3 roundings in
    total. This is faster than one cumsum over all rows, because it stays in the cache. The chunks
    do not depend on B and H, so the bits do not either.
    """
    B, H, S, E = value_BHSE.shape
    if value_BHSE.device.type != "cpu":
        return value_BHSE.cumsum(2, dtype=torch.float64).to(exact)
    if S <= _SHORT:
        return value_BHSE.cumsum(2, dtype=exact)
    cut = S - S % _CHUNK
    sums_BHSE = torch.empty_like(value_BHSE, dtype=exact, memory_format=torch.contiguous_format)
    value, sums = value_BHSE.flatten(0, 1), sums_BHSE.flatten(0, 1)
    for heads in row_blocks(B * H, min(S, _SEGMENT) * E, _CACHED):
        before = sums.new_zeros(heads.stop - heads.start, 1, E, dtype=torch.float64)
        for rows in [*row_blocks(cut, 1, _SEGMENT), slice(cut, S)]:
            if rows.start == rows.stop:
                continue
            chunks = sums[heads, rows].unflatten(1, (-1, min(_CHUNK, rows.stop - rows.start)))
            part = value[heads, rows].unflatten(1, chunks.shape[1:3])
            torch.cumsum(part, 2, dtype=exact, out=chunks)
            totals = torch.cat([before, chunks[:, :, -1]], 1).cumsum(1)
            chunks += totals[:, :-1, None].to(exact)
            before = totals[:, -1:]
    return sums_BHSE
