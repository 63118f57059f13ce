"""Linear attention: weights are products of positive features, so queries share sums over keys.

Formula: A_ij = phi(q_i) . phi(k_j) / sum_l phi(q_i) . phi(k_l), phi(x) = elu(x) + 1.
Paper: Katharopoulos et al., Transformers are RNNs, arXiv:2006.16236, section 3.2.
Cost: O((L + S) D E) time, causal too; O(L + S) memory unless weights are requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from pydantic import Field
from torch import Tensor

from qkv.attention.common.feature_sums import Phi, SharedSums, apply_state, feature_sums
from qkv.attention.common.gradients import (
    gradients_by_features,
    gradients_by_heads,
    normalize_size,
    scale_back,
)
from qkv.attention.common.guards import (
    Number,
    are_deferred,
    are_wide,
    bounds,
    holds,
    largest_size,
)
from qkv.attention.common.row_masks import (
    Causal,
    QueryOffset,
    item_offsets,
    mask_padding,
    padding_mask,
    rows_to_redo,
    visible_keys,
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
from qkv.attention.common.summed_tokens import Features, SummedTokens, has_state, state_sizes
from qkv.attention.common.token_gradients import gradients_from
from qkv.attention.common.token_inputs import Chunk, Form, Sums
from qkv.attention.common.token_state import run_from
from qkv.attention.common.token_weights import rows_behind
from qkv.attention.common.visibility import row_blocks
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

_ELEMENTS = 1 << 22  # of a block of rows of A, and of the sums of features for it
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

    Attributes:
        query_BGKLD: those of the queries, each row divided by e^shift of the row.
        key_BGSD: those of the keys, divided by e^shift of their head; zero for padding.
        phi: the function to apply to both; None: they are features.
        shift_BGKL1: the sum of the shifts of row and head; None: no shifts.
        logs: log phi of both where sums of products may underflow; otherwise None.
        least: a lower bound of the products of both, except padding; None if there are logs.
    """

    query_BGKLD: Tensor
    key_BGSD: Tensor
    phi: Phi | None
    shift_BGKL1: Tensor | None
    logs: tuple[Tensor, Tensor] | None
    least: Number | None

    @classmethod
    def of(cls, query_BHLD: Tensor, key_BGSD: Tensor, padding_BS: Tensor | None) -> _Features:
        """Returns the features in float32 or float64 if phi is of ordinary size.

        Otherwise they are in float64, from the logarithm of phi. elu(x) + 1 is never computed: in
        float32 it is exactly 0 below x = -30.
        """
        compute = torch.float64 if are_wide() else score_dtype(query_BHLD.dtype)
        query = query_BHLD.unflatten(1, (key_BGSD.shape[1], -1)).to(compute)
        key = mask_padding(padding_BS, key_BGSD.to(compute))
        if (least := _least_product(query, key)) is not None:
            return cls(query, mask_padding(padding_BS, key, -torch.inf), _phi, None, None, least)
        logs = (
            _log_phi(query.double()),
            mask_padding(padding_BS, _log_phi(key.double()), -torch.inf),
        )
        query_shift = logs[0].amax(-1, keepdim=True)
        key_shift = logs[1].amax((-1, -2), keepdim=True)
        key_shift = key_shift.masked_fill(key_shift == -torch.inf, 0.0)  # a head of padding alone
        query, key = (logs[0] - query_shift).exp(), (logs[1] - key_shift).exp()
        return cls(query, key, None, query_shift + key_shift[:, :, None], logs, None)

    def with_phi_applied(self) -> _Features:
        """Returns the same with phi applied."""
        if self.phi is None:
            return self
        return self._replace(
            query_BGKLD=self.phi(self.query_BGKLD), key_BGSD=self.phi(self.key_BGSD), phi=None
        )


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
    (B, H, L, _), S, dtype = call.query_BHLD.shape, call.key_BGSD.shape[2], call.query_BHLD.dtype
    if call.past is not None or "state" in outputs:
        new = _tokens(call, call.value_BGSE)
        found, weights = run_from(new, call.past, call.chunk, call.state), None
        if "weights" in outputs:
            weights = rows_behind(new, call.past, call.chunk)(slice(0, L)).to(score_dtype(dtype))
        return Linear(found.output_BHSE, weights, State(**found.fields), found.notes)
    padding = padding_mask(S, call.key_lengths_B)
    features = _Features.of(call.query_BHLD, call.key_BGSD, padding)
    offsets = _offsets(call)
    output = weights = None
    if "output" in outputs:
        output = _output(features, call.value_BGSE, padding, offsets, call.normalize).to(dtype)
    if "weights" in outputs:
        weights, features = (
            call.query_BHLD.new_zeros(B, H, L, S, dtype=score_dtype(dtype)),
            features.with_phi_applied(),
        )
        for rows in row_blocks(L, B * H * S, _ELEMENTS):
            weights[:, :, rows] = _block(features, rows, offsets, call.normalize)
    return Linear(output, weights)


