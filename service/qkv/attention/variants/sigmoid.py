"""Sigmoid attention: each weight is a sigmoid of its own score, independent of all other keys.

Formula: A = sigmoid(scale Q K^T + bias + mask), bias = -log S; output = A V.
Paper: Ramapuram et al., Sigmoid Self-Attention, arXiv:2409.04431, section 2.
Cost: O(L S (D + E)) time; O(L + S) memory unless weights or scores are requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from pydantic import Field
from torch import Tensor

from qkv.attention.common.explicit_outputs import explicit_outputs
from qkv.attention.common.gradients import (
    gradients_by_scores,
    is_ordinary,
    normalize_size,
    scale_back,
)
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
from qkv.attention.step import Step

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


def attend(
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    value_BGSE: Float[Tensor, "B G S E"],
    mask_BHLS: Bool[Tensor, "#B #H #L #S"] | Float[Tensor, "#B #H #L #S"] | None = None,
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    alibi_slopes_H: Float[Tensor, "H"] | None = None,
    *,
    causal: Causal = False,
    query_offset: QueryOffset = 0,
    scale: Scale = None,
    bias: Annotated[
        Annotated[float, Field(ge=-1e9, le=1e9)] | None,
        Field(
            description="Number added to each score. By default -log S, where S is the number of "
            "keys, or the item's `key_lengths`: padding changes nothing. Masks, `causal` and "
            "`window` do not change it. With a cache of keys, S grows with each token; send the "
            "bias of the model."
        ),
    ] = None,
    softcap: Softcap = None,
    window: Window = None,
    outputs: frozenset[str] = frozenset({"output"}),
) -> Sigmoid:
    """Computes sigmoid attention.

    Scores and sums are float32, or float64 for float64 inputs and inputs that could overflow.
    Plain products run in blocks of rows. A weight below the smallest normal number of the scores'
    dtype may be 0. A row that sees no key is zero.

    With the bias -log S and scores near 0, the sum of a row is near 1. ALiBi is that of `softmax`.

    Args:
        query_BHLD: queries; H is a multiple of G, query head h reads key head h // (H / G).
        key_BGSD: keys.
        value_BGSE: values; E may differ from D.
        mask_BHLS: bool (true: may attend) or floating (added to the scores, after softcap).
        key_lengths_B: keys at and after this position are padding.
        alibi_slopes_H: slopes of ALiBi, added after softcap.
        outputs: the names of the outputs to return: `output`, `weights`, `scores`. The scores are
            the arguments of the sigmoid.
    """
    B, H, S = *query_BHLD.shape[:2], key_BGSD.shape[2]
    if B * H * S > _ROW_ELEMENTS and B * H > 1:
        # one row of all heads would be a large matrix by itself
        tensors = (query_BHLD, key_BGSD, value_BGSE, mask_BHLS, key_lengths_B)
        return in_halves(
            attend, tensors, (alibi_slopes_H,), causal=causal, query_offset=query_offset,
            scale=scale, bias=bias, softcap=softcap, window=window, outputs=outputs,
        )  # fmt: skip
    scores, value = _scores(
        query_BHLD, key_BGSD, value_BGSE, mask_BHLS, key_lengths_B, alibi_slopes_H,
        causal, query_offset, scale, bias, softcap, window,
    )  # fmt: skip
    assert value is not None
    return Sigmoid(*explicit_outputs(scores, value, outputs, query_BHLD.dtype, _SCORE_ELEMENTS))


def weights(
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    mask_BHLS: Bool[Tensor, "#B #H #L #S"] | Float[Tensor, "#B #H #L #S"] | None = None,
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    alibi_slopes_H: Float[Tensor, "H"] | None = None,
    *,
    causal: bool = False,
    query_offset: int | Literal["end"] = 0,
    scale: float | None = None,
    bias: float | None = None,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
) -> Callable[[slice], Tensor]:
    """Returns a function that computes rows of A from a slice of L: (B, H, R, S), in memory O(R S).

    The arguments are those of `attend`.
    """
    S, exact = key_BGSD.shape[2], score_dtype(query_BHLD.dtype)
    scores, _ = _scores(
        query_BHLD, key_BGSD, None, mask_BHLS, key_lengths_B, alibi_slopes_H,
        causal, query_offset, scale, bias, softcap, window,
    )  # fmt: skip

    def row_block(rows: slice) -> Float32[Tensor, "B H R S"] | Float64[Tensor, "B H R S"]:
        block = scores.block(rows)
        if block.keys == slice(0, S):
            return block.weights.to(exact)
        whole_BHRS = block.weights.new_zeros(*block.weights.shape[:-1], S, dtype=exact)
        whole_BHRS[..., block.keys] = block.weights
        return whole_BHRS

    return row_block


def _scores(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor | None,
    mask_BHLS: Tensor | None,
    key_lengths_B: Tensor | None,
    alibi_slopes_H: Tensor | None,
    causal: bool,
    query_offset: int | Literal["end"],
    scale: float | None,
    bias: float | None,
    softcap: float | None,
    window: tuple[int | None, int | None] | None,
) -> tuple[Scores, Tensor | None]:
    """Returns the scores and the values, in float64 where float32 could overflow."""
    L, S, D = query_BHLD.shape[2], key_BGSD.shape[2], query_BHLD.shape[3]
    scale, terms = D**-0.5 if scale is None else scale, HeadTerms.of(alibi_slopes_H, None)
    exact = score_dtype(query_BHLD.dtype)
    visible = Visibility.of(L, S, mask_BHLS, key_lengths_B, causal, query_offset, window, exact)
    key = visible.without_padding(key_BGSD)
    value = None if value_BGSE is None else visible.without_padding(value_BGSE)
    safe = not are_wide() and (terms is None or terms.are_safe(visible))
    safe = safe and is_safe(query_BHLD, key, value, scale)
    if not safe:
        visible = visible._replace(dtype=torch.float64)
    scores = Scores.of(
        query_BHLD, key, visible, scale, softcap, 0.0, 0, None, safe, terms,
        sigmoid_bias=_bias(bias, S, key_lengths_B, visible.dtype, query_BHLD.device),
    )  # fmt: skip
    return scores, None if value is None else value.to(visible.dtype)


def _bias(
    bias: float | None,
    S: int,
    key_lengths_B: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Returns the bias of each item, (B, 1, 1, 1), or of all, (1, 1, 1, 1)."""
    if bias is not None or key_lengths_B is None:
        number = -math.log(max(1, S)) if bias is None else bias
        return torch.full((1, 1, 1, 1), number, dtype=dtype, device=device)
    return -key_lengths_B.clamp(min=1).double().log().to(dtype).view(-1, 1, 1, 1)


