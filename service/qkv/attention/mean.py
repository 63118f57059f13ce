"""Mean attention: each output row is the plain average of the values up to it.

Formula: A_ij = 1/(i+1) for j <= i, output = A V.
Paper: none; it is what causal attention is when all scores are equal.
Cost: O(S E) time by cumsum, O(S^2 E) by the other methods; O(S E) memory by all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from pydantic import Field
from torch import Tensor

from qkv.attention._gradients import regrown, sized
from qkv.attention._scores import largest, score_dtype
from qkv.attention._visibility import row_blocks

FORMULA: Final = "A_ij = 1/(i+1) for j <= i; output = A V"
PAPER: Final = "none; it is what causal attention is when all scores are equal"
COST: Final = "O(S E) time by cumsum, O(S^2 E) by the other methods; O(S E) memory by all"
WEIGHTS: Final = "stochastic; unnormalised where normalize is false"
_NO_SCORES: Final = "all scores are equal: there is no query and no key"
REFUSES: Final[Mapping[str, str]] = {
    "scale": _NO_SCORES,
    "softcap": _NO_SCORES,
    "query_offset": "the rows are the values' own positions",
    "window": "a row averages all that came before it",
    "dropout": "the mean is the baseline that has no randomness",
    "seed": "the mean is the baseline that has no randomness",
}

_BLOCK_ELEMENTS = 1 << 22  # of a block of rows of A
_CHUNK = 32  # rows that are added up one after the other
_SEGMENT = 512  # rows of as many chunks as are added up side by side
_SHORT = 128  # up to so many rows torch's own cumsum is as fast
_CACHED = 1 << 17  # float64 numbers: what stays in the cache

_Method = Literal["cumsum", "loop", "matmul", "softmax"]


class Mean(NamedTuple):
    """What the mean answers; None where it was not asked for."""

    output: Float[Tensor, "B H S E"] | None = None
    weights: Float32[Tensor, "B H S S"] | Float64[Tensor, "B H S S"] | None = None
    backend: str = "cumsum"


def weights_are(parameters: Any) -> str:
    """What the weights are with these parameters."""
    return "stochastic" if parameters.normalize else "unnormalised"


def flops(sizes: Mapping[str, int]) -> int:
    """An add and a multiply for each value, as cumsum does it."""
    return 2 * sizes["B"] * sizes["H"] * sizes["S"] * sizes["E"]


def pairs(sizes: Mapping[str, int], parameters: Any) -> int:
    """How many pairs of a row and a value are looked at, one by one."""
    return 0 if parameters.method == "cumsum" else sizes["B"] * sizes["H"] * sizes["S"] ** 2


def attend(
    value_BHSE: Float[Tensor, "B H S E"],
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    *,
    causal: Annotated[
        bool, Field(description="A row averages no value past it; false: all of them.")
    ] = True,
    normalize: Annotated[
        bool, Field(description="Sums are divided by how many there are; false: sums.")
    ] = True,
    method: Annotated[
        _Method,
        Field(
            description="Four ways to one answer: a running sum, a loop over the rows, a product "
            "with a triangle of ones, or one with the softmax of zeros that are masked."
        ),
    ] = "cumsum",
    outputs: frozenset[str],
) -> Mean:
    """Averages values that came so far, or all of them.

    Args:
        value_BHSE: what is averaged.
        key_lengths_B: values at and past this index are padding, and in no average.
        causal, normalize, method: see their descriptions.
        outputs: which of "output" and "weights" to return.
    """
    (B, H, S, _), device = value_BHSE.shape, value_BHSE.device
    lengths_B = torch.full((B,), S, device=device) if key_lengths_B is None else key_lengths_B
    weights = None
    if "weights" in outputs:
        weights = value_BHSE.new_empty(B, H, S, S, dtype=score_dtype(value_BHSE.dtype))
        for rows in row_blocks(S, B * S, _BLOCK_ELEMENTS):
            weights[:, :, rows] = _weights(lengths_B, rows, S, causal, normalize, "matmul")
    if "output" not in outputs:
        return Mean(None, weights, method)
    if key_lengths_B is not None:
        padding_BS = torch.arange(S, device=device) >= lengths_B[:, None]
        value_BHSE = value_BHSE.masked_fill(padding_BS[:, None, :, None], 0.0)
    own_B = key_lengths_B if method == "cumsum" else lengths_B
    make = partial(_METHODS[method], lengths_B=own_B, causal=causal, normalize=normalize)
    if normalize and value_BHSE.dtype == torch.float64:
        most = largest(value_BHSE)
        if most > 1e300 / S:
            # a sum on the way to an average must not overflow, nor an average that is rounded up
            room = 2.0 ** (S.bit_length() + 1)
            made = make(value_BHSE / room).clamp(-most / room, most / room) * room
            return Mean(made, weights, method)
    return Mean(make(value_BHSE), weights, method)


def weights(
    value_BHSE: Float[Tensor, "B H S E"],
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    *,
    rows: slice,
    causal: bool = True,
    normalize: bool = True,
    method: str = "cumsum",
) -> Float32[Tensor, "B H R S"] | Float64[Tensor, "B H R S"]:
    """Rows `rows` of A, whatever method makes the output; the arguments are `attend`'s."""
    B, H, S, _ = value_BHSE.shape
    lengths_B = torch.full((B,), S) if key_lengths_B is None else key_lengths_B
    block_B1RS = _weights(lengths_B, rows, S, causal, normalize, "matmul")
    return block_B1RS.to(score_dtype(value_BHSE.dtype)).expand(B, H, -1, S).contiguous()


