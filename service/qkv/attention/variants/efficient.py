"""Efficient attention: queries are a softmax over channels, keys over positions; sums are shared.

Formula: A = softmax_D(Q) softmax_S(K)^T, output = A V.
Paper: Shen et al., Efficient Attention (arXiv:1812.01243), section 3.2.
Cost: O((L + S) D E) time, causal too; memory O(L + S) unless weights are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from qkv.attention.common.channel_softmax import average_by_channels
from qkv.attention.common.feature_sums import (
    Phi,
    feature_products,
    feature_sums,
    transposed_feature_sums,
)
from qkv.attention.common.gradients import gradients_by_heads, normalize_size, scale_back
from qkv.attention.common.row_masks import (
    Causal,
    QueryOffset,
    item_offsets,
    mask_padding,
    padding_mask,
    zero_hidden,
)
from qkv.attention.common.running_softmax import Steep
from qkv.attention.common.score_blocks import largest_size, score_dtype
from qkv.attention.common.visibility import row_blocks

FORMULA: Final = "A = softmax_D(Q) softmax_S(K)^T; causal: a query's softmax_S is over what it sees"
PAPER: Final = "Shen et al., Efficient Attention, arXiv:1812.01243, section 3.2"
COST: Final = "O((L + S) D E) time, causal too; O(L + S) memory unless weights are asked for"
WEIGHTS: Final = "stochastic"
REFUSES: Final[Mapping[str, str]] = {
    "scale": "there are no scores: queries and keys have a softmax each, so scale what you send",
    "softcap": "there are no scores that could be capped",
    "window": "what all keys share is one sum: a window has no such sum",
    "dropout": "no single weight is ever made that could be dropped",
    "seed": "no single weight is ever made that could be dropped",
    "normalize": "the two softmaxes are the normalisation: rows sum to 1 without a division",
}

STACKABLE_BELOW: Final = 20.0  # half of _SPAN: no key below it puts a whole call on another path

_ELEMENTS = 1 << 22  # of a block of rows of A
_SPAN = 40.0  # of a channel's keys, up to which e^(k - m) times a value is safe in float32
_RISE = 300.0  # of a channel's largest key over its first, up to which one shift does in float64


class Efficient(NamedTuple):
    """What efficient attention answers; None where it was not asked for."""

    output: Float[Tensor, "B H L E"] | None = None
    weights: Float32[Tensor, "B H L S"] | Float64[Tensor, "B H L S"] | None = None
    backend: str = "features"


class _Features(NamedTuple):
    """Features of queries and of keys, whose products are A.

    Not causal: both softmaxes. Causal: e^(k - m) for keys, m a channel's largest, and for queries
    their softmax over the sum Z of e^(k - m) over the keys that each sees.

    Attributes:
        query_BGKLD, key_BGSD: zero for padding; not causal: queries still without their softmax.
        offsets: each item's position of the first query; None where all is seen.
    """

    query_BGKLD: Tensor
    key_BGSD: Tensor
    offsets: list[int] | None

    @property
    def phi(self) -> Phi | None:
        """What makes features of queries; None: they are."""
        return partial(torch.softmax, dim=-1) if self.offsets is None else None

    def output(self, value_BGSE: Tensor) -> Tensor:
        """A @ value, (B, G, K, L, E)."""
        dtype = value_BGSE.dtype
        query, key = self.query_BGKLD.to(dtype), self.key_BGSD.to(dtype)
        return feature_products(query, key, value_BGSE, self.offsets, self.phi)

    def block(self, rows: slice) -> Tensor:
        """Rows of A, (B, G, K, R, S)."""
        query = self.query_BGKLD[:, :, :, rows]
        query = query if self.phi is None else self.phi(query)
        block = torch.einsum("bgkld,bgsd->bgkls", query, self.key_BGSD)
        zero_hidden(block, rows, self.offsets)
        return block

    def gradients(self, value_BGSE: Tensor, grad_BGKLE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of softmax_D(Q), of K and of the values, grad being that of A @ value."""
        query, key, offsets = self.query_BGKLD, self.key_BGSD, self.offsets
        query = query if self.phi is None else self.phi(query)
        slope, _ = feature_sums(grad_BGKLE, value_BGSE, key, offsets)
        if offsets is not None:
            total = _totals(key, offsets, query.shape[3])
            slope /= total.masked_fill_(total == 0, 1.0)[:, :, None]
        # what a row takes off is the same for all keys that it sees
        row_BGKL1, key_BGS1 = torch.ones_like(query[..., :1]), torch.ones_like(key[..., :1])
        key_gradient = transposed_feature_sums(value_BGSE, grad_BGKLE, query, offsets)
        key_gradient -= transposed_feature_sums(key_BGS1, row_BGKL1, query * slope, offsets)
        return (
            slope,
            key_gradient.mul_(key),
            transposed_feature_sums(key, query, grad_BGKLE, offsets),
        )


