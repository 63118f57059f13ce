"""A linear recurrence over tokens, computed a chunk at a time as products of matrices.

Of each plane a matrix S (D, E) is the state. A token t decays it, erases, writes and reads:
S <- exp(g_t) S; u_t = w_t - S^T e_t; S <- S + k_t u_t^T; o_t = q_t^T S.

Within a chunk G_i is the sum of g up to token i, P_ij = sum_d q_id k_jd exp(G_id - G_jd) for j <= i
and M_ij = sum_d e_id k_jd exp(G_id - G_jd) for j < i. Then u = (I + M)^-1 (w - (e exp(G)) S) and
o = (q exp(G)) S + P u: Yang et al., Gated Delta Networks, arXiv:2412.06464, section 3.3.

A difference of two sums lacks the digits that the larger ones do not have: behind decays of -1000,
it is off by 1e-11. That is nothing for numbers in float32. For those in float64, each decay is a
multiple of a power of two, whose sums are exact, and a small rest, whose factors the vectors take.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

_BLOCK: Final = 16  # rows whose channels decay pair by pair: see `_pairs_by_channel`
_FORGOTTEN: Final = -1000.0  # exp of it is 0


class Tokens(NamedTuple):
    """The vectors of N tokens of X planes; K queries read each state.

    Attributes:
        query_XKND, key_XND, write_XNE: q, k and w.
        erase_XND: e; None: nothing is erased.
        decay_XNZ: g in float64, Z is 1 or D; None: nothing decays.
    """

    query_XKND: Tensor
    key_XND: Tensor
    write_XNE: Tensor
    erase_XND: Tensor | None
    decay_XNZ: Tensor | None


class Chunks(NamedTuple):
    """Y chunks of C tokens, without the state before each chunk.

    Attributes:
        query_XYKCD: q exp(G), which reads the state before the chunk.
        key_XYCD: k exp(G_C - G), which writes to the state behind the chunk.
        pairs_XYKCC: P.
        mixing_XYCC: M; None: nothing is erased.
        write_XYCE: w.
        erase_XYCD: e exp(G); None: nothing is erased.
        decay_XYZ: exp(G_C); None: nothing decays.
    """

    query_XYKCD: Tensor
    key_XYCD: Tensor
    pairs_XYKCC: Tensor
    mixing_XYCC: Tensor | None
    write_XYCE: Tensor
    erase_XYCD: Tensor | None
    decay_XYZ: Tensor | None

    @classmethod
    def of(cls, tokens: Tokens, C: int, rows: slice = slice(None)) -> Chunks:
        """Cuts N tokens into N / C chunks. Only the queries at `rows` of each are read."""
        key = tokens.key_XND.unflatten(1, (-1, C))
        query = tokens.query_XKND.unflatten(2, (-1, C)).movedim(1, 2)
        write, erase, decay = tokens.write_XNE.unflatten(1, (-1, C)), tokens.erase_XND, None
        if erase is not None:
            erase = erase.unflatten(1, (-1, C))
        if tokens.decay_XNZ is None:
            pairs = (query @ key.mT[:, :, None]).tril()
            mixing = None if erase is None else (erase @ key.mT).tril(-1)
            return cls(query, key, pairs, mixing, write, erase, decay)
        decay = tokens.decay_XNZ.clamp(min=_FORGOTTEN).unflatten(1, (-1, C))
        last = torch.ones_like(decay[:, :, -1], dtype=key.dtype)
        if key.dtype == torch.float64:
            rest = _rest(decay)
            decay, factors = decay - rest, rest.cumsum(2).exp()
            query, key, last = query * factors[:, :, None], key / factors, factors[:, :, -1]
            erase = None if erase is None else erase * factors
        sums = decay.cumsum(2)
        if sums.shape[-1] == 1:
            pairs, mixing = _pairs(query, erase, key, sums)
        else:
            pairs, mixing = _pairs_by_channel(query, erase, key, sums, range(C)[rows])
        from_start = sums.exp().to(key.dtype)
        after = torch.nn.functional.pad(decay[:, :, 1:], (0, 0, 0, 1))
        to_end = after.flip(2).cumsum(2).flip(2).exp().to(key.dtype)
        if erase is not None:
            erase = erase * from_start
        return cls(
            query * from_start[:, :, None], key * (to_end * last[:, :, None]), pairs, mixing, write,
            erase, from_start[:, :, -1] * last,
        )  # fmt: skip

    def run(self, state_XDE: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what the queries read, (X, K, N, E), and the state behind the last chunk."""
        written, erased = self.write_XYCE, self.erase_XYCD
        if erased is not None:
            written, erased = self._solve(torch.cat([written, erased], -1)).split(
                [written.shape[-1], erased.shape[-1]], -1
            )
        states, updates = [], []
        for y in range(written.shape[1]):
            states.append(state_XDE)
            update_XCE = written[:, y]
            if erased is not None:
                update_XCE = torch.baddbmm(update_XCE, erased[:, y], state_XDE, alpha=-1)
            updates.append(update_XCE)
            state_XDE = self._advance(y, state_XDE, update_XCE)
        return self._read(torch.stack(states, 1), torch.stack(updates, 1)), state_XDE

    def run_one(self, state_XDE: Tensor, is_full: bool) -> tuple[Tensor, Tensor]:
        """Returns the same for one chunk, with half the work; the state only if `is_full`."""
        update_XYCE, state_XYDE = self.write_XYCE, state_XDE[:, None]
        if self.erase_XYCD is not None:
            update_XYCE = self._solve(update_XYCE - self.erase_XYCD @ state_XYDE)
        read = self._read(state_XYDE, update_XYCE)
        return read, self._advance(0, state_XDE, update_XYCE[:, 0]) if is_full else state_XDE

    def _solve(self, x_XYCE: Tensor) -> Tensor:
        """Returns (I + M)^-1 x."""
        assert self.mixing_XYCC is not None
        solved: Tensor = torch.linalg.solve_triangular(
            self.mixing_XYCC, x_XYCE, upper=False, unitriangular=True
        )
        return solved

    def _advance(self, y: int, state_XDE: Tensor, update_XCE: Tensor) -> Tensor:
        """Returns the state behind a chunk."""
        if self.decay_XYZ is not None:
            state_XDE = state_XDE * self.decay_XYZ[:, y, :, None]
        return torch.baddbmm(state_XDE, self.key_XYCD[:, y].mT, update_XCE)

    def _read(self, state_XYDE: Tensor, update_XYCE: Tensor) -> Tensor:
        """Returns what the queries read of the states before the chunks, and within them."""
        K = self.query_XYKCD.shape[2]
        read_XYKCE = self.query_XYKCD @ state_XYDE[:, :, None]
        read_XYKCE = torch.baddbmm(
            read_XYKCE.flatten(0, 2), self.pairs_XYKCC.flatten(0, 2),
            update_XYCE[:, :, None].expand(-1, -1, K, -1, -1).flatten(0, 2),
        ).view_as(read_XYKCE)  # fmt: skip
        return read_XYKCE.movedim(2, 1).flatten(2, 3)

    def row_weights(self, later_XKRD: Tensor, own: slice) -> tuple[Tensor, Tensor]:
        """Returns the weights of one chunk's w in rows of A, and what the rows read before it.

        A row r behind the chunk reads the state behind it. Its weights are a = r K^T (I + M)^-1, so
        that it reads r exp(G_C) - a E of the state before the chunk.

        Args:
            later_XKRD: the rows r.
            own: the rows of the chunk itself that come first.

        Returns:
            For these and the later rows together, (X, K, R, C) and (X, K, R, D).
        """
        key_XCD, weights = self.key_XYCD[:, 0], self.pairs_XYKCC[:, 0, :, own]
        weights = torch.cat([weights, later_XKRD @ key_XCD.mT[:, None]], 2)
        if self.decay_XYZ is not None:
            later_XKRD = later_XKRD * self.decay_XYZ[:, :, None]
        rows = torch.cat([self.query_XYKCD[:, 0, :, own], later_XKRD], 2)
        if self.mixing_XYCC is not None and self.erase_XYCD is not None:
            weights = torch.linalg.solve_triangular(
                self.mixing_XYCC, weights, upper=False, left=False, unitriangular=True
            )
            rows = rows - weights @ self.erase_XYCD
        return weights, rows


