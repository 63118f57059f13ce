"""Multiplication by powers of two, which is exact and keeps numbers within the range of float64."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_SIZE: Final = (
    480  # a row's largest becomes 2**480: products do not overflow, and tiny numbers survive
)

ROOM: Final = 900
"""Scores up to 2**900 leave room for any mask of float32's range, and for sums."""


def split_exponents(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x / 2**e and e, exactly. The e of each row makes its largest about 2**_SIZE."""
    exponents = torch.frexp(x.abs().amax(dim=-1, keepdim=True)).exponent - _SIZE
    return times_power_of_2(x, -exponents), exponents


def times_power_of_2(x: Tensor, exponents: Tensor | None) -> Tensor:
    """Returns x * 2**exponents, or x itself for None.

    It multiplies twice, because 2.0**1024 is not a float.
    """
    if exponents is None:
        return x
    # beyond these bounds a normal number becomes inf or 0 anyway, and 0 stays 0
    x, exponents = torch.broadcast_tensors(x, exponents.clamp(-2100, 2046))
    half = exponents // 2
    return torch.ldexp(torch.ldexp(x, half), exponents - half)
