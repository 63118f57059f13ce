"""Attention whose weights are products of features, without an (L, S) matrix, causal or not.

A_ij = f_i . g_j; f are features of queries, g features of keys. The entry points are
`feature_sums`, `feature_products` and `transposed_feature_sums`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 64  # queries of a chunk, whose scores are computed, in causal attention
_ROWS = 1024  # the most keys that are summed in the dtype of the input
_ELEMENTS = 1 << 18  # of a block: small enough for the cache
_SHARED = 1 << 19  # of a block where all queries see all keys

Phi = Callable[[Tensor], Tensor]


class SharedSums(NamedTuple):
    """Sums over some keys that queries share: sum_j v_j g_j, in the faster layout; sum_j g_j."""

    values_BGEF: Tensor
    ones_BG1F: Tensor

    @classmethod
    def of(cls, key_BGSF: Tensor, value_BGSE: Tensor, phi: Phi | None) -> SharedSums:
        """Returns the state of all these keys, a few heads and rows at a time.

        `phi` maps keys to features; None: the keys are features.
        """
        (B, G, S, F), E = key_BGSF.shape, value_BGSE.shape[3]
        at_once = _at_once(_SHARED, min(_ROWS, S), F, E)
        heads = _cut(0, at_once, key_BGSF.flatten(0, 1), value_BGSE.flatten(0, 1))
        parts = [_state(key, value, phi) for key, value in heads]
        whole = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*parts, strict=True))
        return cls(*(x.unflatten(0, (B, G)) for x in whole))


def feature_sums(
    query_BGKLF: Tensor,
    key_BGSF: Tensor,
    value_BGSE: Tensor,
    offsets: list[int] | None,
    phi: Phi | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns sum_j (f_i . g_j) v_j, (B, G, K, L, E), and sum_j f_i . g_j, (B, G, K, L, 1).

    The sums are over the keys that each query sees.

    Args:
        query_BGKLF: features of the queries; the K heads that read one key head side by side.
        key_BGSF: features of the keys, zero for padding.
        value_BGSE: values.
        offsets: for causal attention, per item the position of the first query on the key axis;
            None: every query sees every key.
        phi: maps queries and keys to features, row by row; None: they are features.
    """
    if offsets is None:
        output, total = apply_state(query_BGKLF, SharedSums.of(key_BGSF, value_BGSE, phi), phi)
        return output, total
    total = query_BGKLF.new_empty(*query_BGKLF.shape[:-1], 1)
    return _filled(query_BGKLF, key_BGSF, value_BGSE, total, offsets, phi, phi), total


def feature_products(
    query_BGKLF: Tensor,
    key_BGSF: Tensor,
    value_BGSE: Tensor,
    offsets: list[int] | None,
    query_phi: Phi | None = None,
) -> Tensor:
    """Returns the first of the `feature_sums` alone; `query_phi` maps only queries to features."""
    if offsets is None:
        state = SharedSums.of(key_BGSF, value_BGSE, None)
        return apply_state(query_BGKLF, (state.values_BGEF,), query_phi)[0]
    return _filled(query_BGKLF, key_BGSF, value_BGSE, None, offsets, query_phi, None)


def apply_state(
    query_BGKLF: Tensor, states_BGXF: tuple[Tensor, ...], phi: Phi | None
) -> list[Tensor]:
    """Multiplies queries by each shared sum, (B, G, K, L, X), a few heads and rows at a time.

    Args:
        query_BGKLF: as in `feature_sums`.
        states_BGXF: tensors of `SharedSums`, or tensors computed from it.
        phi: maps queries to features; None: they are features.
    """
    B, G, K, L, F = query_BGKLF.shape
    query = query_BGKLF.flatten(2, 3).flatten(0, 1)
    states = [x.flatten(0, 1).mT.to(query.dtype) for x in states_BGXF]
    products = [query.new_empty(B * G, K * L, x.shape[2]) for x in states]
    at_once = _at_once(_SHARED, min(_ROWS, K * L), F, products[0].shape[2])
    for heads in _cut(0, at_once, query, *products, *states):
        for rows, *outs in _cut(1, _ROWS, *heads[: 1 + len(products)]):
            features = rows if phi is None else phi(rows)
            for out, state in zip(outs, heads[1 + len(products) :], strict=True):
                torch.bmm(features, state, out=out)
    return [x.view(B, G, K, L, -1) for x in products]


