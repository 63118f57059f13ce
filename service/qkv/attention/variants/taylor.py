"""Taylor attention: weights are 1 plus a cosine, so queries share sums over keys.

Formula: A_ij = (1 + q'_i . k'_j) / (n + q'_i . sum_l k'_l), x' = x / |x|.
Paper: Li et al., Linear Attention Mechanism, arXiv:2007.14902, section 3.
Cost: O((L + S) D E) time, causal too, but O(S D) for each row whose keys are nearly opposite to the
query; O(L + S) memory unless weights are requested.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor
from torch.nn.functional import pad

from qkv.attention.common.cosine_sums import average_by_cosines
from qkv.attention.common.feature_sums import feature_sums
from qkv.attention.common.gradients import gradients_by_features, normalize_size, scale_back
from qkv.attention.common.guards import are_wide, bounds, holds, is_finite, occurs
from qkv.attention.common.powers_of_2 import split_exponents
from qkv.attention.common.row_masks import (
    Causal,
    QueryOffset,
    mask_padding,
    padding_mask,
    rows_to_redo,
    visible_keys,
    zero_hidden,
)
from qkv.attention.common.score_steps import (
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
    visible_counts,
)
from qkv.attention.common.summed_tokens import Features, SummedTokens, has_state, state_sizes
from qkv.attention.common.token_gradients import gradients_from
from qkv.attention.common.token_inputs import Chunk, Form, Sums
from qkv.attention.common.token_weights import rows_behind, run_with_weights
from qkv.attention.step import Step

WEIGHTS: Final = "stochastic"
REFUSES: Final[Mapping[str, str]] = {
    "scale": "only the directions of queries and keys matter, and a factor changes no direction",
    "softcap": "a cosine is capped already",
    "window": "queries share one sum over all keys, and a window has no such sum",
    "dropout": "the single weights that dropout needs are never computed",
    "seed": "the single weights that dropout needs are never computed",
    "normalize": "the division is part of the formula; without it a row grows with its keys",
}

STEPS: Final = (
    *input_steps(None, None, None),
    Step("query_directions", "B H L D", "q'_i", "Each query divided by its norm.", rows="L"),
    Step("key_directions", "B G S D", "k'_j", "Each key divided by its norm."),
    Step(
        "cosines", "B H L S", "q'_i . k'_j", "The product of each query's direction with each "
        "key's.", rows="L",
    ),
    Step(
        "terms", "B H L S", "1 + q'_i . k'_j", "1 plus the cosine, as |q'_i + k'_j|^2 / 2: the "
        "first two terms of e^x at the cosine; 0 where the query does not see the key.", rows="L",
    ),
    Step(
        "row_sums", "B H L", "n + q'_i . sum_l k'_l", "The sum of each row of terms.", rows="L",
    ),
    Step("weights", "B H L S", "A_ij", "The terms divided by the sum of their row.", rows="L"),
    Step(
        "value_sums", "B G L E", None, "The sum of the values whose keys a query sees.", rows="L",
    ),
    Step(
        "direction_sums", "B G L D E", None, "The sum of k'_j v_j^T over the keys that a query "
        "sees.", rows="L",
    ),
    Step(
        "output", "B H L E", None, "The weights times the values: the query's value_sums plus its "
        "direction times its direction_sums, divided by its row sum.", rows="L",
    ),
)  # fmt: skip

STACKABLE_BELOW: Final = 1e9
STATE_NEEDS: Final[Mapping[str, Any]] = {"causal": True, "query_offset": 0}

_ELEMENTS = 1 << 22  # of a block of rows of A
_NARROW = 1 / 8  # a denominator below n times this has lost three bits: float32 is too narrow
_CANCELLED = 1e-3  # a denominator below n times this has lost digits: its row is recomputed


class State(NamedTuple):
    """The tensors that the next tokens need; C is one less than the tokens of a chunk.

    Attributes:
        sums: those of (1, k') (v, 1)^T; F is D + 1.
        tail_length: the number of tokens in the tail; None: there is no tail.
        tail_key, tail_value: of these tokens, then zeros.
    """

    sums: Float64[Tensor, "B G F W"] | Float32[Tensor, "B G F W"] | None = None
    tail_length: Int64[Tensor, "B"] | None = None
    tail_key: Float[Tensor, "B G C D"] | None = None
    tail_value: Float[Tensor, "B G C E"] | None = None


class Taylor(NamedTuple):
    """The outputs of Taylor attention; None for an output that was not requested."""

    output: Float[Tensor, "B H L E"] | None = None
    weights: Float32[Tensor, "B H L S"] | Float64[Tensor, "B H L S"] | None = None
    state: State | None = None
    notes: Mapping[str, Bool[Tensor, "B"]] = MappingProxyType({})
    backend: str = "features"


class _Features(NamedTuple):
    """(1, x') of queries and keys, whose products are 1 + q' . k', in float64 for every dtype.

    In float32 a denominator of 1e-3 n would have only four correct digits.

    Attributes:
        query_BGKLF, key_BGSF: F is D + 1. x' is 0 for a vector without direction; padding is zero.
        offsets: each item's position of the first query; None if every query sees every key.
        counts_BL: the number of keys that each query sees.
    """

    query_BGKLF: Tensor
    key_BGSF: Tensor
    offsets: list[int] | None
    counts_BL: Tensor

    @classmethod
    def of(cls, call: Call, offsets: list[int] | None) -> _Features:
        (_, G, S, _), lengths_B = call.key_BGSD.shape, call.key_lengths_B
        padding, counts_BL = padding_mask(S, lengths_B), visible_counts(call, offsets)
        query = pad(_direction(call.query_BHLD.unflatten(1, (G, -1))), (1, 0), value=1.0)
        key = pad(_direction(mask_padding(padding, call.key_BGSD)), (1, 0), value=1.0)
        return cls(query, mask_padding(padding, key), offsets, counts_BL)

    def cancelled(self, total_BGKR: Tensor, rows: slice) -> Tensor:
        """Returns True for each row whose sum has cancelled."""
        return total_BGKR < _CANCELLED * self.counts_BL[:, None, None, rows]

    def exactly(self, head: tuple[int, ...], rows_R: Tensor) -> Tensor:
        """Returns rows of A, (R, S).

        A row that sees no key, or only keys opposed to its query (0/0), is zero.
        """
        similarity_RS = self.similar(head, rows_R)
        total_R1 = similarity_RS.sum(-1, keepdim=True)
        return similarity_RS.div_(total_R1.masked_fill(total_R1 == 0, 1.0))

    def similar(self, head: tuple[int, ...], rows_R: Tensor) -> Tensor:
        """Returns 1 + q' . k' = |q' + k'|^2 / 2, (R, S), in which nothing cancels.

        Keys that a row does not see have 0.
        """
        b, g, k = head
        query_RD, key_SF = self.query_BGKLF[b, g, k, rows_R, 1:], self.key_BGSF[b, g]
        key_SD = key_SF[:, 1:]
        size_RS = torch.cdist(query_RD, -key_SD, compute_mode="donot_use_mm_for_euclid_dist")
        # a sum within the rounding errors of two directions counts as opposed
        opposed = (key_SD.shape[1] + 4) * torch.finfo(torch.float64).eps
        similarity_RS = size_RS.masked_fill_(size_RS <= opposed, 0.0).square_().div_(2)
        similarity_RS.masked_fill_((key_SD == 0).all(-1), 1.0).mul_(key_SF[:, 0])
        seen = visible_keys(rows_R, len(key_SF), None if self.offsets is None else self.offsets[b])
        if seen is not None:
            similarity_RS.masked_fill_(~seen, 0.0)
        return similarity_RS


def weights_are(parameters: Any, inputs: Collection[str] = ()) -> str:
    """Returns the kind of the weights; with a state, the rows of new tokens sum to less."""
    return "unnormalised" if has_state(inputs) else "stochastic"


def infer_sizes(sizes: Mapping[str, int], parameters: Any) -> Mapping[str, int]:
    """Returns the sizes of the tensors of a state."""
    return state_sizes(sizes, parameters, sizes["D"] + 1)


def flops(sizes: Mapping[str, int]) -> int:
    """Returns the operations of the non-causal products: keys and values, queries and sums."""
    B, H, G, L, S, D, E = (sizes[letter] for letter in "BHGLSDE")
    return 2 * B * (D + 1) * (E + 1) * (G * S + H * L)


@dataclass(frozen=True, eq=False)
class Call:
    """A request for Taylor attention.

    Attributes:
        query_BHLD, key_BGSD, value_BGSE: query head h reads key head h // (H / G).
        key_lengths_B: keys at and after this position are padding, and not counted in n.
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


def attend(call: Call, outputs: frozenset[str]) -> Taylor:
    """Computes Taylor attention.

    A query or key of norm 0 has no direction, and similarity 1 to all. The output of float64
    inputs is summed in float64. The output of narrower inputs is summed in float32, except for
    items whose sums overflow and items with a row whose keys nearly oppose its query (a denominator
    below n / 8). These items, all weights, and requests with a state are computed in float64.

    `outputs` are the names of the outputs to return: "output", "weights", "state".
    """
    if call.past is not None or "state" in outputs:
        found = run_with_weights(_tokens(call, call.value_BGSE), call, outputs)
        return Taylor(found.output_BHSE, found.weights_BHSS, State(**found.fields), found.notes)
    offsets, output, weights = item_offsets(call), None, None
    if "output" in outputs:
        is_exact = call.query_BHLD.dtype == torch.float64 or are_wide()
        output = (_exact_output if is_exact else _fast_output)(call, offsets)
    if "weights" in outputs:
        weights = every_row(call, partial(_block, _Features.of(call, offsets)))
    return Taylor(output, weights)


def weights(call: Call) -> Callable[[slice], Tensor]:
    """Returns a function that computes rows of A, (B, H, R, S), in memory O(R S)."""
    if call.past is not None:
        return rows_behind(_tokens(call, call.key_BGSD[..., :0]), call.past, call.chunk)
    return rows_by_head(call, partial(_block, _Features.of(call, item_offsets(call))))


def _token_features(tokens: SummedTokens, before: Sums) -> Features:
    """Returns (1, x') of queries and keys. The first sum before the tokens is their number."""
    query, key = (
        pad(_Direction.apply(x), (1, 0), value=1.0)  # type: ignore[no-untyped-call]
        for x in (tokens.query_BGKCD, tokens.key_BGCD)
    )
    count_B = before[0][:: tokens.G, 0, -1]
    row_C = torch.arange(1, key.shape[2] + 1, device=key.device)
    counts_BC1 = (count_B[:, None] + row_C)[..., None]
    return Features(query, key, certain_BC1=_CANCELLED * counts_BC1)


def _tokens(call: Call, value_BGSE: Tensor) -> SummedTokens:
    """Returns the tokens of a request with a state, and with these values."""
    tensors = (call.query_BHLD, call.key_BGSD, value_BGSE, call.key_lengths_B)
    return SummedTokens.of(*tensors, features=_token_features, more=1)


def _fast_output(call: Call, offsets: list[int] | None) -> Tensor:
    """Returns the output in float32, except for items that need `_exact_output`.

    These are items with a row whose denominator d is below n / 8, because a sum of n terms rounded
    by eps has a relative error of eps n / d, and items with a sum that overflowed. Each item is
    judged by itself, so its bits do not depend on the other items.
    """
    (G, S), dtype = call.key_BGSD.shape[1:3], call.query_BHLD.dtype
    padding = padding_mask(S, call.key_lengths_B)
    counts_BL = visible_counts(call, offsets).float()
    output, total = average_by_cosines(
        call.query_BHLD.unflatten(1, (G, -1)),
        mask_padding(padding, call.key_BGSD),
        mask_padding(padding, call.value_BGSE).float(),
        counts_BL,
        offsets,
    )
    spare = torch.sub(total.squeeze(-1), counts_BL[:, None, None], alpha=_NARROW)
    # if the sum of the output is finite, all its terms are
    if holds((bounds(spare)[0] >= 0) & is_finite(output)):
        return output.flatten(1, 2).to(dtype)
    fits_B = (spare >= 0).flatten(1).all(1) & output.isfinite().flatten(1).all(1)
    output = output.flatten(1, 2).to(dtype)
    for b in torch.where(~fits_B)[0].tolist():
        item = slice(b, b + 1)
        item_offset = None if offsets is None else offsets[item]
        output[item] = _exact_output(of_item(call, b), item_offset)
    return output


def _exact_output(call: Call, offsets: list[int] | None) -> Tensor:
    """Returns the output, computed in float64 and rounded to the dtype of the inputs."""
    padding = padding_mask(call.key_BGSD.shape[2], call.key_lengths_B)
    value = mask_padding(padding, call.value_BGSE)
    return _output(_Features.of(call, offsets), value).to(call.query_BHLD.dtype)


def _direction(x: Tensor) -> Tensor:
    """Returns x / |x| in float64; 0 for a vector of norm 0."""
    x, norm, _ = _with_norm(x)
    return x / norm.masked_fill(norm == 0, 1.0)


class _Direction(torch.autograd.Function):
    """`_direction` with its gradient: that of torch's ldexp is wrong for large exponents."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _direction(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _through_direction(gradients[0], x, 0)


def _with_norm(x: Tensor) -> tuple[Tensor, Tensor, Tensor | int]:
    """Returns x and |x| in float64, both divided by 2**e, and e of each row."""
    # squares of numbers of narrower dtypes neither overflow nor underflow
    x, exponents = split_exponents(x) if x.dtype == torch.float64 else (x.double(), 0)
    return x, torch.linalg.vector_norm(x, dim=-1, keepdim=True), exponents


def _output(features: _Features, value_BGSE: Tensor) -> Tensor:
    """Returns A @ value, (B, H, L, E), by shared sums. The padding of `value_BGSE` is zero."""
    value, room_B111, bound_B111 = _with_room(value_BGSE)
    output, total = feature_sums(features.query_BGKLF, features.key_BGSF, value, features.offsets)
    total = total[..., 0]
    cancelled = features.cancelled(total, slice(None))
    output /= total.masked_fill(cancelled | (total == 0), 1.0)[..., None]
    for (b, g, k), rows in rows_to_redo(cancelled, _ELEMENTS // value.shape[2]):
        output[b, g, k, rows] = features.exactly((b, g, k), rows) @ value[b, g]
    # also a rounded average is no larger than the values
    return output.flatten(1, 2).clamp_(-bound_B111, bound_B111).mul_(room_B111)


def _with_room(value_BGSE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns values in float64, divided so that their sums fit, the divisors and the bounds.

    The bounds are those of an average of the divided values.
    """
    value, S = value_BGSE.double(), value_BGSE.shape[2]
    largest_B111 = value.abs().amax((1, 2, 3), keepdim=True)
    huge = largest_B111 > 1e300 / S
    room_B111 = torch.where(huge, torch.full_like(largest_B111, 2.0 ** (S.bit_length() + 2)), 1.0)
    bound_B111 = torch.where(huge, largest_B111 / room_B111, torch.inf)
    return (value / room_B111 if occurs(huge) else value), room_B111, bound_B111


def _block(features: _Features, rows: slice) -> Tensor:
    """Returns rows of A, (B, G, K, R, S)."""
    query = features.query_BGKLF[:, :, :, rows]
    block = torch.einsum("bgklf,bgsf->bgkls", query, features.key_BGSF).clamp_(min=0.0)
    zero_hidden(block, rows, features.offsets)
    total = block.sum(-1)
    cancelled = features.cancelled(total, rows)
    block /= total.masked_fill(cancelled | (total == 0), 1.0)[..., None]
    for (b, g, k), some in rows_to_redo(cancelled, _ELEMENTS // block.shape[-1]):
        block[b, g, k, some] = features.exactly((b, g, k), some + rows.start)
    return block


def steps(call: Call) -> dict[str, Tensor]:
    """Returns the steps by name, from float64 tensors: terms as |q' + k'|^2 / 2.

    The output is the weights times the values: the sums of values and directions cancel where keys
    are opposed to the query.
    """
    query, D = call.query_BHLD, call.query_BHLD.shape[-1]
    key, value = (zero_padding(x, call.key_lengths_B) for x in (call.key_BGSD, call.value_BGSE))
    seen_BLS, _ = seen_keys(query, key, call.key_lengths_B, call.causal, call.query_offset)
    query_way, key_way = map(_way, (query, key))
    key_BHSD, value_BHSE = (per_query_head(x, query) for x in (key_way, value))
    apart_BHLS = (query_way[:, :, :, None] + key_BHSD[:, :, None]).square().sum(-1)
    opposed = ((D + 4) * torch.finfo(torch.float64).eps) ** 2  # the rounding of two directions
    terms = apart_BHLS.masked_fill(apart_BHLS <= opposed, 0.0) / 2
    no_query_BHL1, no_key_BHS = (query_way == 0).all(-1, keepdim=True), (key_BHSD == 0).all(-1)
    terms = terms.masked_fill(no_query_BHL1 | no_key_BHS[:, :, None], 1.0)
    terms = terms.masked_fill(~seen_BLS[:, None], 0.0)
    sums_BHFW = per_query_head(sums_before(call.past, value, (D + 1, value.shape[-1] + 1)), query)
    shared_BHLW = sums_BHFW[:, :, :1] + query_way @ sums_BHFW[:, :, 1:]
    row_sums = terms.sum(-1, keepdim=True) + shared_BHLW[..., -1:]
    divisors = row_sums.masked_fill(row_sums == 0, 1.0)
    weights, seen = terms / divisors, seen_BLS.double()
    return {
        "query": query, "key": key, "value": value, "query_directions": query_way,
        "key_directions": key_way, "cosines": query_way @ key_BHSD.mT, "terms": terms,
        "row_sums": row_sums[..., 0], "weights": weights,
        "value_sums": torch.einsum("bls,bgse->bgle", seen, value),
        "direction_sums": torch.einsum("bls,bgsd,bgse->bglde", seen, key_way, value),
        "output": weights @ value_BHSE + shared_BHLW[..., :-1] / divisors,
    }  # fmt: skip


def _way(x: Tensor) -> Tensor:
    """Returns x / |x|, from x over its largest number; 0 for a vector of norm 0."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    has_none = largest == 0
    x = x / largest.masked_fill(has_none, 1.0)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).masked_fill(has_none, 1.0)
    directions: Tensor = (x / norm).masked_fill(has_none, 0.0)
    return directions


def backward(
    call: Call, grad_output_BHLE: Float[Tensor, "B H L E"], grad_state: State | None = None
) -> dict[str, Tensor]:
    """Returns the gradients of sum(grad_output * output), in float64.

    They are sums over keys that all queries share, and sums over queries that all keys share, then
    passed through x / |x|: (g - x' (x' . g)) / |x|. Queries and keys without a direction, and rows
    of zeros, get zeros. `grad_state` is as `gradients_from` takes it. Source: Li et al.,
    arXiv:2007.14902, section 3, differentiated.
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
    padding = padding_mask(call.key_BGSD.shape[2], call.key_lengths_B)
    key_BGSD = mask_padding(padding, call.key_BGSD)
    features = _Features.of(replace(call, key_BGSD=key_BGSD), offsets)
    query, key = features.query_BGKLF, features.key_BGSF
    value, v = normalize_size(mask_padding(padding, call.value_BGSE.double()))
    grad, g = normalize_size(grad_BHLE.double().unflatten(1, (key.shape[1], -1)))
    output, total = feature_sums(query, key, value, features.offsets)
    cancelled = features.cancelled(total[..., 0], slice(None))
    divided = (output, total.masked_fill_(cancelled[..., None] | (total == 0), torch.inf))
    gradients = gradients_by_features(query, key, value, grad, divided, features.offsets)
    _add_cancelled(gradients, cancelled, features, value, grad)
    query_grad, key_grad, value_grad = gradients
    return (
        _through_direction(query_grad.flatten(1, 2)[..., 1:], call.query_BHLD, g + v),
        _through_direction(mask_padding(padding, key_grad)[..., 1:], key_BGSD, g + v),
        scale_back(value_grad, g),
    )


def _add_cancelled(
    gradients: tuple[Tensor, Tensor, Tensor],
    cancelled_BGKL: Tensor,
    features: _Features,
    value_BGSE: Tensor,
    grad_BGKLE: Tensor,
) -> None:
    """Adds the gradients of rows whose sum has cancelled.

    The gradient of |q' + k'|^2 / 2 is q' + k', in which nothing cancels.
    """
    for (b, g, k), rows in rows_to_redo(
        cancelled_BGKL, _ELEMENTS // features.key_BGSF[0, 0].numel()
    ):
        similar_RS = features.similar((b, g, k), rows)
        total_R1 = similar_RS.sum(-1, keepdim=True)
        total_R1 = total_R1.masked_fill_(total_R1 == 0, torch.inf)
        share_RS, grad_RE = similar_RS / total_R1, grad_BGKLE[b, g, k, rows]
        slope_RS = grad_RE @ value_BGSE[b, g].mT
        slope_RS -= (slope_RS * share_RS).sum(-1, keepdim=True)
        slope_RS = slope_RS.div_(total_R1).masked_fill_(similar_RS == 0, 0.0)  # not seen
        both_RSF = features.query_BGKLF[b, g, k, rows, None] + features.key_BGSF[b, g]
        both_RSF *= slope_RS[..., None]
        gradients[0][b, g, k, rows] += both_RSF.sum(1)
        gradients[1][b, g] += both_RSF.sum(0)
        gradients[2][b, g] += share_RS.mT @ grad_RE


def _through_direction(gradient: Tensor, x: Tensor, exponent: int) -> Tensor:
    """Returns the gradient of x from 2**exponent times that of x / |x|; 0 where |x| is 0."""
    x, norm, exponents = _with_norm(x)
    direction = x / norm.masked_fill(norm == 0, 1.0)
    gradient = gradient - direction * (direction * gradient).sum(-1, keepdim=True)
    return scale_back(gradient / norm.masked_fill(norm == 0, torch.inf), exponent - exponents)
