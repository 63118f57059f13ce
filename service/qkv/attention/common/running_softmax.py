"""A causal softmax per channel over the keys up to each query, without overflow or underflow.

A later key may exceed an earlier one by any amount. A shift shared by all rows would then make the
exponentials of early keys underflow. The entry point is `RunningSoftmax`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkv.attention.common.visibility import row_blocks

_CHUNK = 16  # keys of a chunk; each query has exponentials of its own for its last chunk
_ELEMENTS = 1 << 22  # of those exponentials that are held at once


class RunningSoftmax(NamedTuple):
    """The matrix A_ij = sum_c q_ic e^(k_jc - m_ic) / Z_ic of one item.

    m_ic is the largest key up to query i's position. The exponentials of the chunk that holds the
    position are computed for each query. All earlier chunks are a state, shifted by the largest key
    among them. No exponent is above 0, so nothing overflows, and numbers that underflow are
    negligible in the row's sum.

    Attributes:
        query_GKLD: q of one item; the K heads that read one key head side by side.
        key_GSD: k of the item; -inf for padding.
        largest_GSD: the largest key up to each position.
        offset: the position of the first query on the key axis.
    """

    query_GKLD: Tensor
    key_GSD: Tensor
    largest_GSD: Tensor
    offset: int

    @classmethod
    def of(cls, query_GKLD: Tensor, key_GSD: Tensor, offset: int) -> RunningSoftmax:
        """Returns the matrix of an item, in the dtype of its query and key."""
        largest = key_GSD.cummax(1).values
        # a row of padding alone would give inf - inf
        largest.masked_fill_(largest == -torch.inf, 0.0)
        return cls(query_GKLD, key_GSD, largest, offset)

    def output(self, value_GSE: Tensor) -> Tensor:
        """Returns A @ value, (G, K, L, E). The padding of `value_GSE` is zero."""
        (G, K, L, D), E = self.query_GKLD.shape, value_GSE.shape[2]
        output = self.query_GKLD.new_zeros(G, K, L, E)
        value_GSX = pad(value_GSE, (0, 1), value=1.0)  # X is E + 1: a column of ones sums Z
        state_GDX = value_GSX.new_zeros(G, D, E + 1)
        for keys, blocks in self._chunks(slice(0, L)):
            for rows in blocks:
                far, near = self._parts(rows, keys, state_GDX[..., -1])
                block = far @ state_GDX[:, None, :, :-1] + near @ value_GSE[:, None, keys]
                output[:, :, rows] = block
            self._advance(state_GDX, keys, value_GSX)
        return output

    def gradients(self, value_GSE: Tensor, grad_GKLE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of q, k and the values; `grad_GKLE` is that of A @ value.

        The contribution of later queries to the keys of a chunk is a state too. It is shifted by
        the largest key up to the chunk's last, which is no larger than m_ic of any later query.
        From the last chunk to the first, no exponent is therefore above 0 either.
        """
        (G, _, L, D), E = self.query_GKLD.shape, value_GSE.shape[2]
        share, slope = self._slopes(value_GSE, grad_GKLE)
        key, value = torch.zeros_like(self.key_GSD), torch.zeros_like(value_GSE)
        value_GSX = pad(value_GSE, (0, 1), value=-1.0)
        state_GDX = value_GSX.new_zeros(G, D, E + 1)  # the last column is subtracted from v dY
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
        """Returns q_ic / Z_ic and the gradient of q_ic, (G, K, L, D); 0 for rows without keys."""
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
                block = far_GRD[:, None] * (grad @ state_GDX[:, None, :, :-1].mT)
                block += torch.einsum("gkrc,grcd->gkrd", score_GKRC, near_GRCD)
                slope[:, :, rows] = block.div_(total_GKRD)
            self._advance(state_GDX, keys, value_GSX)
        return share, slope

    def block(self, rows: slice) -> Tensor:
        """Returns rows of A, (G, K, R, S)."""
        (G, K, _, _), S = self.query_GKLD.shape, self.key_GSD.shape[1]
        block = self.query_GKLD.new_zeros(G, K, rows.stop - rows.start, S)
        for keys, blocks in self._chunks(rows):
            if not blocks:
                continue
            earlier_GSD = (self.key_GSD[:, : keys.start] - self._before(keys)[:, None]).exp()
            for some in blocks:
                far, near = self._parts(some, keys, earlier_GSD.sum(1))
                out = slice(some.start - rows.start, some.stop - rows.start)
                block[:, :, out, : keys.start] = far @ earlier_GSD[:, None].mT
                block[:, :, out, keys] = near
        return block

    def _chunks(self, rows: slice) -> Iterator[tuple[slice, list[slice]]]:
        """Yields chunks of keys, each with the rows whose last key is in the chunk, in blocks."""
        (G, S, D), K = self.key_GSD.shape, self.query_GKLD.shape[1]
        for start in range(0, S, _CHUNK):
            keys = slice(start, min(S, start + _CHUNK))
            first = max(rows.start, start - self.offset)
            stop = rows.stop if keys.stop == S else min(rows.stop, keys.stop - self.offset)
            blocks = row_blocks(max(0, stop - first), G * _CHUNK * (D + K), _ELEMENTS)
            yield keys, [slice(first + b.start, first + b.stop) for b in blocks]

    def _before(self, keys: slice) -> Tensor:
        """Returns the largest key before these, (G, D).

        Before the first key it is -inf, whose exponential removes any state.
        """
        if keys.start == 0:
            return torch.full_like(self.largest_GSD[:, 0], -torch.inf)
        return self.largest_GSD[:, keys.start - 1]

    def _within(self, keys: slice) -> tuple[Tensor, Tensor]:
        """Returns two exponentials, both shifted by the largest key up to the last of these keys.

        They are of the largest key before these, (G, D), and of each of these, (G, C, D).
        """
        largest_GD = self.largest_GSD[:, keys.stop - 1]
        grown_GCD = (self.key_GSD[:, keys] - largest_GD[:, None]).exp()
        return (self._before(keys) - largest_GD).exp(), grown_GCD

    def _advance(self, state_GDX: Tensor, keys: slice, value_GSX: Tensor) -> None:
        """Adds these keys to the state of the earlier keys."""
        fall_GD, grown_GCD = self._within(keys)
        state_GDX *= fall_GD[..., None]
        state_GDX += grown_GCD.mT @ value_GSX[:, keys]

    def _parts(self, rows: slice, keys: slice, ones_GD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the factors of these rows for the state and for each key of their last chunk.

        They are (G, K, R, D) and (G, K, R, C). `ones_GD` is the state's sum of exponentials.
        """
        far_GRD, near_GRCD = self._exponentials(rows, keys)
        total_GRD = _total(far_GRD, near_GRCD, ones_GD)
        query_GKRD = self.query_GKLD[:, :, rows] / total_GRD[:, None]
        near_GKRC = torch.einsum("gkrd,grcd->gkrc", query_GKRD, near_GRCD)
        return query_GKRD * far_GRD[:, None], near_GKRC

    def _exponentials(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """Returns two exponentials, both shifted by the largest key that each row sees.

        They are of the largest key before `keys`, (G, R, D), and of each key of the chunk, (G, R,
        C, D), with 0 for keys that a row does not see. `keys` is the chunk of the rows' last keys.
        """
        last_R = torch.arange(rows.start, rows.stop, device=self.key_GSD.device) + self.offset
        last_R.clamp_(max=self.key_GSD.shape[1] - 1)
        largest_GRD = self.largest_GSD[:, last_R]
        far_GRD = (self._before(keys)[:, None] - largest_GRD).exp()
        near_GRCD = self.key_GSD[:, None, keys] - largest_GRD[:, :, None]
        key_C = torch.arange(keys.start, keys.stop, device=last_R.device)
        unseen_RC = key_C > last_R[:, None]
        return far_GRD, near_GRCD.masked_fill_(unseen_RC[..., None], -torch.inf).exp_()


def _total(far_GRD: Tensor, near_GRCD: Tensor, ones_GD: Tensor) -> Tensor:
    """Returns Z of rows, (G, R, D), or 1 where Z is 0.

    `ones_GD` is the state's sum of exponentials.
    """
    total_GRD = far_GRD * ones_GD[:, None] + near_GRCD.sum(2)
    return total_GRD.masked_fill(total_GRD == 0, 1.0)