def transposed_feature_sums(
    key_BGSF: Tensor, query_BGKLF: Tensor, value_BGKLE: Tensor, offsets: list[int] | None
) -> Tensor:
    """Returns sum_i (g_j . f_i) v_i, (B, G, S, E), over the queries i that see each key j.

    The sum runs over the queries of all heads that read the key head. Queries and keys exchange
    roles, both in reverse order. Query i sees key j where j <= i + offset. The exchanged "query"
    S - 1 - j therefore sees the "key" L - 1 - i where the latter is at most
    (S - 1 - j) + (L - S + offset).
    """
    if offsets is None:
        return key_BGSF @ (query_BGKLF.flatten(2, 3).mT @ value_BGKLE.flatten(2, 3))
    (B, G, S, _), (K, L) = key_BGSF.shape, query_BGKLF.shape[2:4]
    key_BHSF = key_BGSF.flip(2).unsqueeze(2).expand(-1, -1, K, -1, -1).flatten(1, 2)
    query_BHLF, value_BHLE = (x.flip(3).flatten(1, 2) for x in (query_BGKLF, value_BGKLE))
    backwards = [L - S + offset for offset in offsets]
    sums = feature_products(key_BHSF.unsqueeze(2), query_BHLF, value_BHLE, backwards)
    return sums.view(B, G, K, S, -1).sum(2).flip(2)


def _filled(
    query_BGKLF: Tensor,
    key_BGSF: Tensor,
    value_BGSE: Tensor,
    total_BGKL1: Tensor | None,
    offsets: list[int],
    query_phi: Phi | None,
    key_phi: Phi | None,
) -> Tensor:
    """Returns the first of the `feature_sums` and writes the second to `total_BGKL1`.

    It handles a few heads and rows at a time; no bit depends on how many.
    """
    (B, G, K, L, F), (S, E) = query_BGKLF.shape, value_BGSE.shape[2:]
    output = query_BGKLF.new_empty(B, G, K, L, E)
    query, key, value, filled = (
        x.flatten(0, 1) for x in (query_BGKLF, key_BGSF, value_BGSE, output)
    )
    total = None if total_BGKL1 is None else total_BGKL1.flatten(0, 1)
    at_once = _at_once(_ELEMENTS, min(_CHUNK, max(L, S)), F, E)
    for run, offset in _runs(B, offsets):
        for some in _blocks(slice(run.start * G, run.stop * G), at_once):
            heads = _Heads(
                query[some], key[some], value[some], filled[some],
                None if total is None else total[some], query_phi, key_phi,
            )  # fmt: skip
            heads.fill(offset)
    return output


