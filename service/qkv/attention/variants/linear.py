"""Linear attention: weights are products of positive features, so queries share sums over keys.

Formula: A_ij = phi(q_i) . phi(k_j) / sum_l phi(q_i) . phi(k_l), phi(x) = elu(x) + 1.
Paper: Katharopoulos et al., Transformers are RNNs, arXiv:2006.16236, section 3.2.
Cost: O((L + S) D E) time, causal too; O(L + S) memory unless weights are requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from pydantic import Field
from torch import Tensor

from qkv.attention.common.feature_sums import Phi, SharedSums, apply_state, feature_sums
from qkv.attention.common.gradients import gradients_by_features, normalize_size, scale_back
from qkv.attention.common.guards import (
    Number,
    are_deferred,
    are_wide,
    bounds,
    holds,
    largest_size,
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
    rows_by_head,
)
from qkv.attention.common.summed_tokens import Features, SummedTokens, has_state, state_sizes
from qkv.attention.common.token_gradients import gradients_from
from qkv.attention.common.token_inputs import Chunk, Form, Sums
from qkv.attention.common.token_weights import rows_behind, run_with_weights
from qkv.attention.step import Step

WEIGHTS: Final = "stochastic; unnormalised if normalize is false"
REFUSES: Final[Mapping[str, str]] = {
    "scale": "a factor inside phi would be another feature map; scale the queries instead",
    "softcap": "there are no scores to cap",
    "window": "queries share one sum over all keys, and a window has no such sum",
    "dropout": "the single weights that dropout needs are never computed",
    "seed": "the single weights that dropout needs are never computed",
}

STACKABLE_BELOW: Final = 1e9
STATE_NEEDS: Final[Mapping[str, Any]] = {"causal": True, "query_offset": 0}

STEPS: Final = (
    *input_steps("q_i", "k_j", None),
    Step("query_features", "B H L D", "phi(q_i)", "phi of each number of the queries.", rows="L"),
    Step("key_features", "B G S D", "phi(k_j)", "phi of each number of the keys; 0 for padding."),
    Step(
        "products", "B H L S", "phi(q_i) . phi(k_j)", "The product of each query's features with "
        "each key's; 0 where the query does not see the key.", rows="L",
    ),
    Step(
        "row_sums", "B H L", "sum_l phi(q_i) . phi(k_l)", "The sum of each row of products.",
        rows="L", needs=("normalize",),
    ),
    Step(
        "weights", "B H L S", "A_ij", "The products; with normalize, divided by the sum of their "
        "row.", rows="L",
    ),
    Step(
        "value_sums", "B G L D E", None, "The sum of phi(k_j) v_j^T over the keys that a query "
        "sees: a matrix that all heads of queries share, and that grows by one term with each key.",
        rows="L",
    ),
    Step(
        "feature_sums", "B G L D", None, "The sum of phi(k_j) over the keys that a query sees.",
        rows="L", needs=("normalize",),
    ),
    Step(
        "numerators", "B H L E", None, "The query's features times its value_sums.", rows="L",
        needs=("normalize",),
    ),
    Step(
        "output", "B H L E", None, "The query's features times its value_sums; with normalize, "
        "divided by the query's features times its feature_sums.", rows="L",
    ),
)  # fmt: skip

_NORMAL = 1e-31  # products above it, and their sums, have the usual relative rounding error
_FAINT = 1e-7  # above it, float32 has its usual rounding error for values of 2**-110 and more
_TINY = 1e-250  # a row sum below it may have lost its smaller terms


class State(NamedTuple):
    """The tensors that the next tokens need; C is one less than the tokens of a chunk.

    Attributes:
        sums: those of phi(k) v^T, and in the last column those of phi(k).
        tail_length: the number of tokens in the tail; None: there is no tail.
        tail_key, tail_value: of these tokens, then zeros.
    """

    sums: Float64[Tensor, "B G D W"] | Float32[Tensor, "B G D W"] | None = None
    tail_length: Int64[Tensor, "B"] | None = None
    tail_key: Float[Tensor, "B G C D"] | None = None
    tail_value: Float[Tensor, "B G C E"] | None = None


class Linear(NamedTuple):
    """The outputs of linear attention; None for an output that was not requested."""

    output: Float[Tensor, "B H L E"] | None = None
    weights: Float32[Tensor, "B H L S"] | Float64[Tensor, "B H L S"] | None = None
    state: State | None = None
    notes: Mapping[str, Bool[Tensor, "B"]] = MappingProxyType({})
    backend: str = "features"


class _Features(NamedTuple):
    """Features phi of queries and keys, or queries and keys and the function phi.

    With causal, the keys of no channel rise further than `RISE`: in float64, no row underflows.

    Attributes:
        query_BGKLD: those of the queries. Each channel is multiplied by the largest of its keys,
            and each row divided by e^shift.
        key_BGSD: those of the keys, divided by the largest of their channel; zero for padding.
        phi: the function to apply to both; None: they are features.
        shift_BGKL1: the logarithm of the largest product of a row; None: all are as phi gives them.
        least: a lower bound of the products of both, except padding; None if there are shifts.
        offsets: each item's position of the first query; None if every query sees every key.
        normalize: rows are divided by their sum.
    """

    query_BGKLD: Tensor
    key_BGSD: Tensor
    phi: Phi | None
    shift_BGKL1: Tensor | None
    least: Number | None
    offsets: list[int] | None
    normalize: bool

    def with_phi_applied(self) -> _Features:
        """Returns the same with phi applied."""
        if self.phi is None:
            return self
        return self._replace(
            query_BGKLD=self.phi(self.query_BGKLD), key_BGSD=self.phi(self.key_BGSD), phi=None
        )

    def wide(self) -> _Features:
        """Returns the same in float64."""
        return self._replace(query_BGKLD=self.query_BGKLD.double(), key_BGSD=self.key_BGSD.double())

    def output(self, value_BGSE: Tensor) -> Tensor:
        """Returns A @ value, (B, G, K, L, E). The padding of `value_BGSE` is zero."""
        query, key = self.query_BGKLD, self.key_BGSD
        return self.average(*feature_sums(query, key, value_BGSE, self.offsets, self.phi))

    def average(self, output_BGKLE: Tensor, total_BGKL1: Tensor) -> Tensor:
        """Returns A @ value from the sums of products with values, and of products."""
        if self.normalize:
            least = torch.finfo(total_BGKL1.dtype).tiny  # rows without keys are 0
            return output_BGKLE.div_(total_BGKL1.clamp(min=least))
        return output_BGKLE if self.shift_BGKL1 is None else output_BGKLE * self.shift_BGKL1.exp()

    def block(self, rows: slice) -> Tensor:
        """Returns rows of A, (B, G, K, R, S), if phi is applied."""
        block = torch.einsum("bgkld,bgsd->bgkls", self.query_BGKLD[:, :, :, rows], self.key_BGSD)
        zero_hidden(block, rows, self.offsets)
        if self.normalize:
            total = block.sum(-1, keepdim=True)
            return block / total.masked_fill(total == 0, 1.0)
        return block if self.shift_BGKL1 is None else block * self.shift_BGKL1[:, :, :, rows].exp()


def weights_are(parameters: Any, inputs: Collection[str] = ()) -> str:
    """Returns the kind of the weights for these parameters; with a state, rows sum to less."""
    return "stochastic" if parameters.normalize and not has_state(inputs) else "unnormalised"


def infer_sizes(sizes: Mapping[str, int], parameters: Any) -> Mapping[str, int]:
    """Returns the sizes of the tensors of a state."""
    return state_sizes(sizes, parameters)


def flops(sizes: Mapping[str, int]) -> int:
    """Returns the operations of the non-causal products: keys and values, queries and sums."""
    B, H, G, L, S, D, E = (sizes[letter] for letter in "BHGLSDE")
    return 2 * B * D * (E + 1) * (G * S + H * L)


@dataclass(frozen=True, eq=False)
class Call:
    """A request for linear attention.

    Attributes:
        query_BHLD, key_BGSD, value_BGSE: query head h reads key head h // (H / G).
        key_lengths_B: keys at and after this position are padding.
        past: the state behind the tokens before these, which are then `causal` and as many queries
            as keys. Sums alone are compact.
        causal, query_offset, normalize, chunk, state: see their descriptions.
    """

    query_BHLD: Float[Tensor, "B H L D"]
    key_BGSD: Float[Tensor, "B G S D"]
    value_BGSE: Float[Tensor, "B G S E"]
    key_lengths_B: Int64[Tensor, "B"] | None = None
    past: State | None = None
    _: KW_ONLY
    causal: Causal = False
    query_offset: QueryOffset = 0
    normalize: Annotated[bool, Field(description="If true, each row is divided by its sum.")] = True
    chunk: Chunk = 64
    state: Form = "exact"


def attend(call: Call, outputs: frozenset[str]) -> Linear:
    """Computes linear attention.

    `outputs` are the names of the outputs to return: "output", "weights", "state".
    """
    if call.past is not None or "state" in outputs:
        found = run_with_weights(_tokens(call, call.value_BGSE), call, outputs)
        return Linear(found.output_BHSE, found.weights_BHSS, State(**found.fields), found.notes)
    matrix, output, weights = _matrix(call, item_offsets(call)), None, None
    if "output" in outputs:
        padding = padding_mask(call.key_BGSD.shape[2], call.key_lengths_B)
        output = _output(matrix, mask_padding(padding, call.value_BGSE)).flatten(1, 2)
        output = output.to(call.query_BHLD.dtype)
    if "weights" in outputs:
        weights = every_row(call, matrix.with_phi_applied().block)
    return Linear(output, weights)


def weights(call: Call) -> Callable[[slice], Tensor]:
    """Returns a function that computes rows of A, (B, H, R, S), in memory O(R S)."""
    if call.past is not None:
        return rows_behind(_tokens(call, call.key_BGSD[..., :0]), call.past, call.chunk)
    return rows_by_head(call, _matrix(call, item_offsets(call)).with_phi_applied().block)


def _matrix(call: Call, offsets: list[int] | None) -> _Features | RisingKeys:
    """Returns A as factors: features in float32 or float64 if phi is of ordinary size.

    Otherwise they are in float64, from the logarithm of phi. elu(x) + 1 is never computed: in
    float32 it is exactly 0 below x = -30.
    """
    G, S = call.key_BGSD.shape[1:3]
    compute = torch.float64 if are_wide() else score_dtype(call.query_BHLD.dtype)
    padding = padding_mask(S, call.key_lengths_B)
    query = call.query_BHLD.unflatten(1, (G, -1)).to(compute)
    key = mask_padding(padding, call.key_BGSD.to(compute))
    least = _least_product(query, key)
    key = mask_padding(padding, key, -torch.inf)
    if least is not None:
        return _Features(query, key, _phi, None, least, offsets, call.normalize)
    key_log = _log_phi(key.double())
    largest_BG1D = key_log.amax(2, keepdim=True)
    if call.normalize and offsets is not None and (largest_BG1D - key_log[:, :, :1] > RISE).any():
        return RisingKeys(call.query_BHLD, key.double(), offsets, _rising_features, normalize=True)
    largest_BG1D = largest_BG1D.masked_fill(largest_BG1D == -torch.inf, 0.0)  # padding alone
    query, shift = _over_largest(_log_phi(query.double()), largest_BG1D[:, :, None])
    key = (key_log - largest_BG1D).exp()
    return _Features(query, key, None, shift, None, offsets, call.normalize)


def _rising_features(tokens: SummedTokens, before: Sums) -> Features:
    """Returns phi of keys, divided by the largest of a channel up to each token, and of queries."""
    keys = RunningKeys.of(_log_phi(tokens.key_BGCD.flatten(0, 1)), before)
    grown, largest = (x.unflatten(0, (-1, tokens.G)) for x in (keys.grown_XCD, keys.largest_XCD))
    query, _ = _over_largest(_log_phi(tokens.query_BGKCD), largest[:, :, None])
    return Features(query, grown, keys.fall_XCD, keys.largest_XCD[:, -1])


def _over_largest(query_XLD: Tensor, key_XLD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns e^(q + k) of two logarithms over the largest of the row, and the log of the latter.

    It is a constant for the gradient, because rows are divided by their sum. Each logarithm is
    subtracted by itself: the sum of two would have the rounding error of its size.
    """
    key_XLD = key_XLD.expand_as(query_XLD)
    top = key_XLD.amax(-1, keepdim=True)  # without it, the sum of two may overflow
    place = (query_XLD + (key_XLD - top)).argmax(-1, keepdim=True)
    query_XL1, key_XL1 = query_XLD.detach().gather(-1, place), key_XLD.gather(-1, place)
    product = (query_XLD - query_XL1) + (key_XLD - key_XL1)
    return product.clamp(max=1.0).exp(), query_XL1 + key_XL1  # above 0 by rounding alone


