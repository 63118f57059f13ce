"""Attention by features: A_ij = f_i . g_j for features of queries and of keys, without an (L, S)
matrix, causal or not."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["back_sums", "sums"]

_SEGMENT_ELEMENTS = 1 << 22  # that a segment of chunks may hold, of scores or of states
_CHUNK = 64


def sums(
    query_BGKLF: Tensor, key_BGSF: Tensor, value_BGSE: Tensor, offsets: list[int] | None
) -> tuple[Tensor, Tensor]:
    """sum_j (f_i . g_j) v_j, (B, G, K, L, E), and sum_j f_i . g_j, (B, G, K, L, 1), over the keys
    that each query sees.

    Args:
        query_BGKLF: features of the queries; the K heads that read one key head side by side.
        key_BGSF: features of the keys, zero for padding.
        value_BGSE: values.
        offsets: each item's position of the first query on the key axis, where a query sees no
            key past its own; None: it sees all.
    """
    if offsets is None:
        return _all(query_BGKLF, _state(key_BGSF, value_BGSE))
    if len(set(offsets)) == 1:
        return _causal(query_BGKLF, key_BGSF, value_BGSE, offsets[0])
    items = ((slice(b, b + 1), offset) for b, offset in enumerate(offsets))
    each = [_causal(query_BGKLF[b], key_BGSF[b], value_BGSE[b], offset) for b, offset in items]
    outputs, totals = zip(*each, strict=True)
    return torch.cat(outputs), torch.cat(totals)


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


def _causal(
    query_BGKLF: Tensor, key_BGSF: Tensor, value_BGSE: Tensor, offset: int
) -> tuple[Tensor, Tensor]:
    """The sums where all items have one offset."""
    L, S = query_BGKLF.shape[3], key_BGSF.shape[2]
    first = min(L, max(0, -offset))  # those before it see nothing
    every = min(L, max(first, S - 1 - offset))  # from here on they see all
    shape = query_BGKLF.shape[:3]
    parts = [
        (
            query_BGKLF.new_zeros(*shape, first, value_BGSE.shape[3]),
            query_BGKLF.new_zeros(*shape, first, 1),
        )
    ]
    if first < every:
        keys = slice(first + offset, every + offset)
        before = _state(key_BGSF[:, :, : keys.start], value_BGSE[:, :, : keys.start])
        parts += _aligned(
            query_BGKLF[:, :, :, first:every], key_BGSF[:, :, keys], value_BGSE[:, :, keys], before
        )
    if every < L:
        parts.append(_all(query_BGKLF[:, :, :, every:], _state(key_BGSF, value_BGSE)))
    outputs, totals = zip(*parts, strict=True)
    return torch.cat(outputs, 3), torch.cat(totals, 3)


class _State(NamedTuple):
    """What all queries share of some keys: sum_j g_j v_j and sum_j g_j, as a column."""

    values_BGFE: Tensor
    ones_BGF1: Tensor


def _state(key_BGSF: Tensor, value_BGSE: Tensor) -> _State:
    return _State(key_BGSF.mT @ value_BGSE, key_BGSF.sum(2).unsqueeze(-1))


def _all(query_BGKLF: Tensor, state: _State) -> tuple[Tensor, Tensor]:
    """The sums over the keys of a state."""
    return query_BGKLF @ state.values_BGFE[:, :, None], query_BGKLF @ state.ones_BGF1[:, :, None]


def _aligned(
    query_BGKLF: Tensor, key_BGLF: Tensor, value_BGLE: Tensor, state: _State
) -> list[tuple[Tensor, Tensor]]:
    """Query i sees the keys up to i, and what is in the state already; the sums in parts.

    In chunks: within one the scores are a small triangle, and what came before it is a sum that
    all its queries share (Katharopoulos et al., arXiv:2006.16236, section 3.3, by blocks).
    """
    (B, G, K, L, F), E = query_BGKLF.shape, value_BGLE.shape[3]
    chunk = max(_CHUNK, 1 << (max(F, E) - 1).bit_length())  # no larger states than inputs
    per_chunk = B * G * (K * chunk * chunk + F * E)
    length = max(1, _SEGMENT_ELEMENTS // per_chunk) * chunk
    parts = []
    for start in range(0, L, length):
        rows = slice(start, min(L, start + length))
        part, state = _segment(
            query_BGKLF[:, :, :, rows], key_BGLF[:, :, rows], value_BGLE[:, :, rows],
            state, min(chunk, rows.stop - rows.start),
        )  # fmt: skip
        parts.append(part)
    return parts


def _segment(
    query_BGKLF: Tensor, key_BGLF: Tensor, value_BGLE: Tensor, state: _State, chunk: int
) -> tuple[tuple[Tensor, Tensor], _State]:
    """The sums of a run of chunks, and the state after it."""
    L = query_BGKLF.shape[3]
    query = _chunked(query_BGKLF, chunk)
    key, value = _chunked(key_BGLF, chunk), _chunked(value_BGLE, chunk)
    values = _running(state.values_BGFE, key.mT @ value)
    ones = _running(state.ones_BGF1, key.sum(3).unsqueeze(-1))
    scores = (query @ key[:, :, None].mT).tril_()
    output = query @ values[:, :, None, :-1]
    output += scores @ value[:, :, None]
    total = query @ ones[:, :, None, :-1]
    total += scores.sum(-1, keepdim=True)
    sums = (output.flatten(3, 4)[:, :, :, :L], total.flatten(3, 4)[:, :, :, :L])
    return sums, _State(values[:, :, -1], ones[:, :, -1])


def _running(before: Tensor, parts: Tensor) -> Tensor:
    """The sum before each part, and after the last; in float64 on the way, because a running sum
    in float32 would lose a digit or two."""
    summed = torch.cat([before[:, :, None], parts], 2).cumsum(2, dtype=torch.float64)
    return summed.to(parts.dtype)


def _chunked(x: Tensor, chunk: int) -> Tensor:
    """(..., L, F) as (..., n, chunk, F); zeros, which add nothing, fill the last chunk."""
    missing = -x.shape[-2] % chunk
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    chunks: Tensor = x.unflatten(-2, (-1, chunk))
    return chunks
