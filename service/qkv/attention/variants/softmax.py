"""Exact attention: each output row is the average of the values, weighted by a softmax of scores.

Formula: A = softmax(scale Q K^T + mask); output = A V.
Paper: Vaswani et al., Attention Is All You Need, arXiv:1706.03762, section 3.2.1.
Cost: O(L S (D + E)) time; O(L + S) memory unless weights or scores are requested.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any, Final, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from pydantic import Field
from torch import Tensor

from qkv.attention.common import fused_kernel
from qkv.attention.common.explicit_outputs import explicit_outputs
from qkv.attention.common.gradients import gradients_by_scores, is_ordinary
from qkv.attention.common.guards import are_wide
from qkv.attention.common.halves import in_halves
from qkv.attention.common.head_terms import HeadTerms
from qkv.attention.common.score_blocks import Scores, is_safe, score_dtype
from qkv.attention.common.score_parameters import Scale, Softcap, Window
from qkv.attention.common.score_steps import (
    SCORE_STEPS,
    kept_weights,
    mask_step_values,
    mask_steps,
    per_query_head,
    score_steps,
    seen_keys,
)
from qkv.attention.common.visibility import Visibility
from qkv.attention.step import Step, StepValue

WEIGHTS: Final = "stochastic; unnormalised after dropout, and with sinks"
REFUSES: Final[Mapping[str, str]] = {}

STACKABLE_BELOW: Final = 1e9

STEPS: Final = (
    *SCORE_STEPS,
    *mask_steps("scale Q K^T + mask"),
    Step(
        "exponentials", "B H L S", None, "e^(s - m) of each score s so far, where m is the largest "
        "one of the row.", rows="L",
    ),
    Step(
        "row_sums", "B H L", None, "The sum of each row of exponentials, and of the sink's if "
        "there is one.", rows="L",
    ),
    Step(
        "weights", "B H L S", "softmax(scale Q K^T + mask)", "The exponentials divided by the sum "
        "of their row.", rows="L",
    ),
    Step(
        "kept", "B H L S", None, "The weights that dropout keeps, divided by 1 - dropout; the "
        "others are 0.", rows="L", needs=("dropout",), output="weights",
    ),
    Step("terms", "B H L S E", "A V", "Each weight times the value of its key.", rows="L"),
    Step("output", "B H L E", "output", "The sum of the terms over all keys.", rows="L"),
)  # fmt: skip

_DROPPED = 32  # one pair with dropout takes as long as so many without

_FEWEST_QUERIES = 64  # with fewer queries, bits may depend on the number of threads

_Position = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class Softmax(NamedTuple):
    """The outputs of exact attention; None for an output that was not requested."""

    output: Float[Tensor, "B H L E"] | None = None
    weights: Float32[Tensor, "B H L S"] | Float64[Tensor, "B H L S"] | None = None
    scores: Float32[Tensor, "B H L S"] | Float64[Tensor, "B H L S"] | None = None
    backend: str = "explicit"


def uses_sdpa(
    sizes: Mapping[str, int], parameters: Any, outputs: frozenset[str], inputs: Collection[str]
) -> bool:
    """Returns True if torch's kernel runs and has the same bits on any number of threads.

    Numbers of unusual size are excepted. With few queries the kernel splits the keys by the number
    of threads. Measured: no difference in 386 shapes with L >= 32; a difference in 21 of 147 shapes
    with less. Slopes and sinks give each head its own bias, which may cut the rows into small
    blocks.
    """
    plain = outputs <= {"output"} and parameters.softcap is None and not parameters.dropout
    if {"alibi_slopes", "sinks"}.intersection(inputs):
        bias = sizes["B"] * sizes["H"] * sizes["L"] * (sizes["S"] + 1)
        plain = plain and bias <= fused_kernel.BIAS_ELEMENTS
    return plain and sizes["L"] >= _FEWEST_QUERIES


def weights_are(parameters: Any, inputs: Collection[str]) -> str:
    """Returns the kind of the weights for these parameters and names of inputs."""
    return "unnormalised" if parameters.dropout or "sinks" in inputs else "stochastic"


def flops(sizes: Mapping[str, int]) -> int:
    """Returns the operations of both matrix products; a multiply and an add count as two."""
    B, H, L, S, D, E = (sizes[letter] for letter in "BHLSDE")
    return 2 * B * H * L * S * (D + E)


def score_count(sizes: Mapping[str, int], parameters: Any) -> int:
    """Returns the number of scores, times 32 with dropout, which draws a number for each."""
    scores = sizes["B"] * sizes["H"] * sizes["L"] * sizes["S"]
    return scores * _DROPPED if parameters.dropout else scores


@dataclass(frozen=True, eq=False)
class Call:
    """A request for exact attention.

    Attributes:
        query_BHLD: queries; H is a multiple of G, query head h reads key head h // (H / G).
        key_BGSD: keys.
        value_BGSE: values; E may differ from D.
        mask_BHLS: bool (true: may attend) or floating (added to the scores, after softcap).
        key_lengths_B: keys at and after this position are padding.
        alibi_slopes_H: slopes of ALiBi, added after softcap.
        sinks_H: logits of the sinks; no mask, window, scale or softcap applies to them.
        plane_BH: b * H + h of each plane within its own request, for a batch of several requests;
            None: all planes belong to one request. Only dropout uses it.
    """

    query_BHLD: Float[Tensor, "B H L D"]
    key_BGSD: Float[Tensor, "B G S D"]
    value_BGSE: Float[Tensor, "B G S E"]
    mask_BHLS: Bool[Tensor, "#B #H #L #S"] | Float[Tensor, "#B #H #L #S"] | None = None
    key_lengths_B: Int64[Tensor, "B"] | None = None
    alibi_slopes_H: Float[Tensor, "H"] | None = None
    sinks_H: Float[Tensor, "H"] | None = None
    _: KW_ONLY
    causal: Annotated[
        bool, Field(description="A query sees only the keys up to its own position.")
    ] = False
    query_offset: Annotated[
        _Position | Literal["end"],
        Field(
            description="Position of the first query on the key axis. 0 is the alignment of "
            'torch\'s is_causal. "end" aligns the last query with the last valid key.'
        ),
    ] = 0
    scale: Scale = None
    softcap: Softcap = None
    window: Window = None
    dropout: Annotated[
        float, Field(ge=0, lt=1, description="Probability that a weight is dropped.")
    ] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**64, description="Seed of the dropout.")] = 0
    plane_BH: Int64[Tensor, "B H"] | None = None


def attend(call: Call, outputs: frozenset[str]) -> Softmax:
    """Computes exact attention.

    Scores and sums are float32, or float64 for float64 inputs. The weights are those that average
    the values: after dropout. A row that sees no key is zero. If only the output is requested,
    torch's fused kernel runs (backend "sdpa"). With softcap, dropout, or inputs that could
    overflow, plain products run in blocks of rows (backend "explicit").

    ALiBi adds slope * (j - p) to the score of key j, where p = i + query_offset is the position of
    query i (Press et al., Train Short, Test Long, arXiv:2108.12409, section 3). A sink is one more
    logit of each row, which has no value (OpenAI, gpt-oss Model Card, arXiv:2508.10925, section
    2.2): A_ij = exp(s_ij) / (exp(sink) + sum_j exp(s_ij)). A sink of -inf is none; one of inf
    leaves the keys a weight of 0.

    `outputs` are the names of the outputs to return: `output`, `weights`, `scores`.
    """
    query, key, value = call.query_BHLD, call.key_BGSD, call.value_BGSE
    (B, H, _, D), S, exact = query.shape, key.shape[2], score_dtype(query.dtype)
    if B * H * S > fused_kernel.BIAS_ELEMENTS and B * H > 1:
        # one row of all heads would be a large matrix by itself
        plane_BH = call.plane_BH
        if plane_BH is None:
            plane_BH = torch.arange(B * H, device=query.device).view(B, H)
        return in_halves(attend, replace(call, plane_BH=plane_BH), outputs)
    scale, visible = D**-0.5 if call.scale is None else call.scale, Visibility.of(call, exact)
    terms = HeadTerms.of(call.alibi_slopes_H, call.sinks_H)
    plain = outputs <= {"output"} and call.softcap is None and not call.dropout
    fits = terms is None or terms.are_safe(visible)
    if are_wide():
        safe = False
    elif plain and fits and fused_kernel.is_supported(query, call.mask_BHLS, terms, scale):
        output = fused_kernel.attend(query, key, value, visible, terms, scale)
        if output is not None:
            return Softmax(output, backend="sdpa")
        safe = False
    else:
        safe = fits and is_safe(query, key, value, scale)
    if not safe:
        visible = visible._replace(dtype=torch.float64)
        value = visible.without_padding(value)
    scores = _scores(call, key, visible, terms, safe)
    return Softmax(*explicit_outputs(scores, value.to(visible.dtype), outputs, query.dtype))


def weights(call: Call) -> Callable[[slice], Tensor]:
    """Returns a function that computes rows of A, after dropout, from a slice of L: (B, H, R, S).

    It takes memory O(R S).
    """
    S, exact = call.key_BGSD.shape[2], score_dtype(call.query_BHLD.dtype)
    visible, terms = Visibility.of(call, exact), HeadTerms.of(call.alibi_slopes_H, call.sinks_H)
    safe = (terms is None or terms.are_safe(visible)) and not are_wide()
    safe = safe and is_safe(call.query_BHLD, call.key_BGSD, None, _scale(call))
    if not safe:
        visible = visible._replace(dtype=torch.float64)
    scores = _scores(call, call.key_BGSD, visible, terms, safe)

    def row_block(rows: slice) -> Float32[Tensor, "B H R S"] | Float64[Tensor, "B H R S"]:
        block = scores.block(rows)
        if block.keys == slice(0, S):
            return block.weights.to(exact)
        whole_BHRS = block.weights.new_zeros(*block.weights.shape[:-1], S, dtype=exact)
        whole_BHRS[..., block.keys] = block.weights
        return whole_BHRS

    return row_block


def _scale(call: Call) -> float:
    return call.query_BHLD.shape[3] ** -0.5 if call.scale is None else call.scale


def _scores(
    call: Call, key_BGSD: Tensor, visible: Visibility, terms: HeadTerms | None, safe: bool
) -> Scores:
    return Scores.of(
        call.query_BHLD, key_BGSD, visible, _scale(call), call.softcap, call.dropout, call.seed,
        call.plane_BH, safe, terms,
    )  # fmt: skip


def steps(call: Call) -> dict[str, StepValue]:
    """Returns the steps by name, from float64 tensors."""
    query, key, value, lengths = call.query_BHLD, call.key_BGSD, call.value_BGSE, call.key_lengths_B
    found, scores = score_steps(query, key, value, lengths, call.scale, call.softcap)
    seen, distance = seen_keys(query, key, lengths, call.causal, call.query_offset, call.window)
    found |= mask_step_values(scores, seen, distance, call.mask_BHLS, call.alibi_slopes_H)
    scores_BHLS = found["masked"]
    sink_H11 = scores_BHLS.new_full((1, 1, 1), -torch.inf)
    if call.sinks_H is not None:
        sink_H11 = call.sinks_H[:, None, None]
    top = scores_BHLS.amax(-1, keepdim=True).maximum(sink_H11)
    top = top.masked_fill(top == -torch.inf, 0.0)
    exponentials = (scores_BHLS - top).exp()
    # inf - inf is NaN: the exponential of a sink of inf is 1 beside keys of weight 0
    share = (sink_H11 - top).exp().masked_fill(sink_H11 == torch.inf, 1.0)
    sums = exponentials.sum(-1, keepdim=True) + share
    weights = last = exponentials / sums.masked_fill(sums == 0, 1.0)
    if call.dropout and call.plane_BH is not None:
        kept = kept_weights(call.dropout, call.seed, call.plane_BH, weights)
        found["kept"] = last = weights * kept / (1 - call.dropout)
    value = per_query_head(found["value"], query)
    return {
        **found, "exponentials": exponentials, "row_sums": sums[..., 0], "weights": weights,
        "terms": lambda: last[..., None] * value[:, :, None], "output": last @ value,
    }  # fmt: skip


def backward(call: Call, grad_output_BHLE: Float[Tensor, "B H L E"]) -> dict[str, Tensor]:
    """Returns the gradients of sum(grad_output * output), computed in blocks of rows.

    They are in float32, or in float64 for float64 inputs and where float32 could overflow. P are
    the weights before dropout, M the factors of dropout. Then dV = (P M)^T dY, dP = (dY V^T) M,
    ds = P (dP - rowsum(dP P)), dQ = scale ds K and dK = scale ds^T Q (Dao et al., FlashAttention,
    arXiv:2205.14135, appendix B.2). The same chain rule gives dslope = sum_ij ds_ij (j - p_i) and,
    with the weight p_sink of a row's sink, dsink = -sum_i p_sink rowsum(dP P): the value of a sink
    is 0.
    """
    scale, visible = _scale(call), Visibility.of(call, score_dtype(call.query_BHLD.dtype))
    terms = HeadTerms.of(call.alibi_slopes_H, call.sinks_H)
    key, value = visible.without_padding(call.key_BGSD), visible.without_padding(call.value_BGSE)
    tensors = (grad_output_BHLE, call.query_BHLD, key, value)
    safe = (terms is None or terms.are_safe(visible)) and is_safe(*tensors[1:], scale)
    farthest = 0 if call.alibi_slopes_H is None else visible.farthest
    safe = safe and is_ordinary(tensors, scale, call.dropout, farthest)
    if not safe:
        visible = visible._replace(dtype=torch.float64)
    scores = _scores(call, key, visible, terms, safe)
    return gradients_by_scores(scores, tensors, safe)