def _counts(lengths_B: Tensor, rows: slice, causal: bool) -> Tensor:
    """How many values a row averages: (B, 1, R, 1)."""
    if not causal:
        return lengths_B.view(-1, 1, 1, 1).expand(-1, 1, rows.stop - rows.start, 1)
    row_R = torch.arange(rows.start, rows.stop, device=lengths_B.device)
    return torch.minimum(row_R + 1, lengths_B[:, None])[:, None, :, None]


def _weights(
    lengths_B: Tensor, rows: slice, S: int, causal: bool, normalize: bool, method: str
) -> Tensor:
    """Rows of A in float64, (B, 1, R, S): a triangle of ones and its row sums, or the softmax of
    masked zeros."""
    key_S = torch.arange(S, device=lengths_B.device)
    counts_B1R1 = _counts(lengths_B, rows, causal)
    seen_B1RS = key_S < counts_B1R1
    if method == "matmul":
        ones = seen_B1RS.double()
        return ones / ones.sum(-1, keepdim=True).clamp(min=1) if normalize else ones
    zeros = torch.zeros(seen_B1RS.shape, dtype=torch.float64, device=lengths_B.device)
    made = torch.softmax(zeros.masked_fill(~seen_B1RS, -torch.inf), -1)
    made = made.masked_fill(counts_B1R1 == 0, 0.0)
    return made if normalize else made * counts_B1R1


# All sums are float64's, whatever came: one of 65,536 values is right to float32's last digit, and
# does not overflow.


def _cumsum(value_BHSE: Tensor, lengths_B: Tensor | None, causal: bool, normalize: bool) -> Tensor:
    S, dtype = value_BHSE.shape[2], value_BHSE.dtype
    if not causal:
        sums = _total(value_BHSE)
        if normalize:
            sums /= S if lengths_B is None else lengths_B.clamp(min=1).view(-1, 1, 1, 1)
        return sums.to(dtype).expand_as(value_BHSE).contiguous()
    counts = None
    if normalize:
        counts = torch.arange(1, S + 1, dtype=torch.float64, device=value_BHSE.device)[:, None]
        if lengths_B is not None:
            counts = torch.minimum(counts, lengths_B.clamp(min=1).view(-1, 1, 1, 1))
    if S <= _SHORT or value_BHSE.device.type != "cpu":
        sums = value_BHSE.cumsum(2, dtype=torch.float64)
        return (sums if counts is None else sums.div_(counts)).to(dtype)
    return _running(value_BHSE, counts)


def _total(value_BHSE: Tensor) -> Tensor:
    """The sum of all rows, (B, H, 1, E); in segments, whose float64 numbers stay in the cache."""
    S = value_BHSE.shape[2]
    first, *others = row_blocks(S, 1, _SEGMENT if value_BHSE.device.type == "cpu" else S)
    total = value_BHSE[:, :, first].sum(2, keepdim=True, dtype=torch.float64)
    for rows in others:
        total += value_BHSE[:, :, rows].sum(2, keepdim=True, dtype=torch.float64)
    return total