def _token_features(tokens: SummedTokens, _before: Sums) -> Features:
    """Returns phi of queries and keys."""
    query, key = (
        torch.where(x > 0, x + 1.0, x.clamp(max=0.0).exp())
        for x in (tokens.query_BGKCD, tokens.key_BGCD)
    )
    return Features(query, key, certain_BC1=_TINY)


def _tokens(call: Call, value_BGSE: Tensor) -> SummedTokens:
    """Returns the tokens of a request with a state, and with these values."""
    tensors = (call.query_BHLD, call.key_BGSD, value_BGSE, call.key_lengths_B)
    return SummedTokens.of(*tensors, features=_token_features, normalize=call.normalize)


def _least_product(query: Tensor, key: Tensor) -> Number | None:
    """Returns a lower bound of products of phi; None if their sums may overflow or underflow."""
    lowest, highest = (-30.0, 1e6) if query.dtype == torch.float32 else (-250.0, 1e60)
    exponent: Number = 0.0
    for x in (query, key):
        low, high = bounds(x)
        if not holds((low >= lowest) & (high <= highest)):
            return None
        exponent = exponent + (low - _size(low)) / 2  # the smaller one of low and 0
    return math.e**exponent


def _size(number: Number) -> Number:
    return number.abs() if isinstance(number, Tensor) else abs(number)


