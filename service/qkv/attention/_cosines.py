"""Averages by 1 + cosine in float32, without an (L, S) matrix, causal or not."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["averages", "directions"]

_CHUNK = 128  # rows of a triangle of cosines
_SEGMENT = 4 * _CHUNK  # rows whose numbers stay in the cache
_NORMS = (1e-15, 1e18)  # between them squares of float32 neither overflow nor lose a digit


def directions(x: Tensor) -> Tensor:
    """x / |x| in float32; 0 where x is. A row's bits are its own, whatever the others are."""
    x = x.float()
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    least, most = torch.aminmax(norm)
    if not (least >= _NORMS[0] and most <= _NORMS[1]):
        fits = (norm >= _NORMS[0]) & (norm <= _NORMS[1])
        exponents = torch.frexp(x.abs().amax(-1, keepdim=True)).exponent
        x = torch.where(fits, x, torch.ldexp(x.double(), -exponents).float())
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        norm.masked_fill_(norm == 0, 1.0)
    return x / norm


def averages(
    query_BGKLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    counts_BL: Tensor,
    offsets: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """sum_j (1 + q'_i . k'_j) v_j over n_i + sum_j q'_i . k'_j, (B, G, K, L, E), and the latter,
    (B, G, K, L, 1), over the keys j that each query i sees; 0 for what sees none.

    Args:
        query_BGKLD: directions of the queries; the K heads that read one key head side by side.
        key_BGSD: directions of the keys, zero for padding.
        value_BGSE: values, zero for padding.
        counts_BL: how many keys each query sees.
        offsets: as in `_features.sums`.
    """
    counts = counts_BL.float()[:, None, None, :, None]
    if offsets is None:
        return _all(query_BGKLD, counts, _State.of(key_BGSD, value_BGSE))
    (B, G, K, L, _), E = query_BGKLD.shape, value_BGSE.shape[3]
    output, total = (query_BGKLD.new_empty(B, G, K, L, width) for width in (E, 1))
    alike = len(set(offsets)) == 1
    for b in range(1 if alike else B):
        own = slice(None) if alike else slice(b, b + 1)
        _causal(
            query_BGKLD[own], key_BGSD[own], value_BGSE[own], counts[own], offsets[b],
            (output[own], total[own]),
        )  # fmt: skip
    return output, total


class _State(NamedTuple):
    """What all queries share of some keys: sum_j k'_j v_j, sum_j k'_j and sum_j v_j."""

    products_BGDE: Tensor
    keys_BG1D: Tensor
    values_BG1E: Tensor

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> _State:
        return cls(key.mT @ value, key.sum(-2, keepdim=True), value.sum(-2, keepdim=True))


def _all(query_BGKLD: Tensor, counts: Tensor, state: _State) -> tuple[Tensor, Tensor]:
    """The averages over the keys of a state."""
    products, keys, values = (part[:, :, None] for part in state)
    total = torch.linalg.vecdot(query_BGKLD, keys).unsqueeze(-1).add_(counts)
    output = (query_BGKLD @ products).add_(values)
    return output.div_(_divisor(total)), total


def _divisor(total: Tensor) -> Tensor:
    return total.masked_fill(total == 0, 1.0)


def _causal(
    query_BGKLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    counts_B11L1: Tensor,
    offset: int,
    into: tuple[Tensor, Tensor],
) -> None:
    """Fills in the averages where all items have one offset."""
    L, S = query_BGKLD.shape[3], key_BGSD.shape[2]
    first = min(L, max(0, -offset))  # those before it see nothing
    every = min(L, max(first, S - 1 - offset))  # from here on they see all
    state = None
    if first < every and first + offset > 0:
        before = slice(0, first + offset)
        state = _State.of(key_BGSD[:, :, before], value_BGSE[:, :, before])
    for made in into:
        made[:, :, :, :first] = 0.0
    for start in range(first, every, _SEGMENT):
        rows = slice(start, min(every, start + _SEGMENT))
        keys = slice(rows.start + offset, rows.stop + offset)
        output, total = (made[:, :, :, rows] for made in into)
        total.copy_(counts_B11L1[:, :, :, rows])
        state = _segment(
            query_BGKLD[:, :, :, rows], key_BGSD[:, :, keys], value_BGSE[:, :, keys], state,
            (output, total),
        )  # fmt: skip
    if every < L:
        rows = slice(every, L)
        state = _State.of(key_BGSD, value_BGSE)
        rest = _all(query_BGKLD[:, :, :, rows], counts_B11L1[:, :, :, rows], state)
        for whole, part in zip(into, rest, strict=True):
            whole[:, :, :, rows] = part


def _segment(
    query_BGKLD: Tensor,
    key_BGLD: Tensor,
    value_BGLE: Tensor,
    state: _State | None,
    into: tuple[Tensor, Tensor],
) -> _State:
    """Query i sees the keys up to i, and what is in the state already: fills in the averages and,
    where the counts are, what they were divided by. The state after it.

    Within a chunk the cosines are a small triangle, and what came before it is a sum that all its
    queries share (Katharopoulos et al., arXiv:2006.16236, section 3.3, by blocks).
    """
    L = query_BGKLD.shape[3]
    chunk = min(L, _CHUNK)
    query, key, value = (_chunked(x, chunk) for x in (query_BGKLD, key_BGLD, value_BGLE))
    cosines = (query @ key[:, :, None].mT).tril_()
    total = cosines.sum(-1, keepdim=True)
    cosines += torch.ones(chunk, chunk, device=query.device).tril_()
    output = cosines @ value[:, :, None]
    befores, after = _before(state, _State.of(key, value))
    if state is not None or L > chunk:
        products, keys, values = (part[:, :, None] for part in befores)
        output += query @ products
        output += values
        total += torch.linalg.vecdot(query, keys).unsqueeze(-1)
    into[1].add_(total.flatten(3, 4)[:, :, :, :L])
    torch.div(output.flatten(3, 4)[:, :, :, :L], _divisor(into[1]), out=into[0])
    return after


def _before(state: _State | None, parts: _State) -> tuple[list[Tensor], _State]:
    """The sums before each chunk, and after the last; between segments in float64, because a
    running sum in float32 would lose a digit."""
    befores, afters = [], []
    for at, part in enumerate(parts):
        before = torch.empty_like(part)
        before[:, :, 0] = 0.0 if state is None else state[at]
        for i in range(1, part.shape[2]):
            torch.add(before[:, :, i - 1], part[:, :, i - 1], out=before[:, :, i])
        whole = part.sum(2, dtype=torch.float64)
        befores.append(before)
        afters.append(whole if state is None else whole.add_(state[at]))
    return befores, _State(*afters)


def _chunked(x: Tensor, chunk: int) -> Tensor:
    """(..., L, D) as (..., n, chunk, D); zeros, which add nothing, fill the last chunk."""
    missing = -x.shape[-2] % chunk
    if missing:
        x = pad(x, (0, 0, 0, missing))
    chunks: Tensor = x.unflatten(-2, (-1, chunk))
    return chunks
