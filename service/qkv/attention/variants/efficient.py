"""Efficient attention: queries are a softmax over channels, keys a softmax over positions.

Formula: A = softmax_D(Q) softmax_S(K)^T; with causal, softmax_S is over the keys that a query sees.
Paper: Shen et al., Efficient Attention, arXiv:1812.01243, section 3.2.
Cost: O((L + S) D E) time, causal too; O(L + S) memory unless weights are requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from qkv.attention.common.channel_softmax import average_by_channels
from qkv.attention.common.feature_sums import Phi, feature_products, transposed_feature_sums
from qkv.attention.common.gradients import gradients_by_features, normalize_size, scale_back
from qkv.attention.common.guards import (
    are_deferred,
    are_wide,
    bounds,
    holds,
    largest_size,
    occurs,
)
from qkv.attention.common.rising_keys import RISE, RisingKeys, RunningKeys
from qkv.attention.common.row_masks import (
    Causal,
    QueryOffset,
    mask_padding,
    padding_mask,
    zero_hidden,
)
from qkv.attention.common.score_blocks import score_dtype
from qkv.attention.common.score_steps import (
    channel_averages,
    input_steps,
    per_query_head,
    seen_keys,
    sums_before,
    zero_padding,
)
from qkv.attention.common.summed_calls import (
    every_row,
    gradients_by_heads,
    item_offsets,
    of_item,
    rows_by_head,
)
from qkv.attention.common.summed_tokens import Features, SummedTokens, has_state, state_sizes
from qkv.attention.common.token_gradients import gradients_from
from qkv.attention.common.token_inputs import Chunk, Form, Sums
from qkv.attention.common.token_weights import rows_behind, run_with_weights
from qkv.attention.step import Step

WEIGHTS: Final = "stochastic"
REFUSES: Final[Mapping[str, str]] = {
    "scale": "there are no scores, only softmaxes; scale the queries or keys instead",
    "softcap": "there are no scores to cap",
    "window": "queries share one sum over all keys, and a window has no such sum",
    "dropout": "the single weights that dropout needs are never computed",
    "seed": "the single weights that dropout needs are never computed",
    "normalize": "the two softmaxes are the normalisation: rows sum to 1 without a division",
}

STACKABLE_BELOW: Final = 1e9
STATE_NEEDS: Final[Mapping[str, Any]] = {"causal": True, "query_offset": 0}

STEPS: Final = (
    *input_steps("Q", "K", None),
    Step(
        "query_softmax", "B H L D", "softmax_D(Q)", "The softmax of each query over its channels.",
        rows="L",
    ),
    Step(
        "key_softmax", "B G L S D", "softmax_S(K)", "For each query, the softmax of each channel "
        "over the keys that the query sees.", rows="L",
    ),
    Step(
        "weights", "B H L S", "softmax_D(Q) softmax_S(K)^T", "The product of query_softmax with "
        "the query's key_softmax.", rows="L",
    ),
    Step(
        "contexts", "B G L D E", None, "For each query and channel, the average of the values, "
        "weighted by key_softmax.", rows="L",
    ),
    Step(
        "output", "B H L E", None, "The average of the query's contexts, weighted by "
        "query_softmax.", rows="L",
    ),
)  # fmt: skip

_SPAN = 40.0  # range of a channel's keys up to which e^(k - m) times a value is safe in float32


class State(NamedTuple):
    """The tensors that the next tokens need; C is one less than the tokens of a chunk.

    Attributes:
        sums: those of e^(k - m) (v, 1)^T, m the largest key of the channel.
        largest: m; 0 if sums come alone.
        tail_length: the number of tokens in the tail; None: there is no tail.
        tail_key, tail_value: of these tokens, then zeros.
    """

    sums: Float64[Tensor, "B G D W"] | Float32[Tensor, "B G D W"] | None = None
    largest: Float64[Tensor, "B G D"] | None = None
    tail_length: Int64[Tensor, "B"] | None = None
    tail_key: Float[Tensor, "B G C D"] | None = None
    tail_value: Float[Tensor, "B G C E"] | None = None


class Efficient(NamedTuple):
    """The outputs of efficient attention; None for an output that was not requested."""

    output: Float[Tensor, "B H L E"] | None = None
    weights: Float32[Tensor, "B H L S"] | Float64[Tensor, "B H L S"] | None = None
    state: State | None = None
    backend: str = "features"


class _Features(NamedTuple):
    """Features of queries and of keys, whose products are A.

    Without causal they are both softmaxes. With causal, those of keys are e^(k - m), m the largest
    key of the channel. Those of queries are their softmax, divided by the sum Z of e^(k - m) over
    the keys that each query sees.

    Attributes:
        query_BGKLD, key_BGSD: the features, zero for padding; without causal, the softmax of
            queries is still to be applied.
        offsets: each item's position of the first query; None if every query sees every key.
    """

    query_BGKLD: Tensor
    key_BGSD: Tensor
    offsets: list[int] | None

    @property
    def phi(self) -> Phi | None:
        """The function that maps queries to features; None: they are features."""
        return partial(torch.softmax, dim=-1) if self.offsets is None else None

    def output(self, value_BGSE: Tensor) -> Tensor:
        """Returns A @ value, (B, G, K, L, E)."""
        dtype = value_BGSE.dtype
        query, key = self.query_BGKLD.to(dtype), self.key_BGSD.to(dtype)
        return feature_products(query, key, value_BGSE, self.offsets, self.phi)

    def block(self, rows: slice) -> Tensor:
        """Returns rows of A, (B, G, K, R, S)."""
        query = self.query_BGKLD[:, :, :, rows]
        query = query if self.phi is None else self.phi(query)
        block = torch.einsum("bgkld,bgsd->bgkls", query, self.key_BGSD)
        zero_hidden(block, rows, self.offsets)
        return block

    def gradients(self, value_BGSE: Tensor, grad_BGKLE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of softmax_D(Q), K and the values, from that of A @ value."""
        query, key, offsets = self.query_BGKLD, self.key_BGSD, self.offsets
        query = query if self.phi is None else self.phi(query)
        slope, key_gradient, value_gradient = gradients_by_features(
            query, key, value_BGSE, grad_BGKLE, None, offsets
        )
        if offsets is not None:
            total = _totals(key, offsets, query.shape[3])
            slope /= total.masked_fill_(total == 0, 1.0)[:, :, None]
        # a row subtracts the same number for all keys that it sees
        row_BGKL1, key_BGS1 = torch.ones_like(query[..., :1]), torch.ones_like(key[..., :1])
        key_gradient -= transposed_feature_sums(key_BGS1, row_BGKL1, query * slope, offsets)
        return slope, key_gradient.mul_(key), value_gradient


