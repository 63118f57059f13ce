"""Mean attention: each output row is the plain average of the values up to it.

Formula: A_ij = 1/(i+1) for j <= i; output = A V.
Paper: none; it is causal attention with equal scores.
Cost: O(S E) time by cumsum, O(S^2 E) by the other methods; O(S E) memory by all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple

import torch
from jaxtyping import Float, Float32, Float64, Int64
from pydantic import Field
from torch import Tensor

from qkv.attention.common.gradients import normalize_size, scale_back
from qkv.attention.common.guards import holds, is_finite, largest_size, occurs
from qkv.attention.common.row_masks import mask_padding, padding_mask
from qkv.attention.common.running_sums import running_sums
from qkv.attention.common.score_blocks import score_dtype
from qkv.attention.common.score_steps import seen_keys, sums_before, zero_padding
from qkv.attention.common.summed_tokens import Features, SummedTokens, has_state, state_sizes
from qkv.attention.common.token_gradients import gradients_from
from qkv.attention.common.token_inputs import Chunk, Form, Sums
from qkv.attention.common.token_weights import rows_behind, run_with_weights
from qkv.attention.common.visibility import row_blocks
from qkv.attention.step import Step

WEIGHTS: Final = "stochastic; unnormalised if normalize is false"
_NO_SCORES: Final = "all scores are equal: there is no query and no key"
REFUSES: Final[Mapping[str, str]] = {
    "scale": _NO_SCORES,
    "softcap": _NO_SCORES,
    "query_offset": "each row is at the position of its value",
    "window": "a row averages all values before it",
    "dropout": "the mean is the baseline without randomness",
    "seed": "the mean is the baseline without randomness",
}

STACKABLE_BELOW: Final = 1e9
STATE_NEEDS: Final[Mapping[str, Any]] = {"causal": True, "method": "cumsum"}

STEPS: Final = (
    Step("value", "B H S E", "V", "The values; padding is zeros."),
    Step("seen", "B S S", "j <= i", "1 where a row averages the value of a column.", rows="S"),
    Step("counts", "B S", "i+1", "The sum of each row of seen.", rows="S", needs=("normalize",)),
    Step(
        "weights", "B H S S", "A_ij", "seen; with normalize, divided by the count of the row.",
        rows="S",
    ),
    Step("sums", "B H S E", None, "The sum of the values that a row averages.", rows="S"),
    Step("output", "B H S E", "A V", "The sums; with normalize, divided by counts.", rows="S"),
)  # fmt: skip

_BLOCK_ELEMENTS = 1 << 22  # of a block of rows of A
_BLOCK = 4096  # the most rows that are summed in float32

_Method = Literal["cumsum", "loop", "matmul", "softmax"]


class State(NamedTuple):
    """The tensors that the next tokens need; C is one less than the tokens of a chunk.

    Attributes:
        sums: that of (v, 1); the last column is the number of values.
        tail_length: the number of tokens in the tail; None: there is no tail.
        tail_value: their values, then zeros.
    """

    sums: Float64[Tensor, "B H 1 W"] | Float32[Tensor, "B H 1 W"] | None = None
    tail_length: Int64[Tensor, "B"] | None = None
    tail_value: Float[Tensor, "B H C E"] | None = None


class Mean(NamedTuple):
    """The outputs of mean attention; None for an output that was not requested."""

    output: Float[Tensor, "B H S E"] | None = None
    weights: Float32[Tensor, "B H S S"] | Float64[Tensor, "B H S S"] | None = None
    state: State | None = None
    backend: str = "cumsum"


def weights_are(parameters: Any, inputs: Collection[str] = ()) -> str:
    """Returns the kind of the weights for these parameters; with a state, rows sum to less."""
    return "stochastic" if parameters.normalize and not has_state(inputs) else "unnormalised"


def infer_sizes(sizes: Mapping[str, int], parameters: Any) -> Mapping[str, int]:
    """Returns the sizes of the tensors of a state."""
    return state_sizes(sizes, parameters)


def flops(sizes: Mapping[str, int]) -> int:
    """Returns the operations of the method cumsum: an add and a multiply for each value."""
    return 2 * sizes["B"] * sizes["H"] * sizes["S"] * sizes["E"]


def score_count(sizes: Mapping[str, int], parameters: Any) -> int:
    """Returns the number of pairs of a row and a value that the method visits.

    The method loop reads every element of a value again for each row.
    """
    if parameters.method == "cumsum":
        return 0
    rows = sizes["B"] * sizes["H"] * sizes["S"] ** 2
    return rows * sizes["E"] if parameters.method == "loop" else rows


@dataclass(frozen=True, eq=False)
class Call:
    """A request for an average of values.

    Attributes:
        value_BHSE: the values.
        key_lengths_B: values at and after this position are padding, and in no average.
        past: the state behind the tokens before these. Sums alone are compact.
        causal, normalize, method, chunk, state: see their descriptions.
    """

    value_BHSE: Float[Tensor, "B H S E"]
    key_lengths_B: Int64[Tensor, "B"] | None = None
    past: State | None = None
    _: KW_ONLY
    causal: Annotated[
        bool,
        Field(description="If true, a row averages the values up to it, otherwise all values."),
    ] = True
    normalize: Annotated[
        bool, Field(description="If true, sums are divided by the number of values.")
    ] = True
    method: Annotated[
        _Method,
        Field(
            description="The method of computation; all four give the same mean of finite values. "
            "cumsum: a running sum. loop: a loop over rows. matmul: a product with a triangle of "
            "ones. softmax: a product with the softmax of masked zeros."
        ),
    ] = "cumsum"
    chunk: Chunk = 64
    state: Form = "exact"


def attend(call: Call, outputs: frozenset[str]) -> Mean:
    """Averages the values up to each row, or all of them.

    `outputs` are the names of the outputs to return: "output", "weights", "state".
    """
    value, lengths_B, weights = call.value_BHSE, call.key_lengths_B, None
    exact = score_dtype(value.dtype)
    if call.past is not None or "state" in outputs:
        found = run_with_weights(_tokens(call, value), call, outputs)
        return Mean(found.output_BHSE, found.weights_BHSS, State(**found.fields))
    if "weights" in outputs:
        B, H, S, _ = value.shape
        weights, every_B = value.new_empty(B, H, S, S, dtype=exact), _lengths(value, lengths_B)
        for rows in row_blocks(S, B * S, _BLOCK_ELEMENTS):
            weights[:, :, rows] = _weights(every_B, rows, S, call.causal, call.normalize, "matmul")
    if "output" not in outputs:
        return Mean(None, weights, backend=call.method)
    value = mask_padding(padding_mask(value.shape[2], lengths_B), value)
    make = _METHODS[call.method]
    if call.normalize and value.dtype == torch.float64:
        S, largest = value.shape[2], largest_size(value)
        if occurs(largest > 1e300 / S):
            # neither a partial sum nor an average that rounds up may overflow
            room = 2.0 ** (S.bit_length() + 1)
            mean = make(value / room, lengths_B, call.causal, call.normalize)
            bound = float(largest) / room
            return Mean(mean.clamp(-bound, bound) * room, weights, backend=call.method)
    output = make(value, lengths_B, call.causal, call.normalize)
    return Mean(output, weights, backend=call.method)


def weights(call: Call) -> Callable[[slice], Tensor]:
    """Returns a function that computes rows of A from a slice of S: (B, H, R, S), in memory O(R S).

    A does not depend on the method.
    """
    B, H, S, _ = call.value_BHSE.shape
    exact = score_dtype(call.value_BHSE.dtype)
    if call.past is not None:
        return rows_behind(_tokens(call, call.value_BHSE[..., :0]), call.past, call.chunk)
    lengths_B = _lengths(call.value_BHSE, call.key_lengths_B)

    def row_block(rows: slice) -> Float32[Tensor, "B H R S"] | Float64[Tensor, "B H R S"]:
        block_B1RS = _weights(lengths_B, rows, S, call.causal, call.normalize, "matmul").to(exact)
        return block_B1RS.expand(B, H, -1, S).contiguous()

    return row_block


def _tokens(call: Call, value_BHSE: Tensor) -> SummedTokens:
    """Returns the tokens of a request with a state, and with these values."""
    padding, tensors = padding_mask(value_BHSE.shape[2], call.key_lengths_B), {"value": value_BHSE}
    return SummedTokens(padding, tensors, _token_features, 1, normalize=call.normalize)


def _token_features(tokens: SummedTokens, _before: Sums) -> Features:
    """Returns ones: each query has the same product with each key."""
    ones_BHC1 = tokens.first.new_ones(*tokens.first.shape[:3], 1, dtype=torch.float64)
    return Features(ones_BHC1[:, :, None], ones_BHC1)


def _lengths(value_BHSE: Tensor, key_lengths_B: Tensor | None) -> Tensor:
    """Returns the number of values of each item that are not padding, (B,)."""
    if key_lengths_B is not None:
        return key_lengths_B
    B, _, S, _ = value_BHSE.shape
    return torch.full((B,), S, device=value_BHSE.device)


def _counts(lengths_B: Tensor, rows: slice, causal: bool) -> Tensor:
    """Returns the number of values that each row averages: (B, 1, R, 1)."""
    if not causal:
        return lengths_B.view(-1, 1, 1, 1).expand(-1, 1, rows.stop - rows.start, 1)
    row_R = torch.arange(rows.start, rows.stop, device=lengths_B.device)
    return torch.minimum(row_R + 1, lengths_B[:, None])[:, None, :, None]


def _weights(
    lengths_B: Tensor, rows: slice, S: int, causal: bool, normalize: bool, method: str
) -> Tensor:
    """Returns rows of A in float64, (B, 1, R, S).

    They are a triangle of ones over its row sums, or the softmax of masked zeros.
    """
    key_S = torch.arange(S, device=lengths_B.device)
    counts_B1R1 = _counts(lengths_B, rows, causal)
    seen_B1RS = key_S < counts_B1R1
    if method == "matmul":
        ones = seen_B1RS.double()
        return ones / ones.sum(-1, keepdim=True).clamp(min=1) if normalize else ones
    zeros = torch.zeros(seen_B1RS.shape, dtype=torch.float64, device=lengths_B.device)
    weights = torch.softmax(zeros.masked_fill(~seen_B1RS, -torch.inf), -1)
    weights = weights.masked_fill(counts_B1R1 == 0, 0.0)
    return weights if normalize else weights * counts_B1R1


def _cumsum(value_BHSE: Tensor, lengths_B: Tensor | None, causal: bool, normalize: bool) -> Tensor:
    """Sums few values in the scores' dtype, and these sums in float64.

    Results that overflow are recomputed in float64. The error of a float32 result is a few
    roundings of the sum of |v|: see `_total` and `running_sums`.
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
        output = (_exactly(value_BHSE, causal) / counts).to(exact)
    else:
        output = running_sums(value_BHSE, exact) if causal else _total(value_BHSE, exact)
        if normalize:
            output /= counts
        # inf and NaN persist in a sum, so one sum checks all elements
        if exact == torch.float32 and not holds(is_finite(output)):
            recomputed = (_exactly(value_BHSE, causal) / counts).to(exact)
            output = torch.where(output.isfinite(), output, recomputed)
    if dtype != exact:
        output = output.to(dtype)
    return output if causal else output.expand_as(value_BHSE).contiguous()