def weights(call: Call) -> Callable[[slice], Tensor]:
    """Returns a function that computes rows of A, (B, H, R, S), in memory O(R S)."""
    S = call.key_BGSD.shape[2]
    exact = score_dtype(call.query_BHLD.dtype)
    if call.past is not None:
        new = _tokens(call, call.key_BGSD[..., :0])
        behind = rows_behind(new, call.past, call.chunk)
        return lambda rows: behind(rows).to(exact)
    features = _Features.of(call.query_BHLD, call.key_BGSD, padding_mask(S, call.key_lengths_B))
    features = features.with_phi_applied()
    offsets = _offsets(call)

    def row_block(rows: slice) -> Float32[Tensor, "B H R S"] | Float64[Tensor, "B H R S"]:
        return _block(features, rows, offsets, call.normalize).to(exact)

    return row_block


def _offsets(call: Call) -> list[int] | None:
    """Returns each item's position of the first query; None if every query sees every key."""
    (B, _, L, _), S = call.query_BHLD.shape, call.key_BGSD.shape[2]
    return item_offsets(B, L, S, call.key_lengths_B, call.causal, call.query_offset)


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


def _output(
    features: _Features,
    value_BGSE: Tensor,
    padding_BS: Tensor | None,
    offsets: list[int] | None,
    normalize: bool,
) -> Tensor:
    """Returns A @ value, (B, H, L, E), by sums that queries share."""
    value = mask_padding(padding_BS, value_BGSE.to(features.key_BGSD.dtype))
    query, key, phi = features.query_BGKLD, features.key_BGSD, features.phi
    if _is_faint(features, value):
        query, key, value = query.double(), key.double(), value.double()
    narrow, largest, room = value.dtype == torch.float32, 0.0, 1.0
    sums = SharedSums.of(key, value, phi) if narrow and offsets is None else None
    # up to 1e25, queries of up to 1e6 have room
    if sums is None or not holds(largest_size(sums.values_BGEF) <= 1e25):
        sums, size = None, largest_size(value)
        if not holds(size <= (1e15 if narrow else 1e150)):
            query, key, value = query.double(), key.double(), value.double()
            if (largest := float(size)) > 1e150:
                room = 2.0 ** (np.frexp(largest)[1] - 500)
                value = value / room
    output, total = (
        feature_sums(query, key, value, offsets, phi)
        if sums is None
        else apply_state(query, sums, phi)
    )
    if normalize:
        output.div_(total.clamp(min=torch.finfo(total.dtype).tiny))  # 0 for rows without keys
        if features.logs is not None:
            _redo(output, total, features.logs, value, offsets)
        if room != 1.0:  # also a rounded average is no larger than the values
            output = output.clamp(-largest / room, largest / room)
    elif features.shift_BGKL1 is not None:
        output = output * features.shift_BGKL1.exp()
    return (output if room == 1.0 else output * room).flatten(1, 2)


def _redo(
    output_BGKLE: Tensor,
    total_BGKL1: Tensor,
    logs: tuple[Tensor, Tensor],
    value_BGSE: Tensor,
    offsets: list[int] | None,
) -> None:
    """Recomputes rows whose sum has underflowed, from the logarithms of their weights."""
    query, key = logs
    for (b, g, k), rows in rows_to_redo(
        total_BGKL1[..., 0] < _TINY, _ELEMENTS // key[0, 0].numel()
    ):
        seen = visible_keys(rows, key.shape[2], None if offsets is None else offsets[b])
        weights_RS = _from_logs(query[b, g, k, rows], key[b, g], seen)
        output_BGKLE[b, g, k, rows] = weights_RS @ value_BGSE[b, g]


def _from_logs(query_RD: Tensor, key_SD: Tensor, seen_RS: Tensor | None) -> Tensor:
    """Returns normalised rows of A, (R, S); a row that sees nothing is zero."""
    sums_RS = _terms(query_RD, key_SD, seen_RS).sum(-1)
    total_R1 = sums_RS.sum(-1, keepdim=True)
    return sums_RS / total_R1.masked_fill(total_R1 == 0, 1.0)


def _terms(query_RD: Tensor, key_SD: Tensor, seen_RS: Tensor | None) -> Tensor:
    """Returns the terms of rows of A, (R, S, D), each row divided by its largest.

    Terms of keys that a row does not see are zero.
    """
    logs_RSD = query_RD[:, None] + key_SD
    if seen_RS is not None:
        logs_RSD = logs_RSD.masked_fill(~seen_RS[..., None], -torch.inf)
    largest_R11 = logs_RSD.amax((1, 2), keepdim=True)
    largest_R11 = largest_R11.masked_fill(largest_R11 == -torch.inf, 0.0)
    return (logs_RSD - largest_R11).exp()


