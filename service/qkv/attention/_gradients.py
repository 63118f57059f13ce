"""Gradients: what the variants' `backward` share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qkv.attention._scores import largest, raised

__all__ = ["regrown", "sized"]

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