def _at_once(elements: int, rows: int, F: int, E: int) -> int:
    """Returns how many heads of `rows` rows fit into `elements` elements, at least 1."""
    return max(1, elements // max(1, rows * max(F, E)))


def _runs(B: int, offsets: list[int]) -> Iterator[tuple[slice, int]]:
    """Yields ranges of items that have the same offset."""
    if len(set(offsets)) == 1:
        yield slice(0, B), offsets[0]
    else:
        yield from ((slice(b, b + 1), offset) for b, offset in enumerate(offsets))


def _cut(axis: int, size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields the same parts of all tensors, of at most `size` along the axis."""
    if tensors[0].shape[axis] <= size:
        yield tensors
    else:
        yield from zip(*(x.split(size, axis) for x in tensors), strict=True)


def _blocks(rows: slice, at_once: int) -> Iterator[slice]:
    starts = range(rows.start, rows.stop, at_once)
    return (slice(start, min(start + at_once, rows.stop)) for start in starts)


def _state(key_nSF: Tensor, value_nSE: Tensor, phi: Phi | None) -> tuple[Tensor, Tensor]:
    """Returns the `SharedSums` of n heads.

    Sums of more than _ROWS keys are in float64: a long sum in float32 would lose a digit or two.
    """
    state: tuple[Tensor, Tensor] | None = None
    for key, value in _cut(1, _ROWS, key_nSF, value_nSE):
        key = key if phi is None else phi(key)
        part = torch.bmm(value.mT, key), key.sum(1, keepdim=True)
        if state is not None:
            part = state[0].double().add_(part[0]), state[1].double().add_(part[1])
        state = part
    assert state is not None
    return state


class _Heads(NamedTuple):
    """The arguments and outputs of `feature_sums` for n heads, and the feature functions."""

    query_nKLF: Tensor
    key_nSF: Tensor
    value_nSE: Tensor
    output_nKLE: Tensor
    total_nKL1: Tensor | None
    query_phi: Phi | None
    key_phi: Phi | None

    def query(self, k: int, rows: slice) -> Tensor:
        query = self.query_nKLF[:, k, rows]
        return query if self.query_phi is None else self.query_phi(query)

    def key(self, rows: slice) -> Tensor:
        key = self.key_nSF[:, rows]
        return key if self.key_phi is None else self.key_phi(key)

    def _share(self, state: tuple[Tensor, Tensor], rows: slice) -> None:
        """Writes the sums of queries that see exactly the keys of the state."""
        values, ones = (x.to(self.output_nKLE.dtype) for x in state)
        for block, k in product(_blocks(rows, _ROWS), range(self.output_nKLE.shape[1])):
            query = self.query(k, block)
            torch.bmm(query, values, out=self.output_nKLE[:, k, block])
            if self.total_nKL1 is not None:
                torch.bmm(query, ones.mT, out=self.total_nKL1[:, k, block])

    def fill(self, offset: int) -> None:
        """Writes the sums where query i sees the keys up to i + offset."""
        (n, _, L, E), (S, F) = self.output_nKLE.shape, self.key_nSF.shape[1:]
        first = min(L, max(0, -offset))  # queries before it see nothing
        every = min(L, max(first, S - offset))  # queries from here on see all keys
        if first > 0:
            self.output_nKLE[:, :, :first] = 0.0
            if self.total_nKL1 is not None:
                self.total_nKL1[:, :, :first] = 0.0
        before = slice(0, max(0, min(S, first + offset)))
        if before.stop:
            values, ones = _state(self.key_nSF[:, before], self.value_nSE[:, before], self.key_phi)
            state = values.mT.double(), ones.double()
        else:
            zeros = self.key_nSF.new_zeros(n, F, E + 1, dtype=torch.float64)
            state = zeros[..., :E], zeros[..., E:].mT
        if first < every:
            chunk = min(_CHUNK, every - first)
            per_chunk = max(1, n * max(chunk * max(F, E), F * E))
            for rows in _blocks(slice(first, every), max(1, _ELEMENTS // per_chunk) * chunk):
                self._fill_chunks(state, rows, offset, chunk)
        if every < L:
            self._share(state, slice(every, L))

    def _fill_chunks(
        self, state: tuple[Tensor, Tensor], rows: slice, offset: int, chunk: int
    ) -> None:
        """Writes the sums of consecutive chunks and advances the state to their end.

        Within a chunk the scores are a small triangle. The earlier keys are a sum that all queries
        of the chunk share (Katharopoulos et al., arXiv:2006.16236, section 3.3, by blocks); one
        chunk of all queries has none.
        """
        keys = slice(rows.start + offset, rows.stop + offset)
        key, value = _chunked(self.key(keys), chunk), _chunked(self.value_nSE[:, keys], chunk)
        is_all = keys.start == 0 and rows.stop == self.output_nKLE.shape[2] <= chunk
        if not is_all:
            values = _before(state[0], torch.bmm(key.mT, value))
            if self.total_nKL1 is not None:
                ones = _before(state[1], key.sum(1, keepdim=True))
        for k in range(self.output_nKLE.shape[1]):
            query = _chunked(self.query(k, rows), chunk)
            scores = torch.bmm(query, key.mT).tril_()
            if is_all:
                output = torch.bmm(scores, value)
            else:
                output = torch.bmm(query, values).baddbmm_(scores, value)
            _put(self.output_nKLE[:, k, rows], output)
            if self.total_nKL1 is not None:
                total = scores.sum(-1, keepdim=True)
                total = total if is_all else torch.bmm(query, ones.mT).add_(total)
                _put(self.total_nKL1[:, k, rows], total)


def _before(state_nXY: Tensor, parts_cXY: Tensor) -> Tensor:
    """Returns the sum before each chunk and adds all chunks to the state, which is float64.

    There are c chunks of all n heads together.
    """
    parts = parts_cXY.unflatten(0, (len(state_nXY), -1))
    before = torch.empty_like(parts)
    for out, part in zip(before.unbind(1), parts.unbind(1), strict=True):
        out.copy_(state_nXY)
        state_nXY += part
    return before.flatten(0, 1)


def _put(out_nLX: Tensor, chunks_cCX: Tensor) -> None:
    """Writes chunks of `_chunked` to one tensor, without the zeros at the end."""
    n, L, X = out_nLX.shape
    out_nLX.copy_(chunks_cCX.view(n, -1, X)[:, :L])


def _chunked(x_nLF: Tensor, chunk: int) -> Tensor:
    """Reshapes to (n chunks, chunk, F). Zeros, which add nothing, fill each head's last chunk."""
    missing = -x_nLF.shape[1] % chunk
    if missing:
        x_nLF = torch.nn.functional.pad(x_nLF, (0, 0, 0, missing))
    return x_nLF.reshape(-1, chunk, x_nLF.shape[2])