def _block(features: _Features, rows: slice, offsets: list[int] | None, normalize: bool) -> Tensor:
    """Returns rows of A, (B, H, R, S)."""
    query = features.query_BGKLD[:, :, :, rows]
    block = torch.einsum("bgkld,bgsd->bgkls", query, features.key_BGSD)
    S, row_R = block.shape[-1], torch.arange(rows.start, rows.stop, device=block.device)
    zero_hidden(block, rows, offsets)
    if not normalize:
        if features.shift_BGKL1 is not None:
            block = block * features.shift_BGKL1[:, :, :, rows].exp()
        return block.flatten(1, 2)
    total = block.sum(-1, keepdim=True)
    block = block / total.masked_fill(total == 0, 1.0)
    if features.logs is not None:
        query, key = features.logs
        for (b, g, k), some in rows_to_redo(total[..., 0] < _TINY, _ELEMENTS // key[0, 0].numel()):
            seen = visible_keys(row_R[some], S, None if offsets is None else offsets[b])
            block[b, g, k, some] = _from_logs(query[b, g, k, row_R[some]], key[b, g], seen)
    return block.flatten(1, 2)


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
        query_log, top = (x - x.detach().gather(-1, peak) for x in (query_log, top))
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
    backward = partial(
        _gradients if call.normalize else _gradients_of_sums,
        padding_BS=padding_mask(call.key_BGSD.shape[2], call.key_lengths_B),
        offsets=_offsets(call),
    )
    return gradients_by_heads(
        backward, grad_output_BHLE, call.query_BHLD, call.key_BGSD, call.value_BGSE
    )


def _gradients(
    grad_BHLE: Tensor,
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    *,
    padding_BS: Tensor | None,
    offsets: list[int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value, through those of log phi.

    The divisors of phi cancel in the gradients of log phi.
    """
    query, key = query_BHLD.double(), mask_padding(padding_BS, key_BGSD.double())
    value, v = normalize_size(mask_padding(padding_BS, value_BGSE.double()))
    grad, g = normalize_size(grad_BHLE.double().unflatten(1, (key.shape[1], -1)))
    features = _Features.of(query, key, padding_BS).with_phi_applied()
    output, total = feature_sums(features.query_BGKLD, features.key_BGSD, value, offsets)
    lost = total == 0 if features.logs is None else total < _TINY
    divided = (output, total.masked_fill(lost, torch.inf))
    gradients = gradients_by_features(
        features.query_BGKLD, features.key_BGSD, value, grad, divided, offsets
    )
    query_grad, key_grad, value_grad = gradients
    query_grad.mul_(features.query_BGKLD)
    key_grad.mul_(features.key_BGSD)
    if features.logs is not None:
        _add_lost(gradients, lost[..., 0], features.logs, value, grad, offsets)
    key_grad.div_(key.clamp(min=0).add_(1.0))
    query_grad = query_grad.flatten(1, 2).div_(query.clamp(min=0).add_(1.0))
    return scale_back(query_grad, g + v), scale_back(key_grad, g + v), scale_back(value_grad, g)


def _add_lost(
    gradients: tuple[Tensor, Tensor, Tensor],
    lost_BGKL: Tensor,
    logs: tuple[Tensor, Tensor],
    value_BGSE: Tensor,
    grad_BGKLE: Tensor,
    offsets: list[int] | None,
) -> None:
    """Adds the gradients of rows whose sum has underflowed.

    From the logarithms, A is a softmax over all pairs of a key and a feature.
    """
    query, key = logs
    for (b, g, k), rows in rows_to_redo(lost_BGKL, _ELEMENTS // key[0, 0].numel()):
        seen = visible_keys(rows, key.shape[2], None if offsets is None else offsets[b])
        share_RSD = _terms(query[b, g, k, rows], key[b, g], seen)
        total_R11 = share_RSD.sum((1, 2), keepdim=True)
        share_RSD /= total_R11.masked_fill_(total_R11 == 0, 1.0)
        share_RS, grad_RE = share_RSD.sum(-1), grad_BGKLE[b, g, k, rows]
        slope_RS = grad_RE @ value_BGSE[b, g].mT
        slope_RS -= (slope_RS * share_RS).sum(-1, keepdim=True)
        slope_RSD = share_RSD.mul_(slope_RS[..., None])
        gradients[0][b, g, k, rows] += slope_RSD.sum(1)
        gradients[1][b, g] += slope_RSD.sum(0)
        gradients[2][b, g] += share_RS.mT @ grad_RE


def _gradients_of_sums(
    grad_BHLE: Tensor,
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    *,
    padding_BS: Tensor | None,
    offsets: list[int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value if rows are not divided by their sum."""
    query, key = query_BHLD.double(), mask_padding(padding_BS, key_BGSD.double())
    value, v = normalize_size(mask_padding(padding_BS, value_BGSE.double()))
    grad, g = normalize_size(grad_BHLE.double().unflatten(1, (key.shape[1], -1)))
    query_phi, q = normalize_size(_phi(query).unflatten(1, (key.shape[1], -1)))
    key_phi, k = normalize_size(mask_padding(padding_BS, _phi(key)))
    query_gradient, key_gradient, value_gradient = gradients_by_features(
        query_phi, key_phi, value, grad, None, offsets
    )
    query_gradient = query_gradient.flatten(1, 2).mul_(query.clamp(max=0).exp_())
    key_gradient = mask_padding(padding_BS, key_gradient).mul(key.clamp(max=0).exp_())
    return (
        scale_back(query_gradient, g + v + k),
        scale_back(key_gradient, g + v + q),
        scale_back(value_gradient, g + q + k),
    )