def _rest(decay_XYCZ: Tensor) -> Tensor:
    """Returns what each decay has beside a number of so few digits that C of them add exactly.

    It is a constant for the gradient, which the multiples have as a whole.
    """
    digits = 53 - math.ceil(math.log2(-_FORGOTTEN * decay_XYCZ.shape[2]))
    constant = decay_XYCZ.detach()
    return constant - (constant * 2.0**digits).round() * 2.0**-digits


def _pairs(
    query_XYKCD: Tensor, erase_XYCD: Tensor | None, key_XYCD: Tensor, sums_XYC1: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Returns P and M where all channels decay alike."""
    decay_XYCC = _decay(sums_XYC1, key_XYCD.dtype)[..., 0]
    pairs = (query_XYKCD @ key_XYCD.mT[:, :, None]).tril() * decay_XYCC[:, :, None]
    if erase_XYCD is None:
        return pairs, None
    return pairs, (erase_XYCD @ key_XYCD.mT).tril(-1) * decay_XYCC


def _pairs_by_channel(
    query_XYKCD: Tensor,
    erase_XYCD: Tensor | None,
    key_XYCD: Tensor,
    sums_XYCD: Tensor,
    read_rows: range,
) -> tuple[Tensor, Tensor | None]:
    """Returns P and M where each channel has its own decay.

    The rows are cut into blocks. Between a block and the keys before it, the decay is a product of
    that up to the block and that within it: neither overflows. Within a block each pair of tokens
    has its own decay. Blocks without a row that is read are zero, but M needs all.
    """
    C, rows_of = key_XYCD.shape[2], query_XYKCD
    if erase_XYCD is not None:
        rows_of = torch.cat([query_XYKCD, erase_XYCD[:, :, None]], 2)
    blocks = []
    for start in range(0, C, _BLOCK):
        rows = slice(start, min(C, start + _BLOCK))
        if erase_XYCD is None and not (read_rows.start < rows.stop and start < read_rows.stop):
            blocks.append(rows_of.new_zeros(*rows_of.shape[:3], rows.stop - start, C))
            continue
        part, sums = rows_of[:, :, :, rows], sums_XYCD[:, :, rows]
        decayed = _decay(sums, part.dtype) * key_XYCD[:, :, None, rows]
        block = [(part[..., None, :] @ decayed.mT[:, :, None]).squeeze(-2)]
        if start:
            before = sums_XYCD[:, :, start - 1 : start]
            near = part * (sums - before).to(part.dtype).exp()[:, :, None]
            far = key_XYCD[:, :, :start] * (before - sums_XYCD[:, :, :start]).to(part.dtype).exp()
            block.insert(0, near @ far.mT[:, :, None])
        blocks.append(torch.nn.functional.pad(torch.cat(block, -1), (0, C - rows.stop)))
    both = torch.cat(blocks, -2)
    K = query_XYKCD.shape[2]
    return both[:, :, :K], None if erase_XYCD is None else both[:, :, K].tril(-1)


def _decay(sums_XYCZ: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns exp(G_i - G_j), (X, Y, C, C, Z): 1 for j = i, and 0 for later keys.

    Their exponents are set before exp. Infinity would have the gradient NaN, and the two gradients
    of a zero, which cancel, would round those of the others.
    """
    one = torch.ones(2 * sums_XYCZ.shape[2:3], dtype=torch.bool, device=sums_XYCZ.device)
    between = sums_XYCZ[:, :, :, None] - sums_XYCZ[:, :, None]
    between.masked_fill_(one.triu()[..., None], 0.0)
    between.masked_fill_(one.triu(1)[..., None], -torch.inf)
    return between.to(dtype).exp()
