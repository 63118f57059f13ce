"""Softmaxes over the keys up to each query, channel by channel, where a later key may be larger
than an earlier one by any amount: a shift that all share would leave nothing of the early ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkv.attention._visibility import row_blocks

__all__ = ["Steep"]

_CHUNK = 16  # keys whose exponentials are made once for each query that sees no later chunk
_ELEMENTS = 1 << 22  # of those exponentials at a time


class Steep(NamedTuple):
    """A_ij = sum_c q_ic e^(k_jc - m_ic) / Z_ic, m_ic the largest key up to query i's position.

    The keys of the chunk that the position is in are taken so, one by one. All before it are a
    state, shifted by the largest among them. No exponent is above 0, so nothing overflows, and
    what underflows is nothing beside the row's sum.

    Attributes:
        query_GKLD: q of one item; the K heads that read one key head side by side.
        key_GSD: its k; -inf for padding.
        most_GSD: the largest key up to each.
        offset: the position of the first query on the key axis.
    """

    query_GKLD: Tensor
    key_GSD: Tensor
    most_GSD: Tensor
    offset: int

    @classmethod
    def of(cls, query_GKLD: Tensor, key_GSD: Tensor, offset: int) -> Steep:
        """In the dtype of both."""
        most = key_GSD.cummax(1).values
        most.masked_fill_(most == -torch.inf, 0.0)  # else what is all padding gives inf - inf
        return cls(query_GKLD, key_GSD, most, offset)

    def output(self, value_GSE: Tensor) -> Tensor:
        """A @ value, (G, K, L, E); the value's padding is zeros."""
        (G, K, L, D), E = self.query_GKLD.shape, value_GSE.shape[2]
        output = self.query_GKLD.new_zeros(G, K, L, E)
        value_GSX = pad(value_GSE, (0, 1), value=1.0)  # X is E + 1: what makes Z stands beside it
        state_GDX = value_GSX.new_zeros(G, D, E + 1)
        for keys, blocks in self._chunks(slice(0, L)):
            for rows in blocks:
                far, near = self._parts(rows, keys, state_GDX[..., -1])
                made = far @ state_GDX[:, None, :, :-1] + near @ value_GSE[:, None, keys]
                output[:, :, rows] = made
            after_GD = self.most_GSD[:, keys.stop - 1]
            state_GDX *= (self._before(keys) - after_GD).exp()[..., None]
            grown_GCD = (self.key_GSD[:, keys] - after_GD[:, None]).exp()
            state_GDX += grown_GCD.mT @ value_GSX[:, keys]
        return output

    def block(self, rows: slice) -> Tensor:
        """Rows of A, (G, K, R, S)."""
        (G, K, _, _), S = self.query_GKLD.shape, self.key_GSD.shape[1]
        block = self.query_GKLD.new_zeros(G, K, rows.stop - rows.start, S)
        for keys, blocks in self._chunks(rows):
            if not blocks:
                continue
            earlier_GSD = (self.key_GSD[:, : keys.start] - self._before(keys)[:, None]).exp()
            for some in blocks:
                far, near = self._parts(some, keys, earlier_GSD.sum(1))
                at = slice(some.start - rows.start, some.stop - rows.start)
                block[:, :, at, : keys.start] = far @ earlier_GSD[:, None].mT
                block[:, :, at, keys] = near
        return block

    def _chunks(self, rows: slice) -> Iterator[tuple[slice, list[slice]]]:
        """Chunks of keys, and of these rows those whose last key is in the chunk, in blocks."""
        (G, S, D), K = self.key_GSD.shape, self.query_GKLD.shape[1]
        for start in range(0, S, _CHUNK):
            keys = slice(start, min(S, start + _CHUNK))
            first = max(rows.start, start - self.offset)
            stop = rows.stop if keys.stop == S else min(rows.stop, keys.stop - self.offset)
            blocks = row_blocks(max(0, stop - first), G * _CHUNK * (D + K), _ELEMENTS)
            yield keys, [slice(first + b.start, first + b.stop) for b in blocks]

    def _before(self, keys: slice) -> Tensor:
        """The largest key before these, (G, D); of none, what makes nothing of any state."""
        if keys.start == 0:
            return torch.full_like(self.most_GSD[:, 0], -torch.inf)
        return self.most_GSD[:, keys.start - 1]

    def _parts(self, rows: slice, keys: slice, ones_GD: Tensor) -> tuple[Tensor, Tensor]:
        """What these rows take of the state, (G, K, R, D), and of each key of the chunk that their
        last key is in, (G, K, R, C); `ones` is the state's sum of exponentials."""
        last_R = torch.arange(rows.start, rows.stop, device=ones_GD.device) + self.offset
        last_R.clamp_(max=self.key_GSD.shape[1] - 1)
        most_GRD = self.most_GSD[:, last_R]
        far_GRD = (self._before(keys)[:, None] - most_GRD).exp()
        near_GRCD = self.key_GSD[:, None, keys] - most_GRD[:, :, None]
        unseen_RC = torch.arange(keys.start, keys.stop, device=ones_GD.device) > last_R[:, None]
        near_GRCD = near_GRCD.masked_fill_(unseen_RC[..., None], -torch.inf).exp_()
        total_GRD = far_GRD * ones_GD[:, None] + near_GRCD.sum(2)
        total_GRD = total_GRD.masked_fill(total_GRD == 0, 1.0)
        query_GKRD = self.query_GKLD[:, :, rows] / total_GRD[:, None]
        near_GKRC = torch.einsum("gkrd,grcd->gkrc", query_GKRD, near_GRCD)
        return query_GKRD * far_GRD[:, None], near_GKRC