def _exactly(value_BHSE: Tensor, causal: bool) -> Tensor:
    """Returns all sums in float64, which sums of narrower numbers cannot overflow."""
    if causal:
        return value_BHSE.cumsum(2, dtype=torch.float64)
    return value_BHSE.sum(2, keepdim=True, dtype=torch.float64)


def _total(value_BHSE: Tensor, exact: torch.dtype) -> Tensor:
    """Returns the sum of all rows, (B, H, 1, E).

    torch adds 16 rows, then 16 such sums, and so on. The number of roundings is small but grows
    with the number of rows.
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


def steps(call: Call) -> dict[str, Tensor]:
    """Returns the steps by name, from float64 tensors."""
    value = zero_padding(call.value_BHSE, call.key_lengths_B)
    seen_BSS = seen_keys(value, value, call.key_lengths_B, call.causal, 0)[0].double()
    sums_BH1W = sums_before(call.past, value, (1, value.shape[-1] + 1))
    counts_BS = seen_BSS.sum(-1) + sums_BH1W[:, 0, :, -1]
    divisors_BS = counts_BS.clamp(min=1) if call.normalize else torch.ones_like(counts_BS)
    weights_BSS, before = seen_BSS / divisors_BS[..., None], sums_BH1W[..., :-1]
    return {
        "value": value, "seen": seen_BSS, "counts": counts_BS,
        "weights": weights_BSS[:, None].expand(-1, value.shape[1], -1, -1),
        "sums": seen_BSS[:, None] @ value + before,
        # the sums may be too large for a float
        "output": weights_BSS[:, None] @ value + before / divisors_BS[:, None, :, None],
    }  # fmt: skip


def backward(
    call: Call, grad_output_BHSE: Float[Tensor, "B H S E"], grad_state: State | None = None
) -> dict[str, Tensor]:
    """Returns the gradients of sum(grad_output * output), in float64.

    dV_j is the sum of dY_i / n_i over the rows i that average n_i values, v_j among them. This sum
    runs from the last row to the first and does not depend on the method. `grad_state` is as
    `gradients_from` takes it.
    """
    if call.past is not None or grad_state is not None:
        new = _tokens(call, call.value_BHSE)
        return gradients_from(new, call.past, grad_output_BHSE, grad_state, call.chunk)
    S, lengths_B = call.value_BHSE.shape[2], _lengths(call.value_BHSE, call.key_lengths_B)
    grad, exponent = normalize_size(grad_output_BHSE.double())
    if call.normalize:
        grad = grad / _counts(lengths_B, slice(0, S), call.causal).clamp(min=1)
    sums = grad.flip(2).cumsum(2).flip(2) if call.causal else grad.sum(2, keepdim=True)
    value = mask_padding(padding_mask(S, call.key_lengths_B), sums.expand_as(call.value_BHSE))
    return {"value": scale_back(value, exponent)}
