"""Averages by 1 + cosine in float32, without an (L, S) matrix, causal or not."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkv.attention.common.guards import are_deferred, bounds, holds

_CHUNK = 64  # rows of a triangle of cosines
_SEGMENT = 4 * _CHUNK  # rows whose numbers fit into the cache
_NORMS = (1e-3, 1e6)  # norms between which a product with a norm loses no digit


class _Rows(NamedTuple):
    """Rows and their norms; x_D / norm_1 is a direction.

    Each row is divided by a power of two that gives it ordinary size. The bits of a row do not
    depend on other rows.

    Attributes:
        x_D: the rows.
        norm_1: their norms; 1 for rows of zeros.
    """

    x_D: Tensor
    norm_1: Tensor

    @classmethod
    def of(cls, x: Tensor) -> _Rows:
        x = x.float()
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        if not are_deferred():
            least, largest = bounds(norm)
            if least >= _NORMS[0] and largest <= _NORMS[1]:
                return cls(x, norm)
        zero = norm == 0
        fits = (norm >= _NORMS[0]) & (norm <= _NORMS[1])
        if not holds(fits | (zero & (x == 0).all(-1, keepdim=True))):
            exponents = torch.frexp(x.abs().amax(-1, keepdim=True)).exponent
            x = torch.where(fits, x, torch.ldexp(x.double(), -exponents).float())
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return cls(x, norm.masked_fill(norm == 0, 1.0))

    def items(self, items: slice) -> _Rows:
        return _Rows(self.x_D[items], self.norm_1[items])

    def rows(self, rows: slice) -> _Rows:
        return _Rows(self.x_D[..., rows, :], self.norm_1[..., rows, :])

    def directions(self) -> Tensor:
        return self.x_D / self.norm_1


def average_by_cosines(
    query_BGKLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    counts_BL: Tensor,
    offsets: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """Averages values by 1 + cosine over the keys j that each query i sees.

    Args:
        query_BGKLD: queries; the K heads that read one key head side by side.
        key_BGSD: keys, zero for padding.
        value_BGSE: values, zero for padding.
        counts_BL: n_i, the number of keys that each query sees, in float32.
        offsets: as in `feature_sums.feature_sums`.

    Returns:
        The averages sum_j (1 + q'_i . k'_j) v_j / (n_i + sum_j q'_i . k'_j), (B, G, K, L, E), and
        their divisors, (B, G, K, L, 1). Both are 0 for a query that sees no key.
    """
    counts = counts_BL[:, None, None, :, None]
    query, key = _Rows.of(query_BGKLD), _Rows.of(key_BGSD)
    if offsets is None:
        return _all(query, counts, _State.of(key.directions(), value_BGSE))
    (B, G, K, L, _), E = query_BGKLD.shape, value_BGSE.shape[3]
    output, total = (value_BGSE.new_empty(B, G, K, L, width) for width in (E, 1))
    alike = len(set(offsets)) == 1
    for b in range(1 if alike else B):
        items = slice(None) if alike else slice(b, b + 1)
        out = output[items], total[items]
        _causal(
            query.items(items), key.items(items), value_BGSE[items], counts[items], offsets[b], out
        )
    return output, total


class _State(NamedTuple):
    """Sums over some keys that all queries share: sum_j k'_j v_j, sum_j k'_j and sum_j v_j."""

    products_BGDE: Tensor
    keys_BG1D: Tensor
    values_BG1E: Tensor

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> _State:
        products = (value.mT @ key).mT  # faster than key.mT @ value
        return cls(products, key.sum(-2, keepdim=True), value.sum(-2, keepdim=True))


def _all(query: _Rows, counts_B11L1: Tensor, state: _State) -> tuple[Tensor, Tensor]:
    """Returns the averages of (B, G, K, L) queries over the keys of a state, and their divisors."""
    products, keys, values = (part.unsqueeze(2) for part in state)
    total = (query.x_D @ keys.mT).div_(query.norm_1).add_(counts_B11L1)
    share = _divisor(total).reciprocal_()
    # the products are divided by the norms at the end: once, in place
    output = (query.x_D @ products).mul_(share / query.norm_1).addcmul_(values, share)
    return output, total


def _divisor(total: Tensor) -> Tensor:
    """Returns the totals, at least 1e-30.

    A query that sees no key gets 0 / 1e-30 = 0. Other queries with a total of 0 or less are
    recomputed, so their quotients are not used.
    """
    return total.clamp(min=1e-30)


def _causal(
    query: _Rows,
    key: _Rows,
    value_BGSE: Tensor,
    counts_B11L1: Tensor,
    offset: int,
    into: tuple[Tensor, Tensor],
) -> None:
    """Writes the averages and their divisors for items that all have the same offset."""
    L, S = into[0].shape[3], value_BGSE.shape[2]
    first = min(L, max(0, -offset))  # queries before it see nothing
    last = min(L, max(first, S - offset))  # queries from here on see all keys
    state, seen = None, slice(0, max(0, min(S, first + offset)))
    if seen.stop:
        state = _State.of(key.rows(seen).directions(), value_BGSE[:, :, seen])
    for out in into:
        out[:, :, :, :first] = 0.0
    for start in range(first, last, _SEGMENT):
        rows = slice(start, min(last, start + _SEGMENT))
        keys = slice(rows.start + offset, rows.stop + offset)
        output, total = (out[:, :, :, rows] for out in into)
        total.copy_(counts_B11L1[:, :, :, rows])
        query_BGKLD, key_BGLD = query.rows(rows).directions(), key.rows(keys).directions()
        parts = _segment(query_BGKLD, key_BGLD, value_BGSE[:, :, keys], state, (output, total))
        if rows.stop < L:
            state = _after(state, parts)
    if last < L:
        assert state is not None  # it now holds all keys
        rows = slice(last, L)
        state = _State(*(part.float() for part in state))
        rest = _all(query.rows(rows), counts_B11L1[:, :, :, rows], state)
        for whole, part in zip(into, rest, strict=True):
            whole[:, :, :, rows] = part


def _segment(
    query_BGKLD: Tensor,
    key_BGLD: Tensor,
    value_BGLE: Tensor,
    state: _State | None,
    into: tuple[Tensor, Tensor],
) -> _State:
    """Writes the averages of a segment, where query i sees the keys up to i and those of the state.

    Within a chunk the cosines are a small triangle. The earlier keys are a sum that all queries of
    the chunk share (Katharopoulos et al., arXiv:2006.16236, section 3.3, by blocks).

    Args:
        query_BGKLD, key_BGLD: directions of the segment.
        value_BGLE: values of the segment.
        state: the sums over all keys before the segment; None: there are none.
        into: receives the averages; its second tensor holds the counts and receives the divisors.

    Returns:
        The state of each chunk alone.
    """
    L = query_BGKLD.shape[3]
    chunk = min(L, _CHUNK)
    query, key, value = (_chunked(x, chunk) for x in (query_BGKLD, key_BGLD, value_BGLE))
    cosines = (query @ key[:, :, None].mT).tril_()
    total = cosines.sum(-1, keepdim=True)
    cosines += torch.ones(chunk, chunk, device=query.device).tril_()
    output = cosines @ value[:, :, None]
    parts = _State.of(key, value)
    if state is not None or L > chunk:
        products, keys, values = (part[:, :, None] for part in _before(state, parts))
        output += query @ products
        output += values
        total += torch.linalg.vecdot(query, keys).unsqueeze(-1)
    into[1].add_(total.flatten(3, 4)[:, :, :, :L])
    torch.div(output.flatten(3, 4)[:, :, :, :L], _divisor(into[1]), out=into[0])
    return parts


def _before(state: _State | None, parts: _State) -> list[Tensor]:
    """Returns the sums before each chunk."""
    befores = [torch.empty_like(part) for part in parts]
    for index, (before, part) in enumerate(zip(befores, parts, strict=True)):
        before[:, :, 0] = 0.0 if state is None else state[index]
        for i in range(1, part.shape[2]):
            torch.add(before[:, :, i - 1], part[:, :, i - 1], out=before[:, :, i])
    return befores


def _after(state: _State | None, parts: _State) -> _State:
    """Returns the sums after the last chunk.

    They are in float64, because a running sum of all segments in float32 would lose a digit.
    """
    wholes = [part.sum(2).double() for part in parts]
    if state is None:
        return _State(*wholes)
    return _State(*(whole.add_(part) for whole, part in zip(wholes, state, strict=True)))


def _chunked(x: Tensor, chunk: int) -> Tensor:
    """Reshapes (..., L, D) to (..., n, chunk, D). Zeros, which add nothing, fill the last chunk."""
    missing = -x.shape[-2] % chunk
    if missing:
        x = pad(x, (0, 0, 0, missing))
    chunks: Tensor = x.unflatten(-2, (-1, chunk))
    return chunks
