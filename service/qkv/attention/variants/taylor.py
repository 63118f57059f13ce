"""Taylor attention: weights are 1 plus a cosine, so that sums over keys are shared.

Formula: A_ij = (1 + q'_i . k'_j) / (n + q'_i . sum_l k'_l), x' = x / |x|, n keys; output = A V.
Paper: Li et al., Linear Attention Mechanism (arXiv:2007.14902), section 3.
Cost: O((L + S) D E) time, causal too; memory O(L + S) unless weights are asked for. Rows whose
keys all but oppose the query are O(S D) each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor
from torch.nn.functional import pad

from qkv.attention.common.cosine_sums import average_by_cosines
from qkv.attention.common.feature_sums import feature_sums
from qkv.attention.common.gradients import (
    gradients_by_features,
    gradients_by_heads,
    normalize_size,
    scale_back,
)
from qkv.attention.common.row_masks import (
    Causal,
    QueryOffset,
    item_offsets,
    mask_padding,
    padding_mask,
    rows_to_redo,
    visible_counts,
    visible_keys,
    zero_hidden,
)
from qkv.attention.common.score_blocks import score_dtype, split_exponents
from qkv.attention.common.visibility import row_blocks

FORMULA: Final = "A_ij = (1 + q'_i . k'_j) / (n + q'_i . sum_l k'_l), x' = x / |x|"
PAPER: Final = "Li et al., Linear Attention Mechanism, arXiv:2007.14902, section 3"
COST: Final = (
    "O((L + S) D E) time, causal too, but O(S D) for each row whose keys all but oppose the query; "
    "O(L + S) memory unless weights are asked for"
)
WEIGHTS: Final = "stochastic"
REFUSES: Final[Mapping[str, str]] = {
    "scale": "only the directions of queries and keys count, and a factor changes none",
    "softcap": "a cosine is capped already",
    "window": "what all keys share is one sum: a window has no such sum",
    "dropout": "no single weight is ever made that could be dropped",
    "seed": "no single weight is ever made that could be dropped",
    "normalize": "the division is the formula's own: without it a row only grows with its keys",
}

_ELEMENTS = 1 << 22  # of a block of rows of A
_NARROW = 1 / 8  # a denominator below this many n has lost three bits: float32 is too narrow
_CANCELLED = 1e-3  # a denominator below this many n has lost digits: its terms are made one by one


class Taylor(NamedTuple):
    """What Taylor attention answers; None where it was not asked for."""

    output: Float[Tensor, "B H L E"] | None = None
    weights: Float32[Tensor, "B H L S"] | Float64[Tensor, "B H L S"] | None = None
    backend: str = "features"


class _Features(NamedTuple):
    """(1, x') of queries and keys, whose products are 1 + q' . k'; float64 whatever came.

    In float32 a denominator of 1e-3 n would have four digits left.

    Attributes:
        query_BGKLF, key_BGSF: F is D + 1; x' of what has no direction is 0, all of padding is.
        offsets: each item's position of the first query; None where all is seen.
        counts_BL: how many keys each query sees.
    """

    query_BGKLF: Tensor
    key_BGSF: Tensor
    offsets: list[int] | None
    counts_BL: Tensor

    @classmethod
    def of(
        cls,
        query_BHLD: Tensor,
        key_BGSD: Tensor,
        key_lengths_B: Tensor | None,
        causal: bool,
        query_offset: int | Literal["end"],
    ) -> _Features:
        (B, _, L, _), (_, G, S, _) = query_BHLD.shape, key_BGSD.shape
        padding = padding_mask(S, key_lengths_B)
        offsets = item_offsets(B, L, S, key_lengths_B, causal, query_offset)
        counts = visible_counts(B, L, S, key_lengths_B, offsets, query_BHLD.device)
        query = pad(_direction(query_BHLD.unflatten(1, (G, -1))), (1, 0), value=1.0)
        key = pad(_direction(mask_padding(padding, key_BGSD)), (1, 0), value=1.0)
        return cls(query, mask_padding(padding, key), offsets, counts)

    def cancelled(self, total_BGKR: Tensor, rows: slice) -> Tensor:
        """The rows whose sum has cancelled."""
        return total_BGKR < _CANCELLED * self.counts_BL[:, None, None, rows]

    def exactly(self, head: tuple[int, ...], rows_R: Tensor) -> Tensor:
        """Rows of A, (R, S); zeros for what sees nothing, or only keys that oppose it: 0/0."""
        made_RS = self.similar(head, rows_R)
        total_R1 = made_RS.sum(-1, keepdim=True)
        return made_RS.div_(total_R1.masked_fill(total_R1 == 0, 1.0))

    def similar(self, head: tuple[int, ...], rows_R: Tensor) -> Tensor:
        """1 + q' . k' = |q' + k'|^2 / 2, (R, S), which nothing cancels in; zeros for what is not
        seen."""
        b, g, k = head
        query_RD, key_SF = self.query_BGKLF[b, g, k, rows_R, 1:], self.key_BGSF[b, g]
        key_SD = key_SF[:, 1:]
        made_RS = torch.cdist(query_RD, -key_SD, compute_mode="donot_use_mm_for_euclid_dist")
        # as near as the roundings of two directions is opposed
        opposed = (key_SD.shape[1] + 4) * torch.finfo(torch.float64).eps
        made_RS = made_RS.masked_fill_(made_RS <= opposed, 0.0).square_().div_(2)
        made_RS = made_RS.masked_fill_((key_SD == 0).all(-1), 1.0).mul_(key_SF[:, 0])
        own = visible_keys(rows_R, len(key_SF), None if self.offsets is None else self.offsets[b])
        if own is not None:
            made_RS.masked_fill_(~own, 0.0)
        return made_RS


def flops(sizes: Mapping[str, int]) -> int:
    """The products that are not causal: keys with values, queries with their sum."""
    B, H, G, L, S, D, E = (sizes[letter] for letter in "BHGLSDE")
    return 2 * B * (D + 1) * (E + 1) * (G * S + H * L)


def attend(
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    value_BGSE: Float[Tensor, "B G S E"],
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    *,
    causal: Causal = False,
    query_offset: QueryOffset = 0,
    outputs: frozenset[str],
) -> Taylor:
    """Attends by directions.

    A query or key of norm 0 has no direction, and similarity 1 to all. The output of float64
    inputs is summed in float64; that of narrower ones in float32, but for those items of the batch
    whose sums overflow it, or in which a row's keys so far oppose its query that the denominator is
    below n / 8: these are made in float64 too. Weights always are.

    Args:
        query_BHLD, key_BGSD, value_BGSE: query head h reads key head h // (H / G).
        key_lengths_B: keys at and past this index are padding, and not counted in n.
        causal, query_offset: see their descriptions.
        outputs: which of "output" and "weights" to return.
    """
    (B, H, L, _), S, dtype = query_BHLD.shape, key_BGSD.shape[2], query_BHLD.dtype
    output = weights = None
    if "output" in outputs:
        make = _exactly if dtype == torch.float64 else _quickly
        output = make(query_BHLD, key_BGSD, value_BGSE, key_lengths_B, causal, query_offset)
    if "weights" in outputs:
        features = _Features.of(query_BHLD, key_BGSD, key_lengths_B, causal, query_offset)
        weights = query_BHLD.new_zeros(B, H, L, S, dtype=score_dtype(dtype))
        for rows in row_blocks(L, B * H * S, _ELEMENTS):
            weights[:, :, rows] = _block(features, rows)
    return Taylor(output, weights)


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
    features = _Features.of(query_BHLD, key_BGSD, key_lengths_B, causal, query_offset)
    exact = score_dtype(query_BHLD.dtype)

    def row_block(rows: slice) -> Float32[Tensor, "B H R S"] | Float64[Tensor, "B H R S"]:
        return _block(features, rows).to(exact)

    return row_block


def _quickly(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    key_lengths_B: Tensor | None,
    causal: bool,
    query_offset: int | Literal["end"],
) -> Tensor:
    """The output in float32, but for the items that this is too narrow for: `_exactly`.

    Those are where a row's denominator d is below n / 8, as a sum of n terms rounded by eps is off
    by eps n / d, and where a sum overflowed. Each item is judged by itself: its bits do not depend
    on its neighbours.
    """
    (B, _, L, _), (_, G, S, _), dtype = query_BHLD.shape, key_BGSD.shape, query_BHLD.dtype
    padding = padding_mask(S, key_lengths_B)
    offsets = item_offsets(B, L, S, key_lengths_B, causal, query_offset)
    counts_BL = visible_counts(B, L, S, key_lengths_B, offsets, query_BHLD.device).float()
    output, total = average_by_cosines(
        query_BHLD.unflatten(1, (G, -1)),
        mask_padding(padding, key_BGSD),
        mask_padding(padding, value_BGSE).float(),
        counts_BL,
        offsets,
    )
    spare = torch.sub(total.squeeze(-1), counts_BL[:, None, None], alpha=_NARROW)
    if spare.amin().item() >= 0 and isfinite(output.sum().item()):  # then all its terms are
        return output.flatten(1, 2).to(dtype)
    fits_B = (spare >= 0).flatten(1).all(1) & output.isfinite().flatten(1).all(1)
    output = output.flatten(1, 2).to(dtype)
    for b in torch.where(~fits_B)[0].tolist():
        own = slice(b, b + 1)
        lengths = None if key_lengths_B is None else key_lengths_B[own]
        output[own] = _exactly(
            query_BHLD[own], key_BGSD[own], value_BGSE[own], lengths, causal, query_offset
        )
    return output


def _exactly(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    key_lengths_B: Tensor | None,
    causal: bool,
    query_offset: int | Literal["end"],
) -> Tensor:
    """The output in float64, whatever came; rounded to the dtype."""
    features = _Features.of(query_BHLD, key_BGSD, key_lengths_B, causal, query_offset)
    padding = padding_mask(key_BGSD.shape[2], key_lengths_B)
    return _output(features, mask_padding(padding, value_BGSE)).to(query_BHLD.dtype)


def _direction(x: Tensor) -> Tensor:
    """x / |x| in float64; 0 where x is."""
    x, norm, _ = _with_norm(x)
    return x / norm.masked_fill(norm == 0, 1.0)


def _with_norm(x: Tensor) -> tuple[Tensor, Tensor, Tensor | int]:
    """x and |x| in float64, both over 2**e, and e of each row."""
    # squares of what was narrower neither overflow nor underflow
    x, exponents = split_exponents(x) if x.dtype == torch.float64 else (x.double(), 0)
    return x, torch.linalg.vector_norm(x, dim=-1, keepdim=True), exponents


def _output(features: _Features, value_BGSE: Tensor) -> Tensor:
    """A @ value, (B, H, L, E), by sums that queries share; the value's padding is zeros."""
    value, room_B111, most_B111 = _with_room(value_BGSE)
    output, total = feature_sums(features.query_BGKLF, features.key_BGSF, value, features.offsets)
    total = total[..., 0]
    cancelled = features.cancelled(total, slice(None))
    output /= total.masked_fill(cancelled | (total == 0), 1.0)[..., None]
    for (b, g, k), rows in rows_to_redo(cancelled, _ELEMENTS // value.shape[2]):
        output[b, g, k, rows] = features.exactly((b, g, k), rows) @ value[b, g]
    # an average is no larger than what it averages, however it is rounded
    return output.flatten(1, 2).clamp_(-most_B111, most_B111).mul_(room_B111)


def _with_room(value_BGSE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values in float64 over what leaves room for their sums, that, and what bounds an average."""
    value, S = value_BGSE.double(), value_BGSE.shape[2]
    most_B111 = value.abs().amax((1, 2, 3), keepdim=True)
    huge = most_B111 > 1e300 / S
    room_B111 = torch.where(huge, torch.full_like(most_B111, 2.0 ** (S.bit_length() + 2)), 1.0)
    bound_B111 = torch.where(huge, most_B111 / room_B111, torch.inf)
    return (value / room_B111 if huge.any() else value), room_B111, bound_B111


def _block(features: _Features, rows: slice) -> Tensor:
    """Rows of A, (B, H, R, S)."""
    query = features.query_BGKLF[:, :, :, rows]
    block = torch.einsum("bgklf,bgsf->bgkls", query, features.key_BGSF).clamp_(min=0.0)
    zero_hidden(block, rows, features.offsets)
    total = block.sum(-1)
    cancelled = features.cancelled(total, rows)
    block /= total.masked_fill(cancelled | (total == 0), 1.0)[..., None]
    for (b, g, k), at in rows_to_redo(cancelled, _ELEMENTS // block.shape[-1]):
        block[b, g, k, at] = features.exactly((b, g, k), at + rows.start)
    return block.flatten(1, 2)


def reference(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    key_lengths_B: Tensor | None = None,
    *,
    causal: bool = False,
    query_offset: int | Literal["end"] = 0,
) -> Taylor:
    """The same in plain float64 numpy, row by row, with 1 + q' . k' = |q' + k'|^2 / 2."""
    query, key, value = (x.double().numpy() for x in (query_BHLD, key_BGSD, value_BGSE))
    (B, H, L, D), (_, G, S, _) = query.shape, key.shape

    def direction(x: np.ndarray) -> np.ndarray:
        largest = np.abs(x).max(-1, keepdims=True)
        x = x / np.where(largest == 0, 1, largest)
        return x / np.where(largest == 0, 1, np.linalg.norm(x, axis=-1, keepdims=True))

    weights, output = np.zeros((B, H, L, S)), np.zeros((B, H, L, value.shape[-1]))
    for b, h in np.ndindex(B, H):
        valid = S if key_lengths_B is None else int(key_lengths_B[b])
        offset = valid - L if query_offset == "end" else query_offset
        keys = direction(key[b, h * G // H, :valid])
        for i, row in enumerate(direction(query[b, h])):
            apart = np.sqrt(((row + keys) ** 2).sum(-1))
            apart[apart <= (D + 4) * np.finfo(float).eps] = 0  # opposed, but for the roundings
            a = apart**2 / 2
            a[(keys == 0).all(-1) | (row == 0).all()] = 1
            if causal:
                a[max(0, i + offset + 1) :] = 0
            a /= a.sum() or 1
            weights[b, h, i, :valid], output[b, h, i] = a, a @ value[b, h * G // H, :valid]
    return Taylor(torch.from_numpy(output), torch.from_numpy(weights), backend="reference")


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
    queries that all keys share, then through x / |x|: (g - x' (x' . g)) / |x|. In float64; the
    arguments are `attend`'s.

    Rows and keys without a direction, and rows of zeros, get zeros. Source: Li et al.,
    arXiv:2007.14902, section 3, differentiated.
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
    padding = padding_mask(key_BGSD.shape[2], key_lengths_B)
    key_BGSD = mask_padding(padding, key_BGSD)
    features = _Features.of(query_BHLD, key_BGSD, key_lengths_B, causal, query_offset)
    query, key = features.query_BGKLF, features.key_BGSF
    value, v = normalize_size(mask_padding(padding, value_BGSE.double()))
    grad, g = normalize_size(grad_BHLE.double().unflatten(1, (key.shape[1], -1)))
    output, total = feature_sums(query, key, value, features.offsets)
    cancelled = features.cancelled(total[..., 0], slice(None))
    divided = (output, total.masked_fill_(cancelled[..., None] | (total == 0), torch.inf))
    made = gradients_by_features(query, key, value, grad, divided, features.offsets)
    _add_cancelled(made, cancelled, features, value, grad)
    return (
        _through_direction(made[0].flatten(1, 2)[..., 1:], query_BHLD, g + v),
        _through_direction(mask_padding(padding, made[1])[..., 1:], key_BGSD, g + v),
        scale_back(made[2], g),
    )


def _add_cancelled(
    gradients: tuple[Tensor, Tensor, Tensor],
    cancelled_BGKL: Tensor,
    features: _Features,
    value_BGSE: Tensor,
    grad_BGKLE: Tensor,
) -> None:
    """Adds what rows whose sum has cancelled give: the gradient of |q' + k'|^2 / 2 is q' + k', in
    which nothing cancels."""
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
    """The gradient of x, of 2**exponent times that of x / |x|; 0 where x is."""
    x, norm, exponents = _with_norm(x)
    direction = x / norm.masked_fill(norm == 0, 1.0)
    gradient = gradient - direction * (direction * gradient).sum(-1, keepdim=True)
    return scale_back(gradient / norm.masked_fill(norm == 0, torch.inf), exponent - exponents)