def _is_faint(features: _Features, value: Tensor) -> bool:
    """Returns True if float32 may be too narrow for products of features and values."""
    if value.dtype != torch.float32 or features.least is None:
        return False
    fits = features.least >= _FAINT
    if not are_deferred() and fits:
        return False
    size = value.abs()
    smallest, _ = bounds(size.masked_fill_(size == 0, torch.inf))
    return not holds(fits | (smallest * features.least >= _NORMAL))


def _phi(x: Tensor) -> Tensor:
    """Returns 1 + max(0, x) times elu's slope, e^x where x <= 0, with the fewest passes over x."""
    phi: Tensor = x.relu().add_(1)
    torch.ops.aten.elu_backward.grad_input(phi, 1, 1, 1, False, x, grad_input=phi)
    return phi


def _log_phi(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.clamp(min=0).log1p(), x)


def _output(matrix: _Features | RisingKeys, value_BGSE: Tensor) -> Tensor:
    """Returns A @ value, (B, G, K, L, E), by sums that queries share.

    The padding of `value_BGSE` is zero.
    """
    value = value_BGSE.to(matrix.key_BGSD.dtype)
    if isinstance(matrix, _Features):
        if _is_faint(matrix, value):
            matrix, value = matrix.wide(), value.double()
        if matrix.offsets is None and value.dtype == torch.float32:
            sums = SharedSums.of(matrix.key_BGSD, value, matrix.phi)
            # up to 1e25, queries of up to 1e6 have room
            if holds(largest_size(sums.values_BGEF) <= 1e25):
                return matrix.average(*apply_state(matrix.query_BGKLD, sums, matrix.phi))
    size, room = largest_size(value), 1.0
    if not holds(size <= (1e15 if value.dtype == torch.float32 else 1e150)):
        matrix, value = matrix.wide(), value.double()
        if (largest := float(size)) > 1e150:
            room = 2.0 ** (np.frexp(largest)[1] - 500)
            value = value / room
    output = matrix.output(value)
    if room == 1.0:
        return output
    if matrix.normalize:  # also a rounded average is no larger than the values
        output = output.clamp(-largest / room, largest / room)
    return output * room


