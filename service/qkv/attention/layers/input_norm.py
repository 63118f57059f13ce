"""The norm of a model in front of its attention, which a loaded layer may apply to x.

Sources: Ba et al., Layer Normalization, arXiv:1607.06450, equation 3; Zhang and Sennrich, Root Mean
Square Layer Normalization, arXiv:1910.07467, equation 4. A layer norm is the root mean square norm
of x without its mean, plus a bias.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from qkv.attention.layers import qk_norm
from qkv.attention.layers.qk_norm import QKNorm

NORM_WEIGHT: Final = "input_norm.weight"
"""The name of the norm's weight (M) among the weights of a layer."""
NORM_BIAS: Final = "input_norm.bias"
"""The name of its bias (M), which may be absent."""


class InputNorm(NamedTuple):
    """Numbers of a norm.

    Attributes:
        numbers: eps, and what is added to the weight.
        is_centered: True for a layer norm, which subtracts the mean.
    """

    numbers: QKNorm
    is_centered: bool


def normalize(x_BNM: Tensor, norm: InputNorm, weight_M: Tensor, bias_M: Tensor | None) -> Tensor:
    """Returns the norm of x, computed in float32 or wider, in the dtype of x."""
    dtype = torch.promote_types(x_BNM.dtype, torch.float32)
    normal_BNM = qk_norm.normalize(_entered(x_BNM.to(dtype), norm), weight_M, norm.numbers)
    if bias_M is not None:
        normal_BNM = normal_BNM + bias_M.to(dtype)
    return normal_BNM.to(x_BNM.dtype)


def normalize_back(grad_BNM: Tensor, x_BNM: Tensor, norm: InputNorm, weight_M: Tensor) -> Tensor:
    """Returns the gradient of x.

    The mean of x is a projection, so that its transpose is the same.
    """
    entered_BNM = _entered(x_BNM.to(grad_BNM.dtype), norm)
    x_grad, _ = qk_norm.normalize_back(grad_BNM, entered_BNM, weight_M, norm.numbers)
    return _entered(x_grad, norm)


def _entered(x_BNM: Tensor, norm: InputNorm) -> Tensor:
    return x_BNM - x_BNM.mean(-1, keepdim=True) if norm.is_centered else x_BNM