def reference(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    mask_BHLS: Tensor | None = None,
    key_lengths_B: Tensor | None = None,
    alibi_slopes_H: Tensor | None = None,
    *,
    causal: bool = False,
    query_offset: int | Literal["end"] = 0,
    scale: float | None = None,
    bias: float | None = None,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
) -> Sigmoid:
    """Computes the same in plain float64 numpy, one head at a time, as in the paper."""
    query, key, value = (x.double().numpy() for x in (query_BHLD, key_BGSD, value_BGSE))
    (B, H, L, D), (_, G, S, _) = query.shape, key.shape
    weights, scores = np.zeros((B, H, L, S)), np.full((B, H, L, S), -np.inf)
    output = np.zeros((B, H, L, value.shape[-1]))
    for b, h in np.ndindex(B, H):
        valid = S if key_lengths_B is None else int(key_lengths_B[b])
        offset = valid - L if query_offset == "end" else query_offset
        k, v = key[b, h * G // H, :valid], value[b, h * G // H, :valid]
        s = query[b, h] @ k.T * (1 / np.sqrt(D) if scale is None else scale)
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
        s = s + (-np.log(max(1, valid)) if bias is None else bias)
        i, j = np.ogrid[offset : offset + L, :valid]
        if mask_BHLS is not None:
            mask = mask_BHLS.expand(B, H, L, S)[b, h, :, :valid]
            added = np.where(mask, 0, -np.inf) if mask.dtype == torch.bool else mask.double()
            s = s + np.asarray(added)
        if alibi_slopes_H is not None:
            s = s + float(alibi_slopes_H[h]) * (j - i)
        left, right = window or (None, None)
        hidden = (j > i) & causal
        hidden |= (j < i - left) if left is not None else False
        hidden |= (j > i + right) if right is not None else False
        s[np.broadcast_to(hidden, s.shape)] = -np.inf
        fallen = np.exp(-np.abs(s))  # e^-s would overflow
        a = np.where(s > 0, 1, fallen) / (1 + fallen)
        weights[b, h, :, :valid], scores[b, h, :, :valid], output[b, h] = a, s, a @ v
    output_BHLE, weights_BHLS, scores_BHLS = map(torch.from_numpy, (output, weights, scores))
    return Sigmoid(output_BHLE, weights_BHLS, scores_BHLS, backend="reference")


def steps(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    mask_BHLS: Tensor | None = None,
    key_lengths_B: Tensor | None = None,
    alibi_slopes_H: Tensor | None = None,
    *,
    causal: bool = False,
    query_offset: int | Literal["end"] = 0,
    scale: float | None = None,
    bias: float | None = None,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
) -> dict[str, Tensor]:
    """Returns the steps by name, from float64 tensors. The arguments are those of `attend`."""
    found, scores = score_steps(query_BHLD, key_BGSD, value_BGSE, key_lengths_B, scale, softcap)
    seen, distance = seen_keys(query_BHLD, key_BGSD, key_lengths_B, causal, query_offset, window)
    lengths_B = scores.new_full((len(scores),), scores.shape[-1])
    if key_lengths_B is not None:
        lengths_B = key_lengths_B.clamp(min=1).double()
    bias_B = -lengths_B.log() if bias is None else scores.new_full((len(scores),), bias)
    found["shifted"] = scores + bias_B[:, None, None, None]
    found |= mask_step_values(found["shifted"], seen, distance, mask_BHLS, alibi_slopes_H)
    weights = found["masked"].sigmoid()
    terms = weights[..., None] * per_query_head(found["value"], query_BHLD)[:, :, None]
    return found | {"weights": weights, "terms": terms, "output": terms.sum(-2)}


def backward(
    grad_output_BHLE: Float[Tensor, "B H L E"],
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    value_BGSE: Float[Tensor, "B G S E"],
    mask_BHLS: Bool[Tensor, "#B #H #L #S"] | Float[Tensor, "#B #H #L #S"] | None = None,
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    alibi_slopes_H: Float[Tensor, "H"] | None = None,
    *,
    causal: bool = False,
    query_offset: int | Literal["end"] = 0,
    scale: float | None = None,
    bias: float | None = None,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
) -> dict[str, Tensor]:
    """Returns the gradients of sum(grad_output * output), computed in blocks of rows.

    They are in float32, or in float64 for float64 inputs and where float32 could overflow. The
    arguments are those of `attend`. By the chain rule dV = A^T dY, dA = dY V^T,
    ds = dA A (1 - A), dQ = scale ds K, dK = scale ds^T Q and dslope = sum_ij ds_ij (j - p_i).
    """
    (L, D), S = query_BHLD.shape[2:], key_BGSD.shape[2]
    scale, terms = D**-0.5 if scale is None else scale, HeadTerms.of(alibi_slopes_H, None)
    exact = score_dtype(query_BHLD.dtype)
    visible = Visibility.of(L, S, mask_BHLS, key_lengths_B, causal, query_offset, window, exact)
    key, value = visible.without_padding(key_BGSD), visible.without_padding(value_BGSE)
    tensors = (grad_output_BHLE, query_BHLD, key, value)
    safe = (terms is None or terms.are_safe(visible)) and is_safe(query_BHLD, key, value, scale)
    farthest = 0 if alibi_slopes_H is None else visible.farthest
    safe = safe and is_ordinary(tensors, scale, 0.0, farthest)
    if not safe:
        visible = visible._replace(dtype=torch.float64)
    scores = Scores.of(
        query_BHLD, key, visible, scale, softcap, 0.0, 0, None, safe, terms,
        sigmoid_bias=_bias(bias, S, key_lengths_B, visible.dtype, query_BHLD.device),
    )  # fmt: skip
    grad, query, key, value = (x.to(visible.dtype) for x in tensors)
    if safe:
        return gradients_by_scores(scores, grad, query, key, value)
    (grad, g), (query, q), (key, k), (value, v) = map(normalize_size, (grad, query, key, value))
    exponents = {"query": g + v + k, "key": g + v + q, "value": g}  # all others depend on g and v
    scaled = gradients_by_scores(scores, grad, query, key, value)
    return {n: scale_back(gradient, exponents.get(n, g + v)) for n, gradient in scaled.items()}