def steps(call: Call) -> dict[str, Tensor]:
    """Returns the steps by name, from float64 tensors: the output by sums, not by the weights.

    With normalize they are averages, of channels and then of all channels: no product has to fit a
    float.
    """
    query = call.query_BHLD
    key, value = (zero_padding(x, call.key_lengths_B) for x in (call.key_BGSD, call.value_BGSE))
    seen_BLS, _ = seen_keys(query, key, call.key_lengths_B, call.causal, call.query_offset)
    (query_factor, query_log), (key_factor, key_log) = map(_factor_and_log, (query, key))
    query_phi = query_factor * query_log.exp()
    key_phi = zero_padding(key_factor * key_log.exp(), call.key_lengths_B)
    sums_BGDW = sums_before(call.past, value, (query.shape[-1], value.shape[-1] + 1))
    key_BHSD, value_BHSE, sums_BHDW = (
        per_query_head(x, query) for x in (key_phi, value, sums_BGDW)
    )
    weights = products = (query_phi @ key_BHSD.mT).masked_fill(~seen_BLS[:, None], 0.0)
    before_BHLW = query_phi @ sums_BHDW
    output = numerators = products @ value_BHSE + before_BHLW[..., :-1]
    seen = seen_BLS if call.causal else seen_BLS[:, :1]
    averages = channel_averages(
        key_log, key_factor, value, seen, sums_BGDW, torch.zeros_like(sums_BGDW[..., 0])
    )
    if call.normalize:
        top, share_BHLDS, total, average = (per_query_head(x, query) for x in averages)
        # two differences: a sum of two logarithms would have the rounding error of its size
        top = top.expand_as(query_log)
        peak = (query_log + top).masked_fill(total == 0, -torch.inf).argmax(-1, keepdim=True)
        at_peak = (x.detach().gather(-1, peak) for x in (query_log, top))
        at_peak = (x.masked_fill(x == -torch.inf, 0.0) for x in at_peak)  # all features are 0
        query_log, top = (x - y for x, y in zip((query_log, top), at_peak, strict=True))
        channels = (query_log + top).masked_fill(total == 0, -torch.inf).exp()
        channels = query_factor * channels * total
        sums = channels.sum(-1, keepdim=True)
        channels = channels / sums.masked_fill(sums == 0, 1.0)
        weights = torch.einsum("bhld,bhlds->bhls", channels, share_BHLDS)
        output = torch.einsum("bhld,bhlde->bhle", channels, average)
    feature_sums = averages.total_BGLD * averages.top_BGLD.exp()
    value_sums = averages.average_BGLDE * feature_sums[..., None]
    return {
        "query": query, "key": key, "value": value, "query_features": query_phi,
        "key_features": key_phi, "products": products,
        "row_sums": products.sum(-1) + before_BHLW[..., -1], "weights": weights,
        "value_sums": value_sums.expand(-1, -1, query.shape[2], -1, -1),
        "feature_sums": feature_sums.expand(-1, -1, query.shape[2], -1), "numerators": numerators,
        "output": output,
    }  # fmt: skip


