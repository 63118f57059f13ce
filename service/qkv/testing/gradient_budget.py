"""Error budgets of the gradients of softmax attention, for each number.

The steps are those of Dao et al., FlashAttention, arXiv:2205.14135, appendix B.2: dV = P^T dO,
dP = dO V^T, delta = rowsum(dO O), dS = P (dP - delta), dQ = scale dS K, dK = scale dS^T Q. `budget`
has the roundings. A right function may also round P, dP, dS and the O of delta to the dtype of the
inputs, and the gradients of each query head before it adds those of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.testing.budget import (
    gamma,
    output_budget,
    score_error,
    smallest,
    unit_roundoffs,
    weight_error,
)
from qkv.testing.plain_softmax import Evaluation


def gradient_budgets(
    steps: Evaluation, grad: Tensor, dtype: torch.dtype, key_heads: int, u: float | None = None
) -> dict[str, Tensor]:
    """Returns the budget of each number of the gradients of `query`, `key` and `value`.

    Args:
        steps: of the call in float64.
        grad: gradient of the output, float64 (B, H, L, E).
        dtype: of the inputs and the gradients.
        key_heads: G, the heads of key and value.
        u: unit roundoff of the sums; None: that of float32, or of float64 for float64 inputs.
    """
    u, t = (unit_roundoffs(dtype)[0] if u is None else u), unit_roundoffs(dtype)[1]
    (_, H, L, E), S, p = steps.output.shape, steps.key.shape[2], steps.weights
    group = H // key_heads
    # products of bfloat16 flush numbers below the smallest normal float32 to 0 on some processors
    least = smallest(dtype) + torch.finfo(torch.float32).smallest_normal
    if dtype == torch.float64:
        least = torch.finfo(dtype).smallest_normal
    p_error = weight_error(steps, dtype, u) + t * p + least * steps.visible

    dP = grad @ steps.value.mT
    dP_size = grad.abs() @ steps.value.abs().mT
    dP_error = (gamma(E, u) + t) * dP_size + least
    delta = (grad * steps.output).sum(-1, keepdim=True)
    delta_size = (grad.abs() * (p @ steps.value.abs())).sum(-1, keepdim=True)
    output_error = output_budget(steps, dtype, u)
    delta_error = (
        (grad.abs() * output_error).sum(-1, keepdim=True)
        + (p * dP_error).sum(-1, keepdim=True)
        + (gamma(S + E, u) + 2 * t) * delta_size
    )

    dS = p * (dP - delta)
    spread = (dP - delta).abs()
    dS_error = (
        p_error * (spread + dP_error + delta_error)
        + p * (dP_error + delta_error + 4 * u * (dP.abs() + delta.abs()))
        + t * dS.abs()
        + least * steps.visible
    )
    if steps.softcap is not None:
        dS, dS_error = _through_cap(steps, dS, dS_error, dtype, u)
    scale, size = abs(steps.scale), dS.abs()
    wide = dS_error + size * (gamma(max(S, L * group) + 8, u) + 2 * t)
    dQ = scale * (wide @ steps.key.abs())
    dK = scale * (wide.mT @ steps.query.abs())
    dV = (p_error + p * (gamma(L * group + 8, u) + 2 * t)).mT @ grad.abs()
    finite = {"query": dQ, "key": _sum_groups(dK, group), "value": _sum_groups(dV, group)}
    exact = {
        "query": steps.scale * (dS @ steps.key),
        "key": _sum_groups(steps.scale * (dS.mT @ steps.query), group),
        "value": _sum_groups(p.mT @ grad, group),
    }
    return {n: x + 2 * t * exact[n].abs() + (L * group + S) * least for n, x in finite.items()}


def _through_cap(
    steps: Evaluation, dS: Tensor, dS_error: Tensor, dtype: torch.dtype, u: float
) -> tuple[Tensor, Tensor]:
    """Returns gradients before the cap and their errors: the slope is 1 - (score / cap)^2."""
    assert steps.softcap is not None
    share = (steps.products / steps.softcap).tanh()
    slope = 1 - share**2
    slope_error = 2 * (score_error(steps, dtype, u) / steps.softcap).clamp(max=1) + 4 * u
    slope_error = torch.minimum(slope_error, torch.ones_like(slope))
    return dS * slope, dS_error * (slope + slope_error) + dS.abs() * slope_error


def _sum_groups(per_head: Tensor, group: int) -> Tensor:
    """Returns the sums over the query heads that read the same key head."""
    summed: Tensor = per_head.unflatten(1, (-1, group)).sum(2)
    return summed