def weights_are(parameters: Any, inputs: Collection[str] = ()) -> str:
    """Returns the kind of the weights; with a state, the rows of new tokens sum to less."""
    return "unnormalised" if has_state(inputs) else "stochastic"


def infer_sizes(sizes: Mapping[str, int], parameters: Any) -> Mapping[str, int]:
    """Returns the sizes of the tensors of a state."""
    return state_sizes(sizes, parameters)


def flops(sizes: Mapping[str, int]) -> int:
    """Returns the operations of the non-causal products: keys and values, queries and sums."""
    B, H, G, L, S, D, E = (sizes[letter] for letter in "BHGLSDE")
    return 2 * B * D * E * (G * S + H * L)


@dataclass(frozen=True, eq=False)
class Call:
    """A request for efficient attention.

    Attributes:
        query_BHLD, key_BGSD, value_BGSE: query head h reads key head h // (H / G).
        key_lengths_B: keys at and after this position are padding, and in no softmax.
        past: the state behind the tokens before these, which are then `causal` and as many queries
            as keys. Sums alone are compact.
        causal, query_offset, chunk, state: see their descriptions.
    """

    query_BHLD: Float[Tensor, "B H L D"]
    key_BGSD: Float[Tensor, "B G S D"]
    value_BGSE: Float[Tensor, "B G S E"]
    key_lengths_B: Int64[Tensor, "B"] | None = None
    past: State | None = None
    _: KW_ONLY
    causal: Causal = False
    query_offset: QueryOffset = 0
    chunk: Chunk = 64
    state: Form = "exact"


