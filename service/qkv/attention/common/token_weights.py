"""Rows of the attention matrix of variants with a state, from the last chunk to the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from qkv.attention.common.recurrence import Chunks
from qkv.attention.common.score_blocks import score_dtype
from qkv.attention.common.token_inputs import Sums, TokenInputs
from qkv.attention.common.token_state import Continued, run_from, sums_behind


def run_with_weights(new: TokenInputs, call: Any, outputs: frozenset[str]) -> Continued:
    """Returns the response to a call with a state, and its weights if they are requested.

    Args:
        new: the tokens of the call.
        call: has the fields `past`, `chunk` and `state`.
        outputs: the names of the outputs to return.
    """
    found = run_from(new, call.past, call.chunk, call.state)
    if "weights" not in outputs:
        return found
    rows = slice(0, new.first.shape[2])
    return found._replace(weights_BHSS=rows_behind(new, call.past, call.chunk)(rows))


def rows_behind(new: TokenInputs, past: Any | None, chunk: int) -> Callable[[slice], Tensor]:
    """Returns a function that computes rows of A, (B, H, R, S), of tokens behind a state.

    The last column of the state sums the weights. The others are not needed: `new` may have values
    of any width.
    """
    E = new.tensors["value"].shape[3]
    if past is not None:
        cut = {"sums": past.sums[..., past.sums.shape[-1] - E - 1 :]}
        if past.tail_length is not None:
            cut["tail_value"] = past.tail_value[..., :E]
        past = past._replace(**cut)
    exact, rows_of = score_dtype(new.first.dtype), row_function(new, sums_behind(new, past), chunk)
    return lambda rows: rows_of(rows).to(exact)


def row_function(inputs: TokenInputs, sums: Sums, chunk: int) -> Callable[[slice], Tensor]:
    """Returns a function that computes rows of A in float64, (B, H, R, S).

    Args:
        inputs: the tokens, of S positions.
        sums: those before the first token.
        chunk: the number of tokens in a chunk. All chunks together need memory O(S).
    """
    B, _, S, *_ = inputs.first.shape
    chunks: list[tuple[Chunks, Tensor | None]] = []
    for start in range(0, S, chunk):
        part, factors, sums = inputs.rows(slice(start, start + chunk)).weight_chunk(sums)
        chunks.append((part, factors))

    def row_block(rows: slice) -> Tensor:
        R, whole_XKRS, later_XKRD = rows.stop - rows.start, None, None
        for index in range((rows.stop - 1) // chunk, -1, -1):
            part, factors_XN = chunks[index]
            X, _, K, C, D = part.query_XYKCD.shape
            start = index * chunk
            if later_XKRD is None or whole_XKRS is None:
                later_XKRD = part.query_XYKCD.new_empty(X, K, 0, D)
                whole_XKRS = later_XKRD.new_zeros(X, K, R, S)
            first = max(rows.start - start, 0)
            own = slice(first, max(first, min(rows.stop - start, C)))
            weights_XKRC, later_XKRD = part.row_weights(later_XKRD, own)
            if factors_XN is not None:
                weights_XKRC = weights_XKRC * factors_XN[:, None, None]
            first_row = R - weights_XKRC.shape[2]
            whole_XKRS[:, :, first_row:, start : start + C] = weights_XKRC
        assert whole_XKRS is not None
        whole_BHRS: Tensor = whole_XKRS.unflatten(0, (B, -1)).flatten(1, 2)
        return whole_BHRS

    return row_block
