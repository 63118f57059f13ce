"""Backward passes that variants share: by score blocks, and by features."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkv.attention.common.feature_sums import feature_products, transposed_feature_sums
from qkv.attention.common.guards import holds, largest_size, occurs
from qkv.attention.common.powers_of_2 import times_power_of_2
from qkv.attention.common.score_blocks import Scores
from qkv.attention.common.visibility import row_blocks

_SCORE_ELEMENTS = 1 << 21  # of a block; five blocks are held at once, 8 MiB each in float32
_WORTH_IT = 1 << 16  # elements below which the calls take longer than the arithmetic
_SAFE = 1e30  # the largest safe size of products and sums in float32
_ORDINARY = (
    1e20  # products of a few factors up to it, and their sums, are far inside float64's range
)
_TERMS = ("alibi_slopes", "sinks")  # the names of the gradients of `HeadTerms`
_MAX_EXPONENT = 2000  # beyond it every number but 0 overflows or underflows


def normalize_size(x: Tensor) -> tuple[Tensor, int]:
    """Returns x / 2**e and e.

    e is 0, except where x, in float64, is so large or small that products may leave the range. Then
    e makes the largest element about 1.
    """
    size = largest_size(x)
    if not occurs((size > _ORDINARY) | ((size > 0) & (size < 1 / _ORDINARY))):
        return x, 0
    exponent = math.frexp(float(size))[1]
    return scale_back(x, -exponent), exponent


def scale_back(x: Tensor, exponents: Tensor | int) -> Tensor:
    """Returns x * 2**exponents."""
    if isinstance(exponents, int):
        if exponents == 0:
            return x
        exponents = torch.full((), exponents, device=x.device)
    return times_power_of_2(x, exponents.clamp(-_MAX_EXPONENT, _MAX_EXPONENT))


def is_ordinary(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    dropout: float,
    farthest: int = 0,
) -> bool:
    """Returns True if `gradients_by_scores` neither overflows nor underflows in float32.

    The tensors are (grad_output, query, key, value). The gradient of ALiBi's slopes is a sum of
    products with distances up to `farthest`.
    """
    grad, query, key, value = map(largest_size, tensors)
    H, L, E = tensors[0].shape[1:]
    product = grad * value
    summed = grad * (1.0 + value * E) * H * L / (1 - dropout)
    if farthest and not holds(2 * summed * farthest < _SAFE):
        return False
    return holds(
        ((product == 0) | (product >= 1 / _SAFE))
        & (summed < _SAFE)
        & (2 * summed * (query + key) * abs(scale) < _SAFE)
    )


def gradients_by_scores(
    scores: Scores, tensors: tuple[Tensor, Tensor, Tensor, Tensor], safe: bool
) -> dict[str, Tensor]:
    """Returns the gradients of a softmax or sigmoid by the names of the inputs.

    Args:
        scores: those of query and key.
        tensors: grad_output, query, key and value.
        safe: they are `is_ordinary`; otherwise powers of two are split from them.
    """
    grad, query, key, value = (x.to(scores.visible.dtype) for x in tensors)
    if safe:
        return _sum_blocks(scores, grad, query, key, value)
    (grad, g), (query, q), (key, k), (value, v) = map(normalize_size, (grad, query, key, value))
    exponents = {"query": g + v + k, "key": g + v + q, "value": g}  # all others depend on g and v
    scaled = _sum_blocks(scores, grad, query, key, value)
    return {n: scale_back(gradient, exponents.get(n, g + v)) for n, gradient in scaled.items()}


def _sum_blocks(
    scores: Scores, grad_BHLE: Tensor, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSE: Tensor
) -> dict[str, Tensor]:
    """Sums up the gradients of a block of rows of some heads at a time.

    All tensors are in the scores' dtype. `query` and `key` are those of the scores, apart from
    powers of two.
    """
    (B, H, L, _), (_, G, S, _) = query_BHLD.shape, key_BGSD.shape
    query_BGKLD, grad_BGKLE = (x.unflatten(1, (G, -1)) for x in (query_BHLD, grad_BHLE))
    query, key, value = (torch.zeros_like(x) for x in (query_BGKLD, key_BGSD, value_BGSE))
    gradients = {"query": query, "key": key, "value": value}
    visible, mask = scores.visible, scores.visible.mask_BHLS
    if mask is not None and mask.is_floating_point():
        gradients["mask"] = torch.zeros_like(mask, dtype=grad_BHLE.dtype)
    if scores.terms is not None:  # one number sums up all rows of a head: in float64
        for name, term_H in zip(_TERMS, scores.terms, strict=True):
            if term_H is not None:
                gradients[name] = torch.zeros_like(term_H, dtype=torch.float64)
    banded = visible.causal or visible.left is not None or visible.right is not None
    # the fewer rows a block has, the more keys it can skip, but each block takes a dozen calls. The
    # number of rows does not depend on B, so that an item's bits do not either
    tall = min(L, max(-(-L // 8), _WORTH_IT // max(1, H * S))) if banded else L
    for groups in row_blocks(G, B * H // G * tall * S, _SCORE_ELEMENTS):
        heads = slice(groups.start * H // G, groups.stop * H // G)
        part = {n: _of_heads(x, n, groups, heads) for n, x in gradients.items()}
        part_scores = scores.of_heads(groups)
        tensors = [x[:, groups] for x in (grad_BGKLE, query_BGKLD, key_BGSD, value_BGSE)]
        row_elements = B * (heads.stop - heads.start) * S
        for rows in row_blocks(L, row_elements, min(tall * row_elements, _SCORE_ELEMENTS)):
            _add_block(part, part_scores, rows, *tensors)
    return gradients | {"query": query.flatten(1, 2)}


def _of_heads(gradient: Tensor, name: str, groups: slice, heads: slice) -> Tensor:
    """Returns the part of a gradient that is of some key heads, or of their query heads."""
    if name in _TERMS:
        return gradient[heads]
    if name == "mask":
        return gradient[:, heads] if gradient.shape[1] > 1 else gradient
    return gradient[:, groups]


def _add_block(
    gradients: dict[str, Tensor],
    scores: Scores,
    rows: slice,
    grad_BGKLE: Tensor,
    query_BGKLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
) -> None:
    """Adds the contribution of a block of rows to the gradients."""
    block, heads = scores.block(rows), query_BGKLD.shape[1:3]
    keys, grad, query = block.keys, grad_BGKLE[:, :, :, rows], query_BGKLD[:, :, :, rows]
    weights_BGKRS = block.weights.unflatten(1, heads)
    gradients["value"][:, :, keys] += torch.einsum("bgkls,bgkle->bgse", weights_BGKRS, grad)
    slope = torch.einsum("bgkle,bgse->bgkls", grad, value_BGSE[:, :, keys]).flatten(1, 2)
    if block.kept is not None:
        slope.mul_(block.kept).div_(1.0 - scores.dropout)
    if scores.sigmoid_bias is not None:  # 1 - A would cancel where A is near 1
        slope.mul_(block.shares).mul_(torch.sigmoid(-block.scores))
    else:
        mean = (slope * block.shares).sum(-1, keepdim=True)
        if block.sink_shares is not None:  # the slope of a sink is 0: it has no value
            gradients["sinks"] -= (mean * block.sink_shares).sum((0, 2, 3), dtype=torch.float64)
        slope.sub_(mean).mul_(block.shares)
    if "alibi_slopes" in gradients:
        distance = scores.visible.distances(rows, keys, slope.device).to(slope.dtype)
        gradients["alibi_slopes"] += (slope * distance).sum((0, 2, 3), dtype=torch.float64)
    if "mask" in gradients:
        mask = gradients["mask"]
        mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
        mask = mask[..., keys] if mask.shape[3] > 1 else mask
        mask += slope.sum_to_size(mask.shape)
    if (capped := scores.slopes(rows)) is not None:
        slope *= capped
    slope_BGKRS = slope.mul_(scores.scale).unflatten(1, heads)
    gradients["query"][:, :, :, rows] = torch.einsum(
        "bgkls,bgsd->bgkld", slope_BGKRS, key_BGSD[:, :, keys]
    )
    gradients["key"][:, :, keys] += torch.einsum("bgkls,bgkld->bgsd", slope_BGKRS, query)


def gradients_by_features(
    query_BGKLF: Tensor,
    key_BGSF: Tensor,
    value_BGSE: Tensor,
    grad_BGKLE: Tensor,
    divided: tuple[Tensor, Tensor] | None,
    offsets: list[int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the features of queries and of keys, and of the values.

    With Y_i = sum_j (f_i . g_j) v_j / n_i and G_i = dY_i / n_i, the gradient of f_i . g_j is
    G_i . v_j + b_i, b_i = -G_i . Y_i. These are sums of products again, with G and b as features.

    Args:
        grad_BGKLE: dY.
        divided: Y n and n, (B, G, K, L, 1), with inf in n for rows to omit; None: no division, so
            n is 1 and b is 0.
    """
    if divided is None:
        gradient = transposed_feature_sums(key_BGSF, query_BGKLF, grad_BGKLE, offsets)
    else:
        output_BGKLE, total_BGKL1 = divided
        grad_BGKLE = grad_BGKLE / total_BGKL1
        gradient = transposed_feature_sums(key_BGSF, query_BGKLF, grad_BGKLE, offsets)
        less_BGKL1 = (grad_BGKLE * output_BGKLE.div_(total_BGKL1)).sum(-1, keepdim=True).neg_()
        grad_BGKLE = torch.cat([grad_BGKLE, less_BGKL1], -1)
        value_BGSE = pad(value_BGSE, (0, 1), value=1.0)
    query = feature_products(grad_BGKLE, value_BGSE, key_BGSF, offsets)
    return query, transposed_feature_sums(value_BGSE, grad_BGKLE, query_BGKLF, offsets), gradient