def attend(call: Call, outputs: frozenset[str]) -> Efficient:
    """Computes efficient attention.

    `outputs` are the names of the outputs to return: "output", "weights", "state".
    """
    if call.past is not None or "state" in outputs:
        found = run_with_weights(_tokens(call, call.value_BGSE), call, outputs)
        return Efficient(found.output_BHSE, found.weights_BHSS, State(**found.fields))
    offsets, output, weights = item_offsets(call), None, None
    if "output" in outputs:
        if call.causal or call.query_BHLD.dtype == torch.float64 or are_wide():
            output = _exact_output(call, offsets)
        else:
            output = _fast_output(call)
    if "weights" in outputs:
        weights = every_row(call, _matrix(call, offsets).block)
    return Efficient(output, weights)


def weights(call: Call) -> Callable[[slice], Tensor]:
    """Returns a function that computes rows of A, (B, H, R, S), in memory O(R S)."""
    if call.past is not None:
        return rows_behind(_tokens(call, call.key_BGSD[..., :0]), call.past, call.chunk)
    return rows_by_head(call, _matrix(call, item_offsets(call)).block)


def _token_features(tokens: SummedTokens, before: Sums) -> Features:
    """Returns softmax_D(q) / Z, and e^(k - m), m the largest key of a channel up to each token.

    Z is the sum of e^(k - m). Sums decay where m rises: no exponent is above 0.
    """
    key_XCD, total_XD = tokens.key_BGCD.flatten(0, 1), before[0][..., -1]
    if tokens.padding_BS is not None:
        is_padding_XC = tokens.padding_BS.repeat_interleave(tokens.G, 0)
        key_XCD = key_XCD.masked_fill(is_padding_XC[..., None], -torch.inf)
    keys, totals = RunningKeys.of(key_XCD, before), []
    for kept_XD, grown_XD in zip(
        keys.fall_XCD.exp().unbind(1), keys.grown_XCD.unbind(1), strict=True
    ):
        total_XD = total_XD * kept_XD + grown_XD
        totals.append(total_XD)
    total_BGCD = torch.stack(totals, 1).unflatten(0, (-1, tokens.G))
    total_BGCD = total_BGCD.masked_fill(total_BGCD == 0, 1.0)
    return Features(
        tokens.query_BGKCD.softmax(-1) / total_BGCD[:, :, None],
        keys.grown_XCD.unflatten(0, (-1, tokens.G)), keys.fall_XCD, keys.largest_XCD[:, -1],
    )  # fmt: skip


def _tokens(call: Call, value_BGSE: Tensor) -> SummedTokens:
    """Returns the tokens of a request with a state, and with these values."""
    tensors = (call.query_BHLD, call.key_BGSD, value_BGSE, call.key_lengths_B)
    return SummedTokens.of(*tensors, features=_token_features, shifts=True, normalize=False)


def _fast_output(call: Call) -> Tensor:
    """Returns the output in float32 where every query sees every key.

    Items for which float32 is too narrow take `_exact_output`. Each item is judged by itself, so
    its bits do not depend on the other items.
    """
    query, key, value = (x.float() for x in (call.query_BHLD, call.key_BGSD, call.value_BGSE))
    padding = padding_mask(key.shape[2], call.key_lengths_B)
    by_key_head = query.unflatten(1, (key.shape[1], -1))
    average, fits = average_by_channels(by_key_head, key, value, padding)
    if average is None:
        return _exact_output(call, None)
    output = average.flatten(1, 2).to(call.query_BHLD.dtype)
    for b, fit in enumerate(fits):
        if not fit:
            output[b : b + 1] = _exact_output(of_item(call, b), None)
    return output


def _exact_output(call: Call, offsets: list[int] | None) -> Tensor:
    """Returns the output for finite inputs of any size."""
    padding = padding_mask(call.key_BGSD.shape[2], call.key_lengths_B)
    value = mask_padding(padding, call.value_BGSE)
    return _output(_matrix(call, offsets), value).to(call.query_BHLD.dtype)