def _running(value_BHSE: Tensor, counts_S1: Tensor | None) -> Tensor:
    """The sum up to each row, over the row's count (which may have axes B and 1 before it).

    Three times as fast as torch's cumsum in float64, and as fast as that in float32: the rows of
    many chunks are added up side by side, and the float64 numbers of a segment stay in the cache.
    Where it is cut does not depend on B and H, so that neither do the bits.
    """
    (B, H, S, E), exact = value_BHSE.shape, torch.float64
    made_BHSE, cut = torch.empty_like(value_BHSE), S - S % _CHUNK
    value, made = value_BHSE.flatten(0, 1), made_BHSE.flatten(0, 1)
    shares = None
    if counts_S1 is not None:  # 1 / n is rounded, which shows in float64 only
        shares = counts_S1 if value.dtype == exact else 1 / counts_S1
        shares = shares.expand(B, H, S, 1).flatten(0, 1)
    for own in row_blocks(B * H, _SEGMENT * E, _CACHED):
        before = value.new_zeros(own.stop - own.start, 1, E, dtype=exact)
        room = before.new_empty(len(before), _CHUNK, min(cut, _SEGMENT) // _CHUNK, E)
        for rows in row_blocks(cut, 1, _SEGMENT):
            sums = room[:, :, : (rows.stop - rows.start) // _CHUNK]
            sums.copy_(_by_chunks(value[own, rows]))
            before = _add_up(sums, before)
            if shares is not None:
                share = _by_chunks(shares[own, rows])
                sums = sums.div_(share) if value.dtype == exact else sums.mul_(share)
            _by_chunks(made[own, rows]).copy_(sums)
        if cut < S:
            sums = value[own, cut:].to(exact, copy=True)
            sums[:, :1] += before
            sums = sums.cumsum(1)
            if shares is not None:
                share = shares[own, cut:]
                sums = sums.div_(share) if value.dtype == exact else sums.mul_(share)
            made[own, cut:] = sums
    return made_BHSE


def _by_chunks(x_NSE: Tensor) -> Tensor:
    """The first rows of all chunks, then all the second ones, ...: (N, _CHUNK, S / _CHUNK, E)."""
    chunks: Tensor = x_NSE.unflatten(1, (-1, _CHUNK))
    return chunks.transpose(1, 2)


def _add_up(rows_NCSE: Tensor, before_N1E: Tensor) -> Tensor:
    """Sums up to each row, in place, `before` in all of them; the last. C is `_CHUNK`."""
    rows = rows_NCSE.unbind(1)
    for above, row in itertools.pairwise(rows):
        row += above
    totals = torch.cat([before_N1E, rows[-1]], 1).cumsum(1)
    rows_NCSE += totals[:, None, :-1]
    return totals[:, -1:]


def _loop(value_BHSE: Tensor, lengths_B: Tensor, causal: bool, normalize: bool) -> Tensor:
    output, S = torch.empty_like(value_BHSE), value_BHSE.shape[2]
    value = value_BHSE.double()
    counts_B1S1 = _counts(lengths_B, slice(0, S), causal).clamp(min=1)
    for i in range(S):
        row_BHE = value[:, :, : i + 1 if causal else S].sum(2)
        output[:, :, i] = row_BHE / counts_B1S1[:, :, i] if normalize else row_BHE
    return output


def _product(
    value_BHSE: Tensor, lengths_B: Tensor, causal: bool, normalize: bool, *, method: str
) -> Tensor:
    output, (B, _, S, _) = torch.empty_like(value_BHSE), value_BHSE.shape
    value = value_BHSE.double()
    for rows in row_blocks(S, B * S, _BLOCK_ELEMENTS):
        block_B1RS = _weights(lengths_B, rows, S, causal, normalize, method)
        output[:, :, rows] = block_B1RS @ value
    return output


_METHODS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "cumsum": _cumsum,
    "loop": _loop,
    "matmul": partial(_product, method="matmul"),
    "softmax": partial(_product, method="softmax"),
}


def reference(
    value_BHSE: Tensor,
    key_lengths_B: Tensor | None = None,
    *,
    causal: bool = True,
    normalize: bool = True,
    method: str = "cumsum",
) -> Mean:
    """The same in plain float64 numpy, one head at a time, as a textbook writes it."""
    value = value_BHSE.double().numpy()
    B, H, S, E = value.shape
    output, weights = np.zeros((B, H, S, E)), np.zeros((B, H, S, S))
    for b, h in np.ndindex(B, H):
        valid = S if key_lengths_B is None else int(key_lengths_B[b])
        a = np.ones((S, valid))
        if causal:
            a = np.tril(a)
        if normalize:
            a /= np.maximum(a.sum(1, keepdims=True), 1)
        weights[b, h, :, :valid], output[b, h] = a, a @ value[b, h, :valid]
    return Mean(torch.from_numpy(output), torch.from_numpy(weights), backend="reference")


def backward(
    grad_output_BHSE: Float[Tensor, "B H S E"],
    value_BHSE: Float[Tensor, "B H S E"],
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    *,
    causal: bool = True,
    normalize: bool = True,
    method: str = "cumsum",
) -> dict[str, Tensor]:
    """Gradients of sum(grad_output * output): dV_j is the sum of dY_i / n_i over the rows i that
    average n_i values, v_j among them; in float64. The arguments are `attend`'s.

    Whatever the method, it is one function: a sum that runs from the last row to the first.
    """
    (B, _, S, _), device = value_BHSE.shape, value_BHSE.device
    lengths_B = torch.full((B,), S, device=device) if key_lengths_B is None else key_lengths_B
    grad, exponent = sized(grad_output_BHSE.double())
    if normalize:
        grad = grad / _counts(lengths_B, slice(0, S), causal).clamp(min=1)
    sums = grad.flip(2).cumsum(2).flip(2) if causal else grad.sum(2, keepdim=True)
    padding_BS = torch.arange(S, device=device) >= lengths_B[:, None]
    value = sums.expand_as(value_BHSE).masked_fill(padding_BS[:, None, :, None], 0.0)
    return {"value": regrown(value, exponent)}
