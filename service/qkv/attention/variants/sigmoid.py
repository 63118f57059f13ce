"""Sigmoid attention: each weight is a sigmoid of its own score, independent of all other keys.

Formula: A = sigmoid(scale Q K^T + bias + mask), bias = -log S; output = A V.
Paper: Ramapuram et al., Sigmoid Self-Attention, arXiv:2409.04431, section 2.
Cost: O(L S (D + E)) time; O(L + S) memory unless weights or scores are requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from pydantic import Field
from torch import Tensor

from qkv.attention.common.explicit_outputs import explicit_outputs
from qkv.attention.common.gradients import gradients_by_scores, is_ordinary
from qkv.attention.common.guards import are_wide
from qkv.attention.common.halves import in_halves
from qkv.attention.common.head_terms import HeadTerms
from qkv.attention.common.row_masks import Causal, QueryOffset
from qkv.attention.common.score_blocks import Scores, is_safe, score_dtype
from qkv.attention.common.score_parameters import Scale, Softcap, Window
from qkv.attention.common.score_steps import (
    SCORE_STEPS,
    mask_step_values,
    mask_steps,
    per_query_head,
    score_steps,
    seen_keys,
)
from qkv.attention.common.visibility import Visibility
from qkv.attention.step import Step, StepValue

WEIGHTS: Final = "unnormalised; each weight is between 0 and 1, and rows do not sum to 1"
REFUSES: Final[Mapping[str, str]] = {
    "dropout": "the paper defines no dropout of the weights; softmax has it",
    "seed": "there is no dropout to repeat",
    "normalize": "rows are not divided by their sum; softmax divides them",
}

STACKABLE_BELOW: Final = 1e9

_WEIGHTS: Final = "sigmoid(scale Q K^T + bias + mask)"
STEPS: Final = (
    *SCORE_STEPS,
    Step("shifted", "B H L S", "scale Q K^T + bias", "The scores so far, plus bias.", rows="L"),
    *mask_steps("scale Q K^T + bias + mask"),
    Step("weights", "B H L S", _WEIGHTS, "1 / (1 + e^-s) of each score s so far.", rows="L"),
    Step("terms", "B H L S E", "A V", "Each weight times the value of its key.", rows="L"),
    Step("output", "B H L E", "output", "The sum of the terms over all keys.", rows="L"),
)

_ROW_ELEMENTS = 1 << 22  # scores of one row of all heads, 16 MiB in float32; more are halved
_SCORE_ELEMENTS = 1 << 21  # of a block, 8 MiB in float32; fastest of 2**17 to 2**23 at S = 1,024


class Sigmoid(NamedTuple):
    """The outputs of sigmoid attention; None for an output that was not requested."""

    output: Float[Tensor, "B H L E"] | None = None
    weights: Float32[Tensor, "B H L S"] | Float64[Tensor, "B H L S"] | None = None
    scores: Float32[Tensor, "B H L S"] | Float64[Tensor, "B H L S"] | None = None
    backend: str = "explicit"


def flops(sizes: Mapping[str, int]) -> int:
    """Returns the operations of both matrix products; a multiply and an add count as two."""
    B, H, L, S, D, E = (sizes[letter] for letter in "BHLSDE")
    return 2 * B * H * L * S * (D + E)


@dataclass(frozen=True, eq=False)
class Call:
    """A request for sigmoid attention.

    Attributes:
        query_BHLD: queries; H is a multiple of G, query head h reads key head h // (H / G).
        key_BGSD: keys.
        value_BGSE: values; E may differ from D.
        mask_BHLS: bool (true: may attend) or floating (added to the scores, after softcap).
        key_lengths_B: keys at and after this position are padding.
        alibi_slopes_H: slopes of ALiBi, added after softcap.
    """

    query_BHLD: Float[Tensor, "B H L D"]
    key_BGSD: Float[Tensor, "B G S D"]
    value_BGSE: Float[Tensor, "B G S E"]
    mask_BHLS: Bool[Tensor, "#B #H #L #S"] | Float[Tensor, "#B #H #L #S"] | None = None
    key_lengths_B: Int64[Tensor, "B"] | None = None
    alibi_slopes_H: Float[Tensor, "H"] | None = None
    _: KW_ONLY
    causal: Causal = False
    query_offset: QueryOffset = 0
    scale: Scale = None
    bias: Annotated[
        Annotated[float, Field(ge=-1e9, le=1e9)] | None,
        Field(
            description="Number added to each score. By default -log S, where S is the number of "
            "keys, or the sequence's `key_lengths`: padding changes nothing. Masks, `causal` and "
            "`window` do not change it. With a cache of keys, S grows with each token; send the "
            "bias of the model."
        ),
    ] = None
    softcap: Softcap = None
    window: Window = None


def attend(call: Call, outputs: frozenset[str]) -> Sigmoid:
    """Computes sigmoid attention.

    Scores and sums are float32, or float64 for float64 inputs and inputs that could overflow.
    Plain products run in blocks of rows. A weight below the smallest normal number of the scores'
    dtype may be 0. A row that sees no key is zero.

    With the bias -log S and scores near 0, the sum of a row is near 1. ALiBi is that of `softmax`.

    `outputs` are the names of the outputs to return: `output`, `weights`, `scores`. The scores
    are the arguments of the sigmoid.
    """
    B, H, S = *call.query_BHLD.shape[:2], call.key_BGSD.shape[2]
    if B * H * S > _ROW_ELEMENTS and B * H > 1:
        # one row of all heads would be a large matrix by itself
        return in_halves(attend, call, outputs)
    visible = Visibility.of(call, score_dtype(call.query_BHLD.dtype))
    key, value = visible.without_padding(call.key_BGSD), visible.without_padding(call.value_BGSE)
    safe = not are_wide() and _is_safe(call, visible, key, value)
    scores = _scores(call, key, visible, safe)
    dtype, value = call.query_BHLD.dtype, value.to(scores.visible.dtype)
    return Sigmoid(*explicit_outputs(scores, value, outputs, dtype, _SCORE_ELEMENTS))


def weights(call: Call) -> Callable[[slice], Tensor]:
    """Returns a function that computes rows of A, (B, H, R, S), in memory O(R S)."""
    S, exact = call.key_BGSD.shape[2], score_dtype(call.query_BHLD.dtype)
    visible = Visibility.of(call, score_dtype(call.query_BHLD.dtype))
    key = visible.without_padding(call.key_BGSD)
    safe = not are_wide() and _is_safe(call, visible, key, None)
    scores = _scores(call, key, visible, safe)

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


def _is_safe(call: Call, visible: Visibility, key: Tensor, value: Tensor | None) -> bool:
    """Returns True if scores and sums cannot overflow in their dtype."""
    terms = HeadTerms.of(call.alibi_slopes_H, None)
    fits = terms is None or terms.are_safe(visible)
    return fits and is_safe(call.query_BHLD, key, value, _scale(call))


def _scores(call: Call, key_BGSD: Tensor, visible: Visibility, safe: bool) -> Scores:
    """Returns the scores, in float64 where float32 could overflow."""
    if not safe:
        visible = visible._replace(dtype=torch.float64)
    return Scores.of(
        call.query_BHLD, key_BGSD, visible, _scale(call), call.softcap, 0.0, 0, None, safe,
        HeadTerms.of(call.alibi_slopes_H, None), sigmoid_bias=_bias(call, visible.dtype),
    )  # fmt: skip


def _bias(call: Call, dtype: torch.dtype) -> Tensor:
    """Returns the bias of each item, (B, 1, 1, 1), or of all, (1, 1, 1, 1)."""
    if call.bias is not None or call.key_lengths_B is None:
        number = -math.log(max(1, call.key_BGSD.shape[2])) if call.bias is None else call.bias
        return torch.full((1, 1, 1, 1), number, dtype=dtype, device=call.query_BHLD.device)
    return -call.key_lengths_B.clamp(min=1).double().log().to(dtype).view(-1, 1, 1, 1)


def steps(call: Call) -> dict[str, StepValue]:
    """Returns the steps by name, from float64 tensors."""
    query, key, value, lengths = call.query_BHLD, call.key_BGSD, call.value_BGSE, call.key_lengths_B
    found, scores = score_steps(query, key, value, lengths, call.scale, call.softcap)
    seen, distance = seen_keys(query, key, lengths, call.causal, call.query_offset, call.window)
    lengths_B = scores.new_full((len(scores),), scores.shape[-1])
    if lengths is not None:
        lengths_B = lengths.clamp(min=1).double()
    bias_B = -lengths_B.log() if call.bias is None else scores.new_full((len(scores),), call.bias)
    found["shifted"] = scores + bias_B[:, None, None, None]
    found |= mask_step_values(found["shifted"], seen, distance, call.mask_BHLS, call.alibi_slopes_H)
    weights = found["masked"].sigmoid()
    value = per_query_head(found["value"], query)
    return {
        **found, "weights": weights, "terms": lambda: weights[..., None] * value[:, :, None],
        "output": weights @ value,
    }  # fmt: skip


def backward(call: Call, grad_output_BHLE: Float[Tensor, "B H L E"]) -> dict[str, Tensor]:
    """Returns the gradients of sum(grad_output * output), computed in blocks of rows.

    They are in float32, or in float64 for float64 inputs and where float32 could overflow. By the
    chain rule dV = A^T dY, dA = dY V^T, ds = dA A (1 - A), dQ = scale ds K, dK = scale ds^T Q and
    dslope = sum_ij ds_ij (j - p_i).
    """
    visible = Visibility.of(call, score_dtype(call.query_BHLD.dtype))
    key, value = visible.without_padding(call.key_BGSD), visible.without_padding(call.value_BGSE)
    tensors = (grad_output_BHLE, call.query_BHLD, key, value)
    farthest = 0 if call.alibi_slopes_H is None else visible.farthest
    safe = _is_safe(call, visible, key, value)
    safe = safe and is_ordinary(tensors, _scale(call), 0.0, farthest)
    return gradients_by_scores(_scores(call, key, visible, safe), tensors, safe)