def _matrix(call: Call, offsets: list[int] | None) -> _Features | RisingKeys:
    """Returns A as factors, in float32 or float64 if keys are of similar size, else in float64."""
    L, (_, G, S, _) = call.query_BHLD.shape[2], call.key_BGSD.shape
    padding = padding_mask(S, call.key_lengths_B)
    query = call.query_BHLD.unflatten(1, (G, -1)).to(score_dtype(call.query_BHLD.dtype))
    key = call.key_BGSD.to(query.dtype)
    unseen = None if padding is None else padding[:, None, :, None]
    if key.dtype == torch.float32 and (are_wide() or not _is_narrow(key, unseen)):
        query, key = query.double(), key.double()
    if unseen is not None:
        key = key.masked_fill(unseen, -torch.inf)
    if offsets is None:
        key = key.softmax(2)  # it sums one by one; the sum below, by parts, loses no digit
        key.div_(key.sum(2, keepdim=True))
        return _Features(query, key if unseen is None else key.masked_fill_(unseen, 0.0), None)
    query, largest_BG1D = query.softmax(-1), key.amax(2, keepdim=True)
    if query.dtype == torch.float64 and occurs(largest_BG1D - key[:, :, :1] > RISE):
        return RisingKeys(call.query_BHLD, key, offsets, _token_features, normalize=False)
    if unseen is not None:
        largest_BG1D = largest_BG1D.masked_fill(largest_BG1D == -torch.inf, 0.0)
    key = (key - largest_BG1D).exp_()
    total = _totals(key, offsets, L)
    if unseen is not None:  # an item may have padding alone
        total.masked_fill_(total == 0, 1.0)
    query.div_(total[:, :, None])
    return _Features(query, key, offsets)


def _is_narrow(key_BGSD: Tensor, unseen_B1S1: Tensor | None) -> bool:
    """Returns True if the keys of every channel lie within _SPAN."""
    if unseen_B1S1 is None:
        if not are_deferred():
            low, high = bounds(key_BGSD)
            if high - low <= _SPAN:  # all channels together: faster to check
                return True
        return holds(key_BGSD.amax(2) - key_BGSD.amin(2) <= _SPAN)
    largest = key_BGSD.masked_fill(unseen_B1S1, -torch.inf).amax(2)
    least = key_BGSD.masked_fill(unseen_B1S1, torch.inf).amin(2)
    return holds(largest - least <= _SPAN)


def _totals(key_BGSD: Tensor, offsets: list[int], L: int) -> Tensor:
    """Returns the sum of the keys that each query sees, (B, G, L, D).

    It has no meaning for a query that sees no key.
    """
    S, total = key_BGSD.shape[2], key_BGSD.cumsum(2)
    if L != S or any(offsets):
        row_L = torch.arange(L, device=key_BGSD.device)
        totals = (total[b][:, (row_L + o).clamp_(0, S - 1)] for b, o in enumerate(offsets))
        total = torch.stack(list(totals))
    return total


def _output(matrix: _Features | RisingKeys, value_BGSE: Tensor) -> Tensor:
    """Returns A @ value, (B, H, L, E). The padding of `value_BGSE` is zero."""
    if are_deferred():
        return _ordinary_output(matrix, value_BGSE)
    value, dtype = value_BGSE, torch.float64
    sizes = [float(largest_size(item)) for item in value] if value.numel() else [0.0] * len(value)
    if isinstance(matrix, _Features) and matrix.query_BGKLD.dtype == torch.float32:
        # above 1e15, a small value times e^-_SPAN may underflow
        dtype = torch.float32 if all(m <= 1e15 for m in sizes) else dtype
    # exact powers of two, with which sums do not overflow and small values do not underflow
    exponents = [math.frexp(m)[1] for m in sizes]
    factors = [2.0 ** (min(max(e, -60), 900) - e) for e in exponents]
    value = value.to(dtype)
    scaled = any(factor != 1.0 for factor in factors)
    if scaled:
        factor_B = torch.tensor(factors, dtype=torch.float64).to(value.device, non_blocking=True)
        factor_B111 = factor_B[:, None, None, None]
        value = value * factor_B111.to(dtype)
    # also a rounded average is no larger than the values
    output = matrix.output(value).flatten(1, 2)
    for item, m, factor in zip(output, sizes, factors, strict=True):
        item.clamp_(-m * factor, m * factor)
    if scaled:
        output = output.double().div_(factor_B111)
    return output


