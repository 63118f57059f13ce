"""Mean attention: each output row is the plain average of the values up to it.

Formula: A_ij = 1/(i+1) for j <= i, output = A V.
Paper: none; it is what causal attention is when all scores are equal.
Cost: O(S E) time by cumsum, O(S^2 E) by the other methods; O(S E) memory by all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from pydantic import Field
from torch import Tensor

from qkv.attention.common.gradients import normalize_size, scale_back
from qkv.attention.common.row_masks import mask_padding, padding_mask
from qkv.attention.common.score_blocks import largest_size, score_dtype
from qkv.attention.common.visibility import row_blocks

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
_BLOCK = 4096  # rows whose sum may be float32's
_CHUNK = 32  # rows that are added up one after the other
_SEGMENT = 512  # rows of as many chunks as are at work at a time
_SHORT = 128  # up to so many rows one cumsum is as fast
_CACHED = 1 << 18  # numbers: what stays in the cache

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


def score_count(sizes: Mapping[str, int], parameters: Any) -> int:
    """How many pairs of a row and a value are looked at, one by one; the loop reads each value
    again, number by number."""
    if parameters.method == "cumsum":
        return 0
    rows = sizes["B"] * sizes["H"] * sizes["S"] ** 2
    return rows * sizes["E"] if parameters.method == "loop" else rows


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
    weights = None
    if "weights" in outputs:
        (B, H, S, _), lengths_B = value_BHSE.shape, _lengths(value_BHSE, key_lengths_B)
        weights = value_BHSE.new_empty(B, H, S, S, dtype=score_dtype(value_BHSE.dtype))
        for rows in row_blocks(S, B * S, _BLOCK_ELEMENTS):
            weights[:, :, rows] = _weights(lengths_B, rows, S, causal, normalize, "matmul")
    if "output" not in outputs:
        return Mean(None, weights, method)
    if key_lengths_B is not None:
        value_BHSE = mask_padding(padding_mask(value_BHSE.shape[2], key_lengths_B), value_BHSE)
    make = _METHODS[method]
    if normalize and value_BHSE.dtype == torch.float64:
        S, most = value_BHSE.shape[2], largest_size(value_BHSE)
        if most > 1e300 / S:
            # a sum on the way to an average must not overflow, nor an average that is rounded up
            room = 2.0 ** (S.bit_length() + 1)
            made = make(value_BHSE / room, key_lengths_B, causal, normalize)
            return Mean(made.clamp(-most / room, most / room) * room, weights, method)
    return Mean(make(value_BHSE, key_lengths_B, causal, normalize), weights, method)


def weights(
    value_BHSE: Float[Tensor, "B H S E"],
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    *,
    causal: bool = True,
    normalize: bool = True,
    method: str = "cumsum",
) -> Callable[[slice], Tensor]:
    """What makes blocks of rows of A, whatever method makes the output: from a slice of S to
    (B, H, R, S), in memory O(R S). The arguments are `attend`'s."""
    B, H, S, _ = value_BHSE.shape
    lengths_B = _lengths(value_BHSE, key_lengths_B)
    exact = score_dtype(value_BHSE.dtype)

    def row_block(rows: slice) -> Float32[Tensor, "B H R S"] | Float64[Tensor, "B H R S"]:
        block_B1RS = _weights(lengths_B, rows, S, causal, normalize, "matmul").to(exact)
        return block_B1RS.expand(B, H, -1, S).contiguous()

    return row_block


def _lengths(value_BHSE: Tensor, key_lengths_B: Tensor | None) -> Tensor:
    """How many values of each item are no padding, (B,)."""
    if key_lengths_B is not None:
        return key_lengths_B
    B, _, S, _ = value_BHSE.shape
    return torch.full((B,), S, device=value_BHSE.device)


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


def _cumsum(value_BHSE: Tensor, lengths_B: Tensor | None, causal: bool, normalize: bool) -> Tensor:
    """Sums of few values in the scores' dtype, and sums of those in float64; what overflowed is
    made anew, all in float64.

    What a float32 is off by is a few roundings of the sum of |v|: see `_total` and `_running`.
    """
    S, dtype = value_BHSE.shape[2], value_BHSE.dtype
    exact = score_dtype(dtype)
    counts: Tensor | int = 1
    if normalize and lengths_B is not None:
        counts = _counts(lengths_B, slice(0, S if causal else 1), causal).clamp(min=1)
    elif normalize and causal:
        counts = torch.arange(1, S + 1, dtype=exact, device=value_BHSE.device)[:, None]
    elif normalize:
        counts = S
    if value_BHSE.device.type != "cpu":
        made = (_exactly(value_BHSE, causal) / counts).to(exact)
    else:
        made = _running(value_BHSE, exact) if causal else _total(value_BHSE, exact)
        if normalize:
            made /= counts
        # what is inf or NaN once, stays so; each is asked alone only where one of them is
        if exact == torch.float32 and not math.isfinite(made.sum().item()):
            again = (_exactly(value_BHSE, causal) / counts).to(exact)
            made = torch.where(made.isfinite(), made, again)
    if dtype != exact:
        made = made.to(dtype)
    return made if causal else made.expand_as(value_BHSE).contiguous()


