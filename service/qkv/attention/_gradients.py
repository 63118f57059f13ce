"""Gradients: what the variants' `backward` share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qkv.attention._scores import Scores, largest, raised
from qkv.attention._visibility import row_blocks

__all__ = ["by_scores", "is_ordinary", "regrown", "sized"]

_SCORE_ELEMENTS = 1 << 20  # of a block's scores, of which there are five: 4 MiB each in float32
_SAFE = 1e30  # sizes, in float32, that products and sums may grow to
_ORDINARY = 1e20  # a few factors up to it, and their sums, stay far inside float64's range
_MOST_EXPONENT = 2000  # past it all but 0 over- or underflows


def sized(x: Tensor) -> tuple[Tensor, int]:
    """x / 2**e and e: 0, unless x, in float64, is so large or small that products may leave the
    range; then what makes its largest about 1."""
    size = largest(x)
    if not (size > _ORDINARY or 0 < size < 1 / _ORDINARY):
        return x, 0
    exponent = math.frexp(size)[1]
    return regrown(x, -exponent), exponent


def regrown(x: Tensor, exponents: Tensor | int) -> Tensor:
    """x * 2**exponents."""
    if isinstance(exponents, int):
        if exponents == 0:
            return x
        exponents = torch.tensor(exponents, device=x.device)
    return raised(x, exponents.clamp(-_MOST_EXPONENT, _MOST_EXPONENT))


def is_ordinary(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor], scale: float, dropout: float
) -> bool:
    """Whether the gradients by scores of (grad_output, query, key, value) overflow nowhere in
    float32, nor vanish on the way for being small."""
    grad, query, key, value = map(largest, tensors)
    H, L, E = tensors[0].shape[1:]
    if 0 < grad * value < 1 / _SAFE:
        return False
    summed = grad * max(1.0, value * E) * H * L / (1 - dropout)
    return summed < _SAFE and 2 * summed * max(query, key) * abs(scale) < _SAFE


def by_scores(
    scores: Scores, grad_BHLE: Tensor, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSE: Tensor
) -> dict[str, Tensor]:
    """Gradients of exact attention, a block of rows at a time, all in the scores' dtype.

    query and key are what the scores are made of, but for powers of two.
    """
    (B, H, L, _), (_, G, S, _) = query_BHLD.shape, key_BGSD.shape
    query_BGKLD, grad_BGKLE = (x.unflatten(1, (G, -1)) for x in (query_BHLD, grad_BHLE))
    query, key, value = (torch.zeros_like(x) for x in (query_BGKLD, key_BGSD, value_BGSE))
    mask = scores.visible.mask_BHLS
    if mask is not None:
        mask = torch.zeros_like(mask, dtype=grad_BHLE.dtype) if mask.is_floating_point() else None
    for rows in row_blocks(L, B * H * S, _SCORE_ELEMENTS):
        block, grad = scores.block(rows), grad_BGKLE[:, :, :, rows]
        keys = block.keys
        weights = block.weights.unflatten(1, (G, -1))
        value[:, :, keys] += torch.einsum("bgkls,bgkle->bgse", weights, grad)
        slope = torch.einsum("bgkle,bgse->bgkls", grad, value_BGSE[:, :, keys]).flatten(1, 2)
        if block.kept is not None:
            slope.mul_(block.kept).div_(1.0 - scores.dropout)
        slope.sub_((slope * block.shares).sum(-1, keepdim=True)).mul_(block.shares)
        if mask is not None:
            _add(mask, slope, rows, keys)
        if (capped := scores.slopes(rows)) is not None:
            slope *= capped
        slope_BGKRS = slope.mul_(scores.scale).unflatten(1, (G, -1))
        query[:, :, :, rows] = torch.einsum("bgkls,bgsd->bgkld", slope_BGKRS, key_BGSD[:, :, keys])
        key[:, :, keys] += torch.einsum(
            "bgkls,bgkld->bgsd", slope_BGKRS, query_BGKLD[:, :, :, rows]
        )
    made = {"query": query.flatten(1, 2), "key": key, "value": value}
    return made if mask is None else made | {"mask": mask}


def _add(mask_BHLS: Tensor, slope_BHRS: Tensor, rows: slice, keys: slice) -> None:
    """Adds a block to a mask's gradient, summed over the mask's axes of size 1."""
    part = mask_BHLS[:, :, rows] if mask_BHLS.shape[2] > 1 else mask_BHLS
    part = part[..., keys] if part.shape[3] > 1 else part
    part += slope_BHRS.sum_to_size(part.shape)
