"""Attention by features: A_ij = f_i . g_j for features of queries and of keys, without an (L, S)
matrix, causal or not."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sums"]

_SEGMENT_ELEMENTS = 1 << 22  # that a segment of chunks may hold, of scores or of states
_CHUNK = 64


def sums(query_BGKLF: Tensor, key_BGSF: Tensor, value_BGSE: Tensor, offset: int | None) -> Tensor:
    """sum_j (f_i . g_j) v_j over the keys that each query sees, (B, G, K, L, E).

    Args:
        query_BGKLF: features of the queries; the K heads that read one key head side by side.
        key_BGSF: features of the keys, zero for padding.
        value_BGSE: a column of ones beside the values gives the row sums of A.
        offset: position of the first query on the key axis, where a query sees no key past its
            own; None: it sees all.
    """
    L, S = query_BGKLF.shape[3], key_BGSF.shape[2]
    if offset is None:
        return _all(query_BGKLF, key_BGSF, value_BGSE)
    output = query_BGKLF.new_zeros(*query_BGKLF.shape[:4], value_BGSE.shape[3])
    first = min(L, max(0, -offset))  # those before it see nothing
    every = min(L, max(first, S - 1 - offset))  # from here on they see all
    if every < L:
        output[:, :, :, every:] = _all(query_BGKLF[:, :, :, every:], key_BGSF, value_BGSE)
    if first < every:
        keys = slice(first + offset, every + offset)
        before = torch.einsum(
            "bgsf,bgse->bgfe", key_BGSF[:, :, : keys.start], value_BGSE[:, :, : keys.start]
        )
        output[:, :, :, first:every] = _aligned(
            query_BGKLF[:, :, :, first:every], key_BGSF[:, :, keys], value_BGSE[:, :, keys], before
        )
    return output


def _all(query_BGKLF: Tensor, key_BGSF: Tensor, value_BGSE: Tensor) -> Tensor:
    state_BGFE = torch.einsum("bgsf,bgse->bgfe", key_BGSF, value_BGSE)
    return torch.einsum("bgklf,bgfe->bgkle", query_BGKLF, state_BGFE)


def _aligned(
    query_BGKLF: Tensor, key_BGLF: Tensor, value_BGLE: Tensor, state_BGFE: Tensor
) -> Tensor:
    """Query i sees the keys up to i, and what is in the state already.

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
        part, state_BGFE = _segment(
            query_BGKLF[:, :, :, rows], key_BGLF[:, :, rows], value_BGLE[:, :, rows],
            state_BGFE, min(chunk, rows.stop - rows.start),
        )  # fmt: skip
        parts.append(part)
    return torch.cat(parts, 3)


def _segment(
    query_BGKLF: Tensor, key_BGLF: Tensor, value_BGLE: Tensor, state_BGFE: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """The sums of a run of chunks, and the state after it."""
    L = query_BGKLF.shape[3]
    query = _chunked(query_BGKLF, chunk)
    key, value = _chunked(key_BGLF, chunk), _chunked(value_BGLE, chunk)
    states = torch.einsum("bgncf,bgnce->bgnfe", key, value)
    # in float64: a running sum in float32 would lose a digit or two on the way
    running = torch.cat([state_BGFE[:, :, None], states], 2).cumsum(2, dtype=torch.float64)
    running = running.to(states.dtype)
    output = torch.einsum("bgkncf,bgnfe->bgknce", query, running[:, :, :-1])
    scores = torch.einsum("bgkncf,bgnsf->bgkncs", query, key).tril_()
    output += torch.einsum("bgkncs,bgnse->bgknce", scores, value)
    return output.flatten(3, 4)[:, :, :, :L], running[:, :, -1]


def _chunked(x: Tensor, chunk: int) -> Tensor:
    """(..., L, F) as (..., n, chunk, F); zeros, which add nothing, fill the last chunk."""
    missing = -x.shape[-2] % chunk
    chunks: Tensor = torch.nn.functional.pad(x, (0, 0, 0, missing)).unflatten(-2, (-1, chunk))
    return chunks
