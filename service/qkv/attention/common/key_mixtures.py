"""Linformer's mixtures of keys and values, their scores and averages, without overflow.

No finite input overflows. The entry points are `Path` and `average_mixtures`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.attention.common.guards import are_wide, holds, largest_size
from qkv.attention.common.powers_of_2 import split_exponents, times_power_of_2
from qkv.attention.common.score_blocks import Scores, score_dtype
from qkv.attention.common.visibility import Visibility, row_blocks

_ELEMENTS = 1 << 22  # of a block of rows of a projection
_SIZE = 480  # exponent of scaled rows: a product of two has 2**960, which leaves room for sums


class Path(NamedTuple):
    """The dtype and scaling with which a request is computed, so that nothing overflows.

    Attributes:
        dtype: the dtype of scores and sums; float64 where float32 could overflow.
        shrinks: float64 could overflow too, so powers of two are kept separately.
    """

    dtype: torch.dtype
    shrinks: bool

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor | None, E: Tensor, F: Tensor, scale: float
    ) -> Path:
        exact, (S, D) = score_dtype(query.dtype), key.shape[2:]
        if are_wide():
            return cls(torch.float64, shrinks=False)
        keys = largest_size(E, shared=True) * largest_size(key) * S
        scores = keys * largest_size(query) * D
        values = largest_size(F, shared=True)
        if value is not None:
            values = values * (1.0 + largest_size(value) * S)
        limit = 1e30 if exact == torch.float32 else 1e300
        sizes = (keys, scores, scores * abs(scale), values)
        safe = all(holds(size < limit) for size in sizes)
        return cls(exact if safe else torch.float64, exact == torch.float64 and not safe)

    def mixed(self, projection_RS: Tensor, x_BGSX: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns projection @ x, (B, G, R, X), and the exponents of its rows, (B, G, R, 1).

        Each row is divided by 2 to its exponent; None: no row is divided.
        """
        projection, x = projection_RS.to(self.dtype), x_BGSX.to(self.dtype)
        if not self.shrinks:
            return projection @ x, None
        x, x_exponents = split_exponents(x)
        (B, G, S, X), R = x.shape, len(projection)
        mixed = x.new_empty(B, G, R, X)
        exponents = x_exponents.new_empty(B, G, R, 1)
        projection_exponents = torch.frexp(projection).exponent
        for b, g in np.ndindex(B, G):
            nothing_S = (x[b, g] == 0).all(-1)
            for rows in row_blocks(R, S, _ELEMENTS):
                part, shift = projection[rows].masked_fill(nothing_S, 0.0), x_exponents[b, g].mT
                sizes = (projection_exponents[rows] + shift).masked_fill(part == 0, -5000)
                exponents[b, g, rows] = sizes.amax(-1, keepdim=True) - _SIZE
                mixed[b, g, rows] = times_power_of_2(part, shift - exponents[b, g, rows]) @ x[b, g]
        return mixed, exponents

    def scores(self, query_BHLD: Tensor, key_BGSD: Tensor, E_RS: Tensor, scale: float) -> Scores:
        """Returns the scores of the queries against E K."""
        key, exponents = self.mixed(E_RS, key_BGSD)
        L, R = query_BHLD.shape[2], len(E_RS)
        visible = Visibility(L, R, None, None, False, 0, (0, 0), None, None, self.dtype)
        scores = Scores.of(
            query_BHLD, key, visible, scale, None, 0.0, 0, None, safe=not self.shrinks
        )
        if exponents is None or scores.exponents is None:
            return scores
        query_exponents, key_exponents = scores.exponents
        return scores._replace(
            exponents=(query_exponents, key_exponents + exponents[:, :, None].mT)
        )

    def weights(self, map_BHLR: Tensor, F_RS: Tensor, padding_BS: Tensor | None) -> Tensor:
        """Returns P F, with zeros for padding."""
        F = F_RS.to(self.dtype)
        if self.shrinks:  # an average of F is no larger than F, also if the sum rounds up
            bound = float(largest_size(F)) / 4
            weights = (map_BHLR @ (F / 4)).clamp_(-bound, bound).mul_(4)
        else:
            weights = map_BHLR @ F
        if padding_BS is None:
            return weights
        return weights.masked_fill_(padding_BS[:, None, None], 0.0)


def average_mixtures(map_BHLR: Tensor, value_BGRE: Tensor, exponents_BGR1: Tensor | None) -> Tensor:
    """Returns P (F V), (B, H, L, E)."""
    map_BGKLR = map_BHLR.unflatten(1, (value_BGRE.shape[1], -1))
    if exponents_BGR1 is None:
        return torch.einsum("bgklr,bgre->bgkle", map_BGKLR, value_BGRE).flatten(1, 2)
    exponents = exponents_BGR1[:, :, None].mT
    sizes = torch.frexp(map_BGKLR).exponent + exponents
    top = sizes.masked_fill(map_BGKLR == 0, -10000).amax(-1, keepdim=True)
    map_BGKLR = times_power_of_2(map_BGKLR, exponents - top)
    average = torch.einsum("bgklr,bgre->bgkle", map_BGKLR, value_BGRE)
    return times_power_of_2(average, top).flatten(1, 2)
