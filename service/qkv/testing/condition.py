"""Error budgets of variants without a derivation of their own, from their condition.

The reference runs in float64 on inputs that move by d = 2 t + (D + 8) u in random directions, with
u and t of `budget`: t is counted for dtypes narrower than the sums. By first order, the change is
d sum_k s_k J_k x_k with random signs s_k, whose mean square is d^2 sum_k (J_k x_k)^2. The largest
change over all signs is d sum_k |J_k x_k|, at most sqrt(n) times the root of the mean square, for
n numbers (Cauchy-Schwarz). The roundings of sums, weights and output are added as in `budget`.

The bound is wider than the derived one of softmax: sqrt(n) is about 20 at the usual sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from qkv.testing.budget import gamma, smallest, unit_roundoffs
from qkv.testing.call import Call

__all__ = ["conditioned_budgets", "reference_gradients", "reference_result"]

_PATTERNS = 8  # random directions


def reference_result(call: Call) -> Any:
    """Returns the outputs of the variant's float64 reference."""
    with np.errstate(over="ignore", invalid="ignore"), torch.no_grad():
        return call.variant.reference(**call.arguments)


def reference_gradients(call: Call) -> dict[str, Tensor]:
    """Returns the gradients of the variant in float64, by input name; none without a gradient."""
    if call.grad_output is None or call.variant.backward is None:
        return {}
    gradients = call.variant.backward(call.grad_output.double(), **call.arguments)
    return {n: x.double() for n, x in gradients.items() if n in call.positional}


def conditioned_budgets(
    call: Call, result: Any, gradients: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the budgets of the output and of each gradient.

    Args:
        call: the call.
        result: of `reference_result`.
        gradients: of `reference_gradients`.
    """
    u, t = unit_roundoffs(call.dtype)
    narrow = t if t > u else 0.0
    sizes = call.axis_sizes
    terms = sum(sizes.get(x, 0) for x in "LSIDE")
    step = 2 * narrow + (sizes.get("D", sizes.get("I", 1)) + 8) * u
    roundings = gamma(2 * terms + 64, u) + 2 * narrow + t
    mass = _mass(call, result)
    least = smallest(call.dtype) + torch.finfo(torch.float32).smallest_normal
    if call.dtype == torch.float64:
        least = torch.finfo(torch.float64).smallest_normal
    changes = _root_mean_square(call, step, lambda c: {"": reference_result(c).output})
    n = math.sqrt(_number_count(call, sizes))
    output = n * changes[""] + roundings * (mass + result.output.abs()) + terms * least
    if not gradients:
        return output, {}
    changes = _root_mean_square(call, step, reference_gradients)
    budgets = {}
    for name, gradient in gradients.items():
        plane = tuple(range(max(0, gradient.ndim - 2), gradient.ndim))
        largest = gradient.abs().amax(plane, keepdim=True)
        budgets[name] = n * changes[name] + 2 * roundings * largest + terms * least
    return output, budgets


def _number_count(call: Call, sizes: dict[str, int]) -> int:
    """Returns the numbers of the inputs on which a row of one head depends, at least."""
    specs = (call.variant.inputs[n] for n in call.inputs if call.inputs[n].is_floating_point())
    return sum(
        math.prod(sizes.get(x, 1) for x in spec.letters if x not in "BHGL") for spec in specs
    )


def _mass(call: Call, result: Any) -> Tensor:
    """Returns sum_j |A_j v_j| of each number of the output."""
    A, value = getattr(result, "weights", None), getattr(result, "value", None)
    if A is None:
        return torch.full_like(result.output, float(result.output.abs().max()))
    if value is None:
        value = call.exact_inputs["value"]
        value = value.repeat_interleave(A.shape[1] // value.shape[1], 1)
    rows = A if A.ndim == value.ndim else A[:, None]
    mass: Tensor = (rows.abs() @ value.abs()).view(result.output.shape)
    return mass


def _root_mean_square(
    call: Call, step: float, compute: Callable[[Call], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Returns the root of the mean square of the changes, if the inputs move by `step`."""
    generator = Generator().manual_seed(0)
    exact = replace(call, inputs=call.exact_inputs)
    before = compute(exact)
    squares = {n: torch.zeros_like(x) for n, x in before.items()}
    # a step below the rounding of float64 would be lost in that of the reference
    used = max(step, 1e-9)
    for _ in range(_PATTERNS):
        moved = {n: _move(x, used, generator) for n, x in exact.inputs.items()}
        after = compute(replace(exact, inputs=moved))
        for name, x in after.items():
            squares[name] += ((x - before[name]) * (step / used)).nan_to_num(0.0) ** 2
    return {n: (x / _PATTERNS).sqrt() for n, x in squares.items()}


def _move(x: Tensor, step: float, generator: Generator) -> Tensor:
    if not x.is_floating_point():
        return x
    signs = torch.randint(0, 2, x.shape, generator=generator).double() * 2 - 1
    return x * (1 + step * signs)
