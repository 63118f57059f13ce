"""Error budgets: the error against float64 that a right function may have, for each number.

A budget follows from the numbers of the call, not from measured errors of functions.
docs/accuracy.md derives it, section "The budget of the oracle": its steps and symbols are those of
the functions here, its sources Higham, Accuracy and Stability of Numerical Algorithms, 2002, and
Blanchard, Higham, Higham, Accurately computing the log-sum-exp and softmax functions, IMA J.
Numer. Anal. 41, 2021.

`gradient_budget` has the bounds of the backward pass, with the same steps. `condition` has a
budget for any other variant.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from qkv.testing.plain_softmax import Evaluation

_NUMBERS: Final = 1 << 16
"""The most differences in memory at once; each column of the values has (B, H, L, S) of them."""


def unit_roundoffs(dtype: torch.dtype) -> tuple[float, float]:
    """Returns the unit roundoff of the sums, and that of the dtype."""
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.finfo(sums).eps / 2, torch.finfo(dtype).eps / 2


def gamma(n: int | Tensor, u: float) -> Tensor:
    """Returns the bound of the relative error of n roundings; infinite if n u is 1 or more."""
    product = torch.as_tensor(n, dtype=torch.float64) * u
    return torch.where(product < 1, product / (1 - product.clamp(max=0.999999)), torch.inf)


def smallest(dtype: torch.dtype) -> float:
    """Returns the smallest positive number of a dtype."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def score_error(
    steps: Evaluation, dtype: torch.dtype, u: float, changes: Tensor | None = None
) -> Tensor:
    """Returns the bound of the error of each score in the exponent, (B, H, L, S).

    Args:
        steps: of the call in float64.
        dtype: of the inputs.
        u: unit roundoff of the sums.
        changes: those of the running maximum, if they are known.
    """
    t = _narrow_roundoff(dtype)
    D = steps.query.shape[-1]
    size = abs(steps.scale) * (steps.query.abs() @ steps.key.abs().mT)
    error = size * (gamma(D + 6, u) + 2 * t)
    error = error + D * torch.finfo(torch.float32).smallest_normal
    if steps.softcap is not None:
        nearest = (steps.products.abs() - error).clamp(min=0) / steps.softcap
        error = error * (1 - nearest.tanh() ** 2) + 4 * u * steps.scores.nan_to_num(neginf=0).abs()
    scores = steps.scores.nan_to_num(neginf=0.0).abs()
    largest = scores.amax(-1, keepdim=True)
    changes = _maximum_changes(steps.scores) if changes is None else changes
    return error + 2 * u * (changes + 1) * largest + 40 * u


def output_budget(steps: Evaluation, dtype: torch.dtype, u: float | None = None) -> Tensor:
    """Returns the budget of each number of the output, (B, H, L, E).

    Args:
        steps: of the call in float64.
        dtype: of the inputs and of the output.
        u: unit roundoff of the sums; None: that of float32, or of float64 for float64 inputs.
    """
    u, t = (unit_roundoffs(dtype)[0] if u is None else u), unit_roundoffs(dtype)[1]
    changes = _maximum_changes(steps.scores)
    error = score_error(steps, dtype, u, changes)
    p, value, output = steps.weights, steps.value, steps.output
    mass = p @ value.abs()
    if steps.is_normalized:
        moved = _centred(steps, error)
    else:
        moved = (p * error.clamp(max=50).expm1()) @ value.abs()
    n = steps.visible.sum(-1, keepdim=True)
    sums = gamma(n + changes + 8, u) * (mass + output.abs())
    sums = sums + _sum_rounding(steps, u) * mass
    lost = smallest(dtype) + torch.finfo(torch.float32).smallest_normal
    underflow = lost * (steps.visible.double() @ value.abs()) + smallest(dtype) + n * lost
    if dtype == torch.float64:
        underflow = n * torch.finfo(dtype).smallest_normal * torch.ones_like(mass)
    narrow = _narrow_roundoff(dtype)
    return moved + sums + narrow * mass + t * output.abs() * (1 + t) + underflow


def weight_error(steps: Evaluation, dtype: torch.dtype, u: float) -> Tensor:
    """Returns the bound of the error of each weight, (B, H, L, S)."""
    changes = _maximum_changes(steps.scores)
    error = score_error(steps, dtype, u, changes).clamp(max=50)
    p = steps.weights
    least = (p * (-error).exp()).sum(-1, keepdim=True).clamp(min=1e-300)
    largest = (p * error.exp()).sum(-1, keepdim=True)
    moved = p * torch.maximum(
        error.exp() / least - 1, 1 - (-error).exp() / largest.clamp(min=1e-300)
    )
    n = steps.visible.sum(-1, keepdim=True)
    sums = (gamma(n + changes + 8, u) + _sum_rounding(steps, u)) * p
    tiny = torch.finfo(torch.float32).smallest_normal
    return torch.minimum(moved, torch.ones_like(p)) + sums + tiny * steps.visible


def _sum_rounding(steps: Evaluation, u: float) -> Tensor:
    """Returns the relative change of a row's weights by the rounding of its log-sum-exp."""
    largest = steps.scores.nan_to_num(neginf=0.0).abs().amax(-1, keepdim=True)
    n = steps.visible.sum(-1, keepdim=True).clamp(min=1)
    return 3 * u * (largest + n.log())


def _narrow_roundoff(dtype: torch.dtype) -> float:
    """Returns t, or 0 if the inputs are as wide as the sums: gamma then counts the rounding."""
    u, t = unit_roundoffs(dtype)
    return t if t > u else 0.0


def _maximum_changes(scores: Tensor) -> Tensor:
    """Returns the largest number of changes of a running maximum, (B, H, L, 1)."""

    def changes(ordered: Tensor) -> Tensor:
        top = ordered.cummax(-1).values
        return (top[..., 1:] > top[..., :-1]).sum(-1, keepdim=True)

    return torch.maximum(changes(scores), changes(scores.flip(-1))).double()


def _centred(steps: Evaluation, error: Tensor) -> Tensor:
    """Returns the bound of the change of a normalised average, if scores move by `error`."""
    p, error = steps.weights, error.clamp(max=50)
    least = (p * (-error).exp()).sum(-1, keepdim=True).clamp(min=1e-300)
    factor = (p * error.expm1() / least)[..., None]
    seen = steps.visible.double()[..., None, :]
    columns = max(1, _NUMBERS // factor.numel())
    moved = []
    for value, output in zip(
        steps.value.mT.contiguous()[:, :, None].split(columns, 3),
        steps.output.split(columns, 3),
        strict=True,
    ):
        distance = (value - output[..., None]).abs()
        farthest = (distance * seen).amax(-1)
        moved.append(torch.minimum((distance @ factor)[..., 0], farthest))
    return torch.cat(moved, -1)
