"""The feature map of `linear`, elu(x) + 1, and its inverse: other features as its inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def compute(x: Tensor) -> Tensor:
    """Returns elu(x) + 1, without the rounding of 1 below 0."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def invert(features: Tensor) -> Tensor:
    """Returns the numbers with these features, which are positive."""
    return torch.where(features > 1, features - 1, features.log())
