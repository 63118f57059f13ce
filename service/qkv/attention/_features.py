"""Attention by features: A_ij = f_i . g_j for features of queries and of keys, without an (L, S)
matrix, causal or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Phi", "back_sums", "sums"]

_CHUNK = 64  # queries whose scores are made, where they see no key past their own
_ROWS = 1024  # keys that are summed in the dtype they come in, and no more
_ELEMENTS = 1 << 17  # of what is made at a time: it stays in the cache

Phi = Callable[[Tensor], Tensor]


def sums(
    query_BGKLF: Tensor,
    key_BGSF: Tensor,
    value_BGSE: Tensor,
    offsets: list[int] | None,
    phi: Phi | None = None,
) -> tuple[Tensor, Tensor]:
    """sum_j (f_i . g_j) v_j, (B, G, K, L, E), and sum_j f_i . g_j, (B, G, K, L, 1), over the keys
    that each query sees.

    A few heads and rows at a time, and no bit depends on how many.

    Args:
        query_BGKLF: features of the queries; the K heads that read one key head side by side.
        key_BGSF: features of the keys, zero for padding.
        value_BGSE: values.
        offsets: each item's position of the first query on the key axis, where a query sees no
            key past its own; None: it sees all.
        phi: makes the features of what came in their place, number by number.
    """
    output = query_BGKLF.new_empty(*query_BGKLF.shape[:-1], value_BGSE.shape[-1])
    total = query_BGKLF.new_empty(*query_BGKLF.shape[:-1], 1)
    tensors = (query_BGKLF, key_BGSF, value_BGSE, output, total)
    for items, offset in _runs(query_BGKLF.shape[0], offsets):
        own = [x[items].flatten(0, 1) for x in tensors]
        at_once = max(1, _ELEMENTS // _per_head(own[0], own[1], own[2], offset))
        for q, k, v, out, sum_ in zip(*(x.split(at_once) for x in own), strict=True):
            heads = _Heads(q, k, v, phi)
            if offset is None:
                heads.fill(out, sum_)
            else:
                heads.fill_causal(out, sum_, offset)
    return output, total


def back_sums(
    key_BGSF: Tensor, query_BGKLF: Tensor, value_BGKLE: Tensor, offsets: list[int] | None
) -> Tensor:
    """sum_i (g_j . f_i) v_i, (B, G, S, E), over the queries i of all heads that see each key j.

    Queries and keys change places, both from the last to the first: as i sees j where
    j <= i + offset, S - 1 - j is to see L - 1 - i where that is at most
    (S - 1 - j) + (L - S + offset).
    """
    if offsets is None:
        return key_BGSF @ (query_BGKLF.flatten(2, 3).mT @ value_BGKLE.flatten(2, 3))
    (B, G, S, _), (K, L) = key_BGSF.shape, query_BGKLF.shape[2:4]
    key_BHSF = key_BGSF.flip(2).unsqueeze(2).expand(-1, -1, K, -1, -1).flatten(1, 2)
    query_BHLF, value_BHLE = (x.flip(3).flatten(1, 2) for x in (query_BGKLF, value_BGKLE))
    backwards = [L - S + offset for offset in offsets]
    made, _ = sums(key_BHSF.unsqueeze(2), query_BHLF, value_BHLE, backwards)
    return made.view(B, G, K, S, -1).sum(2).flip(2)


def _runs(B: int, offsets: list[int] | None) -> Iterator[tuple[slice, int | None]]:
    """Items that have one offset, or none."""
    if offsets is None or len(set(offsets)) == 1:
        yield slice(0, B), offsets[0] if offsets else None
    else:
        yield from ((slice(b, b + 1), offset) for b, offset in enumerate(offsets))


def _per_head(query_NKLF: Tensor, key_NSF: Tensor, value_NSE: Tensor, offset: int | None) -> int:
    """How much of a head is made at the least."""
    (K, L), S = query_NKLF.shape[1:3], key_NSF.shape[1]
    rows = min(_CHUNK if offset is not None else _ROWS, max(K * L, S))
    return max(1, rows * max(key_NSF.shape[2], value_NSE.shape[2]))


class _State(NamedTuple):
    """What queries share of some keys: sum_j g_j v_j and sum_j g_j, as a row."""

    values_nFE: Tensor
    ones_n1F: Tensor


class _Heads(NamedTuple):
    """A few heads, n of them, as `sums` is given them."""

    query_nKLF: Tensor
    key_nSF: Tensor
    value_nSE: Tensor
    phi: Phi | None

    def query(self, rows: slice) -> Tensor:
        query = self.query_nKLF[:, :, rows]
        return query if self.phi is None else self.phi(query)

    def key(self, rows: slice) -> Tensor:
        key = self.key_nSF[:, rows]
        return key if self.phi is None else self.phi(key)

    def state(self, keys: slice) -> _State:
        """Of these keys: beyond the first _ROWS of them in float64, because a long sum in float32
        would lose a digit or two."""
        parts = _blocks(keys, _ROWS)
        state = self._part(next(parts, slice(0, 0)))
        for rows in parts:
            state = _State(
                *(x.double().add_(part) for x, part in zip(state, self._part(rows), strict=True))
            )
        return state

    def _part(self, rows: slice) -> _State:
        key = self.key(rows)
        return _State(key.mT @ self.value_nSE[:, rows], key.sum(1, keepdim=True))

    def fill(self, output_nKLE: Tensor, total_nKL1: Tensor) -> None:
        """The sums of queries that see all keys."""
        state = self.state(slice(0, self.key_nSF.shape[1]))
        self._share(state, slice(0, output_nKLE.shape[2]), output_nKLE, total_nKL1)

    def _share(self, state: _State, rows: slice, output_nKLE: Tensor, total_nKL1: Tensor) -> None:
        """The sums of these queries, where they see what is in the state and no more."""
        dtype = output_nKLE.dtype
        values_n1FE, ones_n11F = (x.to(dtype).unsqueeze(1) for x in state)
        for block in _blocks(rows, _ROWS):
            query = self.query(block)
            output_nKLE[:, :, block] = query @ values_n1FE
            torch.sum(query.mul(ones_n11F), -1, keepdim=True, out=total_nKL1[:, :, block])

    def fill_causal(self, output_nKLE: Tensor, total_nKL1: Tensor, offset: int) -> None:
        """The sums where query i sees the keys up to i + offset."""
        L, S = output_nKLE.shape[2], self.key_nSF.shape[1]
        first = min(L, max(0, -offset))  # those before it see nothing
        every = min(L, max(first, S - 1 - offset))  # from here on they see all
        output_nKLE[:, :, :first] = 0.0
        total_nKL1[:, :, :first] = 0.0
        if first < every:
            state = _State(*(x.double() for x in self.state(slice(0, first + offset))))
            n, K = output_nKLE.shape[:2]
            F, E = state.values_nFE.shape[1:]
            chunk = min(_CHUNK, every - first)
            per_chunk = max(1, n * max(K * chunk * max(F, E), F * E))
            for rows in _blocks(slice(first, every), max(1, _ELEMENTS // per_chunk) * chunk):
                self._fill_segment(state, rows, offset, chunk, output_nKLE, total_nKL1)
        if every < L:
            self._share(self.state(slice(0, S)), slice(every, L), output_nKLE, total_nKL1)

    def _fill_segment(
        self,
        state: _State,
        rows: slice,
        offset: int,
        chunk: int,
        output_nKLE: Tensor,
        total_nKL1: Tensor,
    ) -> None:
        """The sums of a run of chunks; the state becomes that after it.

        Within a chunk the scores are a small triangle, and what came before it is a sum that all
        its queries share (Katharopoulos et al., arXiv:2006.16236, section 3.3, by blocks).
        """
        keys, length = slice(rows.start + offset, rows.stop + offset), rows.stop - rows.start
        query, key = _chunked(self.query(rows), chunk), _chunked(self.key(keys), chunk)
        value = _chunked(self.value_nSE[:, keys], chunk)
        values = _before(state.values_nFE, key.mT @ value)
        ones = _before(state.ones_n1F, key.sum(2, keepdim=True))
        scores = (query @ key[:, None].mT).tril_()
        output = (query @ values[:, None]).add_(scores @ value[:, None])
        total = (query * ones[:, None]).sum(-1, keepdim=True)
        total += scores.sum(-1, keepdim=True)
        output_nKLE[:, :, rows] = output.flatten(2, 3)[:, :, :length]
        total_nKL1[:, :, rows] = total.flatten(2, 3)[:, :, :length]


def _blocks(rows: slice, at_once: int) -> Iterator[slice]:
    starts = range(rows.start, rows.stop, at_once)
    return (slice(start, min(start + at_once, rows.stop)) for start in starts)


def _before(state: Tensor, parts: Tensor) -> Tensor:
    """The sum before each part, to which the state, in float64, adds them all."""
    before = torch.empty_like(parts)
    for i in range(parts.shape[1]):
        before[:, i] = state
        state += parts[:, i]
    return before


def _chunked(x: Tensor, chunk: int) -> Tensor:
    """(..., L, F) as (..., n, chunk, F); zeros, which add nothing, fill the last chunk."""
    missing = -x.shape[-2] % chunk
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    chunks: Tensor = x.unflatten(-2, (-1, chunk))
    return chunks