def _exactly(value_BHSE: Tensor, causal: bool) -> Tensor:
    """All sums in float64, which nothing narrower overflows."""
    if causal:
        return value_BHSE.cumsum(2, dtype=torch.float64)
    return value_BHSE.sum(2, keepdim=True, dtype=torch.float64)


def _total(value_BHSE: Tensor, exact: torch.dtype) -> Tensor:
    """The sum of all rows, (B, H, 1, E).

    torch adds up 16 rows, then 16 such sums, and so on: few roundings, but more with more rows.
    """
    S = value_BHSE.shape[2]
    if S <= _BLOCK:
        return value_BHSE.sum(2, keepdim=True, dtype=exact)
    cut = S - S % _BLOCK
    blocks = value_BHSE[:, :, :cut].unflatten(2, (-1, _BLOCK)).sum(3, dtype=exact)
    sums: Tensor = blocks.sum(2, keepdim=True, dtype=torch.float64)
    if cut < S:
        sums += value_BHSE[:, :, cut:].sum(2, keepdim=True, dtype=exact)
    return sums.to(exact)


def _running(value_BHSE: Tensor, exact: torch.dtype) -> Tensor:
    """The sum up to each row.

    torch's cumsum of a chunk rounds each of its sums once (within, it is float64's), and what comes
    before a chunk is a sum of such in float64. It is rounded and added, which is 3 roundings in
    all. Faster than one cumsum over all rows, because it stays in the cache. Where it is cut does
    not depend on B and H, so that neither do the bits.
    """
    B, H, S, E = value_BHSE.shape
    if S <= _SHORT:
        return value_BHSE.cumsum(2, dtype=exact)
    cut = S - S % _CHUNK
    made_BHSE = torch.empty_like(value_BHSE, dtype=exact, memory_format=torch.contiguous_format)
    value, made = value_BHSE.flatten(0, 1), made_BHSE.flatten(0, 1)
    for own in row_blocks(B * H, min(S, _SEGMENT) * E, _CACHED):
        before = made.new_zeros(own.stop - own.start, 1, E, dtype=torch.float64)
        for rows in [*row_blocks(cut, 1, _SEGMENT), slice(cut, S)]:
            if rows.start == rows.stop:
                continue
            chunks = made[own, rows].unflatten(1, (-1, min(_CHUNK, rows.stop - rows.start)))
            part = value[own, rows].unflatten(1, chunks.shape[1:3])
            torch.cumsum(part, 2, dtype=exact, out=chunks)
            totals = torch.cat([before, chunks[:, :, -1]], 1).cumsum(1)
            chunks += totals[:, :-1, None].to(exact)
            before = totals[:, -1:]
    return made_BHSE


def _loop(value_BHSE: Tensor, lengths_B: Tensor | None, causal: bool, normalize: bool) -> Tensor:
    output, S = torch.empty_like(value_BHSE), value_BHSE.shape[2]
    value, lengths_B = value_BHSE.double(), _lengths(value_BHSE, lengths_B)
    counts_B1S1 = _counts(lengths_B, slice(0, S), causal).clamp(min=1)
    for i in range(S):
        row_BHE = value[:, :, : i + 1 if causal else S].sum(2)
        output[:, :, i] = row_BHE / counts_B1S1[:, :, i] if normalize else row_BHE
    return output


def _product(
    value_BHSE: Tensor, lengths_B: Tensor | None, causal: bool, normalize: bool, *, method: str
) -> Tensor:
    output, (B, _, S, _) = torch.empty_like(value_BHSE), value_BHSE.shape
    value, lengths_B = value_BHSE.double(), _lengths(value_BHSE, lengths_B)
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
    S, lengths_B = value_BHSE.shape[2], _lengths(value_BHSE, key_lengths_B)
    grad, exponent = normalize_size(grad_output_BHSE.double())
    if normalize:
        grad = grad / _counts(lengths_B, slice(0, S), causal).clamp(min=1)
    sums = grad.flip(2).cumsum(2).flip(2) if causal else grad.sum(2, keepdim=True)
    value = mask_padding(padding_mask(S, key_lengths_B), sums.expand_as(value_BHSE))
    return {"value": scale_back(value, exponent)}