def _ordinary_output(matrix: _Features | RisingKeys, value_BGSE: Tensor) -> Tensor:
    """Returns the result of `_output` for values that need no factor; defers the check of this."""
    assert isinstance(matrix, _Features)
    dtype = matrix.query_BGKLD.dtype
    largest_B = value_BGSE.abs().amax((1, 2, 3)).to(dtype)
    highest = 1e15 if dtype == torch.float32 else 2.0**900
    holds((largest_B == 0) | ((largest_B >= 2.0**-61) & (largest_B < highest)))
    output = matrix.output(value_BGSE.to(dtype)).flatten(1, 2)
    return output.clamp_(-largest_B[:, None, None, None], largest_B[:, None, None, None])


def steps(call: Call) -> dict[str, Tensor]:
    """Returns the steps by name, from float64 tensors: the output by contexts, not by weights."""
    query = call.query_BHLD
    key, value = (zero_padding(x, call.key_lengths_B) for x in (call.key_BGSD, call.value_BGSE))
    seen_BLS, _ = seen_keys(query, key, call.key_lengths_B, call.causal, call.query_offset)
    sums_BGDW = sums_before(call.past, value, (key.shape[-1], value.shape[-1] + 1))
    largest_BGD = torch.zeros_like(sums_BGDW[..., 0])
    if call.past is not None and call.past.largest is not None:
        largest_BGD = call.past.largest
    seen = seen_BLS if call.causal else seen_BLS[:, :1]
    averages = channel_averages(key, key.new_ones(1, 1, 1, 1), value, seen, sums_BGDW, largest_BGD)
    query_softmax, L = query.softmax(-1), query.shape[2]
    share_BHLDS, average_BHLDE = (
        per_query_head(x, query) for x in (averages.share_BGLDS, averages.average_BGLDE)
    )
    return {
        "query": query, "key": key, "value": value, "query_softmax": query_softmax,
        "key_softmax": averages.share_BGLDS.mT.expand(-1, -1, L, -1, -1),
        "weights": torch.einsum("bhld,bhlds->bhls", query_softmax, share_BHLDS),
        "contexts": averages.average_BGLDE.expand(-1, -1, L, -1, -1),
        "output": torch.einsum("bhld,bhlde->bhle", query_softmax, average_BHLDE),
    }  # fmt: skip


def backward(
    call: Call, grad_output_BHLE: Float[Tensor, "B H L E"], grad_state: State | None = None
) -> dict[str, Tensor]:
    """Returns the gradients of sum(grad_output * output), in float64.

    They are sums over keys that all queries share, and sums over queries that all keys share,
    through both softmaxes. rq = softmax_D(Q), and p_ijc is the weight of key j in channel c's
    softmax for query i. With slopes u_ic = sum_j p_ijc (dY_i . v_j), dq_ic = rq_ic (u_ic - sum_d
    rq_id u_id), dk_jc = sum_i rq_ic p_ijc (dY_i . v_j - u_ic), dv_j = sum_i sum_c rq_ic p_ijc dY_i.
    `grad_state` is as `gradients_from` takes it. Source: Shen et al., arXiv:1812.01243, section
    3.2, differentiated.
    """
    if call.past is not None or grad_state is not None:
        new = _tokens(call, call.value_BGSE)
        return gradients_from(new, call.past, grad_output_BHLE, grad_state, call.chunk)
    backward = partial(_gradients, offsets=item_offsets(call))
    return gradients_by_heads(backward, call, grad_output_BHLE)


def _gradients(
    call: Call, grad_BHLE: Tensor, *, offsets: list[int] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value of some heads."""
    query, key = call.query_BHLD.double(), call.key_BGSD.double()
    padding = padding_mask(key.shape[2], call.key_lengths_B)
    value, v = normalize_size(mask_padding(padding, call.value_BGSE.double()))
    grad, g = normalize_size(grad_BHLE.double())
    matrix = _matrix(replace(call, query_BHLD=query, key_BGSD=key), offsets)
    if isinstance(matrix, RisingKeys):
        query_gradient, key_gradient, value_gradient = matrix.gradients(value, grad)
    else:
        by_head = grad.unflatten(1, (key.shape[1], -1))
        slope, key_gradient, value_gradient = matrix.gradients(value, by_head)
        query, slope = query.softmax(-1), slope.flatten(1, 2)
        query_gradient = slope.sub_((query * slope).sum(-1, keepdim=True)).mul_(query)
    return (
        scale_back(query_gradient, g + v),
        scale_back(key_gradient, g + v),
        scale_back(value_gradient, g),
    )