class _Steep(NamedTuple):
    """The same where one shift would leave nothing of the early keys, item by item."""

    items: list[Steep]

    def output(self, value_BGSE: Tensor) -> Tensor:
        pairs = zip(self.items, value_BGSE.double(), strict=True)
        return torch.stack([item.output(value_GSE) for item, value_GSE in pairs])

    def block(self, rows: slice) -> Tensor:
        return torch.stack([item.block(rows) for item in self.items])

    def gradients(self, value_BGSE: Tensor, grad_BGKLE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        items = zip(self.items, value_BGSE, grad_BGKLE, strict=True)
        each = [item.gradients(value_GSE, grad_GKLE) for item, value_GSE, grad_GKLE in items]
        query, key, value = (torch.stack(some) for some in zip(*each, strict=True))
        return query, key, value


def flops(sizes: Mapping[str, int]) -> int:
    """The products that are not causal: keys with values, queries with their sum."""
    B, H, G, L, S, D, E = (sizes[letter] for letter in "BHGLSDE")
    return 2 * B * D * E * (G * S + H * L)


def attend(
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    value_BGSE: Float[Tensor, "B G S E"],
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    *,
    causal: Causal = False,
    query_offset: QueryOffset = 0,
    outputs: frozenset[str],
) -> Efficient:
    """Attends by two softmaxes.

    Args:
        query_BHLD, key_BGSD, value_BGSE: query head h reads key head h // (H / G).
        key_lengths_B: keys at and past this index are padding, and in no softmax.
        causal, query_offset: see their descriptions.
        outputs: which of "output" and "weights" to return.
    """
    (B, H, L, _), S, dtype = query_BHLD.shape, key_BGSD.shape[2], query_BHLD.dtype
    output = weights = None
    if "output" in outputs:
        make = _carefully if causal or dtype == torch.float64 else _quickly
        output = make(query_BHLD, key_BGSD, value_BGSE, key_lengths_B, causal, query_offset)
    if "weights" in outputs:
        made = _made(query_BHLD, key_BGSD, key_lengths_B, causal, query_offset)
        weights = query_BHLD.new_zeros(B, H, L, S, dtype=score_dtype(dtype))
        for rows in row_blocks(L, B * H * S, _ELEMENTS):
            weights[:, :, rows] = made.block(rows).flatten(1, 2)
    return Efficient(output, weights)


def weights(
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    *,
    causal: bool = False,
    query_offset: int | Literal["end"] = 0,
) -> Callable[[slice], Tensor]:
    """What makes blocks of rows of A: from a slice of L to (B, H, R, S), in memory O(R S). The
    arguments are `attend`'s."""
    made = _made(query_BHLD, key_BGSD, key_lengths_B, causal, query_offset)
    exact = score_dtype(query_BHLD.dtype)

    def row_block(rows: slice) -> Float32[Tensor, "B H R S"] | Float64[Tensor, "B H R S"]:
        return made.block(rows).flatten(1, 2).to(exact)

    return row_block


def _quickly(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    key_lengths_B: Tensor | None,
    causal: bool,
    query_offset: int | Literal["end"],
) -> Tensor:
    """The output in float32 where every query sees every key, but `_carefully` for the items that
    this is too narrow for. Each is judged by itself: its bits do not depend on its neighbours."""
    padding = padding_mask(key_BGSD.shape[2], key_lengths_B)
    query = query_BHLD.unflatten(1, (key_BGSD.shape[1], -1)).float()
    made, fits = average_by_channels(query, key_BGSD.float(), value_BGSE.float(), padding)
    if made is None:
        return _carefully(query_BHLD, key_BGSD, value_BGSE, key_lengths_B, causal, query_offset)
    output = made.flatten(1, 2).to(query_BHLD.dtype)
    for b, fit in enumerate(fits):
        if not fit:
            own = slice(b, b + 1)
            lengths = None if key_lengths_B is None else key_lengths_B[own]
            items = (query_BHLD[own], key_BGSD[own], value_BGSE[own], lengths)
            output[own] = _carefully(*items, causal, query_offset)
    return output


def _carefully(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    key_lengths_B: Tensor | None,
    causal: bool,
    query_offset: int | Literal["end"],
) -> Tensor:
    """The output, whatever came."""
    made = _made(query_BHLD, key_BGSD, key_lengths_B, causal, query_offset)
    value = mask_padding(padding_mask(key_BGSD.shape[2], key_lengths_B), value_BGSE)
    return _output(made, value).to(query_BHLD.dtype)


def _made(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    key_lengths_B: Tensor | None,
    causal: bool,
    query_offset: int | Literal["end"],
) -> _Features | _Steep:
    """What makes A: in float32 or float64 where keys are of like size, else in float64."""
    (B, _, L, _), (_, G, S, _) = query_BHLD.shape, key_BGSD.shape
    offsets = item_offsets(B, L, S, key_lengths_B, causal, query_offset)
    padding = padding_mask(S, key_lengths_B)
    query = query_BHLD.unflatten(1, (G, -1)).to(score_dtype(query_BHLD.dtype))
    key = key_BGSD.to(query.dtype)
    unseen = None if padding is None else padding[:, None, :, None]
    if not _is_narrow(key, unseen):
        query, key = query.double(), key.double()
    if unseen is not None:
        key = key.masked_fill(unseen, -torch.inf)
    if offsets is None:
        key = key.softmax(2)  # sums one after the other; a sum by parts is good to the last digit
        key.div_(key.sum(2, keepdim=True))
        return _Features(query, key if unseen is None else key.masked_fill_(unseen, 0.0), None)
    query, most_BG1D = query.softmax(-1), key.amax(2, keepdim=True)
    if query.dtype == torch.float64 and bool((most_BG1D - key[:, :, :1] > _RISE).any()):
        return _Steep([Steep.of(query[b], key[b], offset) for b, offset in enumerate(offsets)])
    if unseen is not None:
        most_BG1D = most_BG1D.masked_fill(most_BG1D == -torch.inf, 0.0)
    key = (key - most_BG1D).exp_()
    total = _totals(key, offsets, L)
    if unseen is not None:  # all of an item's keys may be
        total.masked_fill_(total == 0, 1.0)
    query.div_(total[:, :, None])
    return _Features(query, key, offsets)


def _is_narrow(key_BGSD: Tensor, unseen_B1S1: Tensor | None) -> bool:
    """Whether the keys of no channel are further apart than _SPAN."""
    if unseen_B1S1 is None:
        low, high = torch.aminmax(key_BGSD)
        if high.item() - low.item() <= _SPAN:  # of all channels together: the faster question
            return True
        return bool((key_BGSD.amax(2) - key_BGSD.amin(2) <= _SPAN).all())
    most = key_BGSD.masked_fill(unseen_B1S1, -torch.inf).amax(2)
    least = key_BGSD.masked_fill(unseen_B1S1, torch.inf).amin(2)
    return bool((most - least <= _SPAN).all())


def _totals(key_BGSD: Tensor, offsets: list[int], L: int) -> Tensor:
    """(B, G, L, D): the sum of the keys that each query sees; any for none."""
    S, total = key_BGSD.shape[2], key_BGSD.cumsum(2)
    if L != S or any(offsets):
        row_L = torch.arange(L, device=key_BGSD.device)
        at = (total[b][:, (row_L + o).clamp_(0, S - 1)] for b, o in enumerate(offsets))
        total = torch.stack(list(at))
    return total


def _output(made: _Features | _Steep, value_BGSE: Tensor) -> Tensor:
    """A @ value, (B, H, L, E); the value's padding is zeros."""
    value, dtype = value_BGSE, torch.float64
    most = [largest_size(item) for item in value] if value.numel() else [0.0] * len(value)
    if isinstance(made, _Features) and made.query_BGKLD.dtype == torch.float32:
        # past 1e15 what e^-_SPAN leaves of a small value beside it may underflow
        dtype = torch.float32 if all(m <= 1e15 for m in most) else dtype
    # powers of two, exact: neither do sums overflow, nor do small values underflow
    exponents = [math.frexp(m)[1] for m in most]
    factors = [2.0 ** (min(max(e, -60), 900) - e) for e in exponents]
    value = value.to(dtype)
    scaled = any(factor != 1.0 for factor in factors)
    if scaled:
        factor_B111 = value.new_tensor(factors, dtype=torch.float64)[:, None, None, None]
        value = value * factor_B111.to(dtype)
    # an average is no larger than what it averages, however it is rounded
    output = made.output(value).flatten(1, 2)
    for item, m, factor in zip(output, most, factors, strict=True):
        item.clamp_(-m * factor, m * factor)
    if scaled:
        output = output.double().div_(factor_B111)
    return output


def reference(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    key_lengths_B: Tensor | None = None,
    *,
    causal: bool = False,
    query_offset: int | Literal["end"] = 0,
) -> Efficient:
    """The same in plain float64 numpy, row by row, as a textbook writes it."""
    query, key, value = (x.double().numpy() for x in (query_BHLD, key_BGSD, value_BGSE))
    (B, H, L, _), (_, G, S, _) = query.shape, key.shape

    def softmax(x: np.ndarray, axis: int) -> np.ndarray:
        with np.errstate(over="ignore"):  # as far below the largest is 0
            x = np.exp(x - x.max(axis, keepdims=True))
        x /= x.sum(axis, keepdims=True)
        return x

    weights, output = np.zeros((B, H, L, S)), np.zeros((B, H, L, value.shape[-1]))
    for b, h in np.ndindex(B, H):
        valid = S if key_lengths_B is None else int(key_lengths_B[b])
        offset = valid - L if query_offset == "end" else query_offset
        for i, row in enumerate(softmax(query[b, h], -1)):
            n = min(valid, max(0, i + offset + 1)) if causal else valid
            if n:
                a = softmax(key[b, h * G // H, :n], 0) @ row
                weights[b, h, i, :n], output[b, h, i] = a, a @ value[b, h * G // H, :n]
    return Efficient(torch.from_numpy(output), torch.from_numpy(weights), backend="reference")


def backward(
    grad_output_BHLE: Float[Tensor, "B H L E"],
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    value_BGSE: Float[Tensor, "B G S E"],
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    *,
    causal: bool = False,
    query_offset: int | Literal["end"] = 0,
) -> dict[str, Tensor]:
    """Gradients of sum(grad_output * output), by sums over keys that all queries share and over
    queries that all keys share, through both softmaxes. In float64; the arguments are `attend`'s.

    With rq = softmax_D(Q) and p_ijc what key j is of channel c's softmax for query i, and slopes
    u_ic = sum_j p_ijc (dY_i . v_j): dq_ic = rq_ic (u_ic - sum_d rq_id u_id),
    dk_jc = sum_i rq_ic p_ijc (dY_i . v_j - u_ic), dv_j = sum_i sum_c rq_ic p_ijc dY_i.
    Source: Shen et al., arXiv:1812.01243, section 3.2, differentiated.
    """
    backward = partial(
        _gradients, key_lengths_B=key_lengths_B, causal=causal, query_offset=query_offset
    )
    return gradients_by_heads(backward, grad_output_BHLE, query_BHLD, key_BGSD, value_BGSE)


def _gradients(
    grad_BHLE: Tensor,
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    *,
    key_lengths_B: Tensor | None,
    causal: bool,
    query_offset: int | Literal["end"],
) -> tuple[Tensor, Tensor, Tensor]:
    """Of query, key and value."""
    query, key = query_BHLD.double(), key_BGSD.double()
    value, v = normalize_size(
        mask_padding(padding_mask(key.shape[2], key_lengths_B), value_BGSE.double())
    )
    grad, g = normalize_size(grad_BHLE.double().unflatten(1, (key.shape[1], -1)))
    made = _made(query, key, key_lengths_B, causal, query_offset)
    slope_BGKLD, key_gradient, value_gradient = made.gradients(value, grad)
    query, slope = query.softmax(-1), slope_BGKLD.flatten(1, 2)
    query_gradient = slope.sub_((query * slope).sum(-1, keepdim=True)).mul_(query)
    return (
        scale_back(query_gradient, g + v),
        scale_back(key_gradient, g + v),
        scale_back(value_gradient, g),
    )
