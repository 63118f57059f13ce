"""Softmaxes over the keys up to each query, channel by channel, where a later key may be larger
than an earlier one by any amount: a shift that all share would leave nothing of the early ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkv.attention.common.visibility import row_blocks

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
            self._advance(state_GDX, keys, value_GSX)
        return output

    def gradients(self, value_GSE: Tensor, grad_GKLE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of q, k and the values, grad being that of A @ value.

        What later queries give the keys of a chunk is a state as well, shifted by the largest key
        up to that chunk's last, which is no larger than any m_ic of theirs; so from the last chunk
        to the first no exponent is above 0 either.
        """
        (G, _, L, D), E = self.query_GKLD.shape, value_GSE.shape[2]
        share, slope = self._slopes(value_GSE, grad_GKLE)
        key, value = torch.zeros_like(self.key_GSD), torch.zeros_like(value_GSE)
        value_GSX = pad(value_GSE, (0, 1), value=-1.0)
        state_GDX = value_GSX.new_zeros(G, D, E + 1)  # beside dY stands what v dY is less by
        for keys, blocks in reversed(list(self._chunks(slice(0, L)))):
            fall_GD, grown_GCD = self._within(keys)
            key[:, keys] = grown_GCD * (value_GSX[:, keys] @ state_GDX.mT)
            value[:, keys] = grown_GCD @ state_GDX[..., :-1]
            state_GDX *= fall_GD[..., None]
            for rows in blocks:
                far_GRD, near_GRCD = self._exponentials(rows, keys)
                grad, share_GKRD = grad_GKLE[:, :, rows], share[:, :, rows]
                less_GRD = (share_GKRD * slope[:, :, rows]).sum(1)
                score_GKRC = grad @ value_GSE[:, None, keys].mT
                each_GRCD = torch.einsum("gkrc,gkrd->grcd", score_GKRC, share_GKRD)
                key[:, keys] += each_GRCD.sub_(less_GRD[:, :, None]).mul_(near_GRCD).sum(1)
                near_GKRC = torch.einsum("gkrd,grcd->gkrc", share_GKRD, near_GRCD)
                value[:, keys] += torch.einsum("gkrc,gkre->gce", near_GKRC, grad)
                far_GKRD = share_GKRD * far_GRD[:, None]
                state_GDX[..., :-1] += torch.einsum("gkrd,gkre->gde", far_GKRD, grad)
                state_GDX[..., -1] += (less_GRD * far_GRD).sum(1)
        return slope, key, value

    def _slopes(self, value_GSE: Tensor, grad_GKLE: Tensor) -> tuple[Tensor, Tensor]:
        """q_ic / Z_ic and the gradient of q_ic, (G, K, L, D); zeros for rows that see nothing."""
        (G, _, L, D), E = self.query_GKLD.shape, value_GSE.shape[2]
        share, slope = torch.zeros_like(self.query_GKLD), torch.zeros_like(self.query_GKLD)
        value_GSX = pad(value_GSE, (0, 1), value=1.0)
        state_GDX = value_GSX.new_zeros(G, D, E + 1)
        for keys, blocks in self._chunks(slice(0, L)):
            for rows in blocks:
                far_GRD, near_GRCD = self._exponentials(rows, keys)
                total_GKRD = _total(far_GRD, near_GRCD, state_GDX[..., -1])[:, None]
                share[:, :, rows] = self.query_GKLD[:, :, rows] / total_GKRD
                grad = grad_GKLE[:, :, rows]
                score_GKRC = grad @ value_GSE[:, None, keys].mT
                made = far_GRD[:, None] * (grad @ state_GDX[:, None, :, :-1].mT)
                made += torch.einsum("gkrc,grcd->gkrd", score_GKRC, near_GRCD)
                slope[:, :, rows] = made.div_(total_GKRD)
            self._advance(state_GDX, keys, value_GSX)
        return share, slope

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

    def _within(self, keys: slice) -> tuple[Tensor, Tensor]:
        """What the largest key before these, (G, D), and each of them, (G, C, D), are beside the
        largest up to the last of them."""
        most_GD = self.most_GSD[:, keys.stop - 1]
        grown_GCD = (self.key_GSD[:, keys] - most_GD[:, None]).exp()
        return (self._before(keys) - most_GD).exp(), grown_GCD

    def _advance(self, state_GDX: Tensor, keys: slice, value_GSX: Tensor) -> None:
        """Adds these keys to the state of those before them."""
        fall_GD, grown_GCD = self._within(keys)
        state_GDX *= fall_GD[..., None]
        state_GDX += grown_GCD.mT @ value_GSX[:, keys]

    def _parts(self, rows: slice, keys: slice, ones_GD: Tensor) -> tuple[Tensor, Tensor]:
        """What these rows take of the state, (G, K, R, D), and of each key of the chunk that their
        last key is in, (G, K, R, C); `ones` is the state's sum of exponentials."""
        far_GRD, near_GRCD = self._exponentials(rows, keys)
        total_GRD = _total(far_GRD, near_GRCD, ones_GD)
        query_GKRD = self.query_GKLD[:, :, rows] / total_GRD[:, None]
        near_GKRC = torch.einsum("gkrd,grcd->gkrc", query_GKRD, near_GRCD)
        return query_GKRD * far_GRD[:, None], near_GKRC

    def _exponentials(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """Of the largest key before these, (G, R, D), and of each key that these rows see of the
        chunk that their last is in, (G, R, C, D), less the largest that they see."""
        last_R = torch.arange(rows.start, rows.stop, device=self.key_GSD.device) + self.offset
        last_R.clamp_(max=self.key_GSD.shape[1] - 1)
        most_GRD = self.most_GSD[:, last_R]
        far_GRD = (self._before(keys)[:, None] - most_GRD).exp()
        near_GRCD = self.key_GSD[:, None, keys] - most_GRD[:, :, None]
        key_C = torch.arange(keys.start, keys.stop, device=last_R.device)
        unseen_RC = key_C > last_R[:, None]
        return far_GRD, near_GRCD.masked_fill_(unseen_RC[..., None], -torch.inf).exp_()


def _total(far_GRD: Tensor, near_GRCD: Tensor, ones_GD: Tensor) -> Tensor:
    """Z of rows, (G, R, D), `ones` being the state's sum of exponentials; 1 where it is 0."""
    total_GRD = far_GRD * ones_GD[:, None] + near_GRCD.sum(2)
    return total_GRD.masked_fill(total_GRD == 0, 1.0)
