"""QK-norm: the root mean square norm of queries and keys, after their projection.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467, equation 4;
transformers, models/qwen3/modeling_qwen3.py, Qwen3RMSNorm.
"""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from torch import Tensor


class QKNorm(pydantic.BaseModel):
    """Numbers of the norm of queries and keys that are not among the layer's tensors."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    eps: Annotated[
        float, pydantic.Field(ge=0, le=1, description="Added to the mean of the squares.")
    ] = 1e-6
    offset: Annotated[
        Literal[0, 1],
        pydantic.Field(description="Added to the weight: 1 in Gemma's models."),
    ] = 0


def normalize(x_BHND: Tensor, weight: Tensor, norm: QKNorm) -> Tensor:
    """Returns x / rms(x) * weight, computed in float32 or wider.

    Args:
        x_BHND: queries or keys, split into heads.
        weight: (D), or (H * D) for a norm over all heads together.
        norm: its numbers.
    """
    merged, weight = _with_norm_axis_last(x_BHND, weight)
    inverse, scaled, _ = _parts(merged, norm)
    return _split(scaled * inverse * (weight.to(scaled.dtype) + norm.offset), x_BHND).to(
        x_BHND.dtype
    )


def normalize_back(
    grad_BHND: Tensor, x_BHND: Tensor, weight: Tensor, norm: QKNorm
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x (B, H, N, D) and of the weight.

    With y = x r w and r = 1 / rms(x): dx = r g w - x r^3 mean(g w x), dw = sum of g x r.
    """
    x, flat = _with_norm_axis_last(x_BHND.to(grad_BHND.dtype), weight)
    grad, _ = _with_norm_axis_last(grad_BHND, weight)
    inverse, scaled, size = _parts(x, norm)
    unit = scaled * inverse
    weighted = grad * (flat.to(grad.dtype) + norm.offset)
    x_grad = (weighted - unit * (weighted * unit).mean(-1, keepdim=True)) * inverse / size
    weight_grad = (grad * unit).flatten(0, -2).sum(0)
    return _split(x_grad, x_BHND), weight_grad


def _parts(x: Tensor, norm: QKNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Returns 1 / rms(x / s), x / s, and s, the largest size: squares do not overflow."""
    x = x if x.element_size() > 2 else x.float()
    size = x.abs().amax(-1, keepdim=True).clamp_min(1)
    scaled = x / size
    inverse = (scaled.square().mean(-1, keepdim=True) + norm.eps / size.square()).rsqrt()
    return inverse, scaled, size


def _with_norm_axis_last(x_BHND: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x with the axis of the norm last: D, or all heads' channels side by side."""
    if weight.shape[-1] == x_BHND.shape[-1]:
        return x_BHND, weight
    return x_BHND.transpose(1, 2).flatten(2), weight


def _split(x: Tensor, like_BHND: Tensor) -> Tensor:
    if x.dim() == like_BHND.dim():
        return x
    split_BHND: Tensor = x.unflatten(-1, (like_BHND.shape[1], -1)).transpose(1, 2)
    return split_BHND.contiguous()