def _factor_and_log(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns f and l with phi(x) = f e^l: l is x below 0, where phi may be too small for a float.

    A logarithm of x + 1 would have the rounding error of its size.
    """
    return torch.where(x > 0, x + 1, 1.0), torch.where(x > 0, 0.0, x)


def backward(
    call: Call, grad_output_BHLE: Float[Tensor, "B H L E"], grad_state: State | None = None
) -> dict[str, Tensor]:
    """Returns the gradients of sum(grad_output * output), in float64.

    They are sums over keys that all queries share, and sums over queries that all keys share
    (Katharopoulos et al., arXiv:2006.16236, section 3.3.1, with the division that it omits).
    `grad_state` is as `gradients_from` takes it.
    """
    if call.past is not None or grad_state is not None:
        new = _tokens(call, call.value_BGSE)
        return gradients_from(new, call.past, grad_output_BHLE, grad_state, call.chunk)
    backward = partial(_gradients, offsets=item_offsets(call))
    return gradients_by_heads(backward, call, grad_output_BHLE)


def _gradients(
    call: Call, grad_BHLE: Tensor, *, offsets: list[int] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value of some heads.

    With normalize, those of queries and keys are through those of log phi, in which the divisors of
    phi cancel.
    """
    padding, G = padding_mask(call.key_BGSD.shape[2], call.key_lengths_B), call.key_BGSD.shape[1]
    query, key = call.query_BHLD.double(), mask_padding(padding, call.key_BGSD.double())
    value, v = normalize_size(mask_padding(padding, call.value_BGSE.double()))
    grad, g = normalize_size(grad_BHLE.double())
    call = replace(call, query_BHLD=query, key_BGSD=key)
    divided, q, k = None, 0, 0
    if not call.normalize:
        query_phi, q = normalize_size(_phi(query).unflatten(1, (G, -1)))
        key_phi, k = normalize_size(mask_padding(padding, _phi(key)))
    elif isinstance(matrix := _matrix(call, offsets), RisingKeys):
        query_grad, key_grad, value_grad = matrix.gradients(value, grad)
        return scale_back(query_grad, g + v), scale_back(key_grad, g + v), scale_back(value_grad, g)
    else:
        query_phi, key_phi, *_ = matrix.with_phi_applied()
        output, total = feature_sums(query_phi, key_phi, value, offsets)
        divided = output, total.masked_fill(total == 0, torch.inf)
    query_grad, key_grad, value_grad = gradients_by_features(
        query_phi, key_phi, value, grad.unflatten(1, (G, -1)), divided, offsets
    )
    if call.normalize:
        query_grad = query_grad.mul_(query_phi).flatten(1, 2).div_(query.clamp(min=0).add_(1.0))
        key_grad = key_grad.mul_(key_phi).div_(key.clamp(min=0).add_(1.0))
    else:
        query_grad = query_grad.flatten(1, 2).mul_(query.clamp(max=0).exp_())
        key_grad = mask_padding(padding, key_grad).mul(key.clamp(max=0).exp_())
    return (
        scale_back(query_grad, g + v + k),
        scale_back(key_grad, g + v + q),
        scale_back(value_grad, g + q + k),
    )
