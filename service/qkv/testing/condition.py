"""Error budgets of variants without a derivation of their own, from their condition.

The reference runs in float64 on inputs that move by d = 2 t + (D + 8) u in random directions, with
u and t of `budget`: t is counted for dtypes narrower than the sums. Where projections mix the keys
before the scores, D + S takes the place of D. By first order, the change is d sum_k s_k J_k x_k
with random signs s_k, whose mean square is d^2 sum_k (J_k x_k)^2. The largest change over all signs
is d sum_k |J_k x_k|, at most sqrt(n) times the root of the mean square, for n numbers
(Cauchy-Schwarz).

The roundings of sums, weights and results are added as in `budget`. They are in proportion to the
size of the terms at each place: sum_j |A_j v_j| for the output, and `term_sizes` of autograd
through the reference for a gradient. Where terms cancel, its numbers are small and the sizes of
their terms are not. No variant's own `backward` is read: its roundings are judged here.

The bound is wider than the derived one of softmax: sqrt(n) is about 20 at the usual sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor

from qkv.testing import elu_features
from qkv.testing.budget import gamma, smallest, unit_roundoffs
from qkv.testing.call import Call
from qkv.testing.term_sizes import TermSizes

_PATTERNS = 8  # random directions


def reference_result(call: Call) -> Any:
    """Returns the outputs of the variant's float64 reference."""
    with torch.no_grad():
        return call.variant.reference(**call.arguments)


def reference_gradients(call: Call) -> dict[str, Tensor]:
    """Returns the gradients of the reference by input name; none without a gradient.

    They are autograd's, so that they share no rounding with the variant's own `backward`.
    """
    if call.grad_output is None or call.variant.backward is None:
        return {}
    inputs = call.exact_inputs
    leaves = {
        n: inputs[n].clone().requires_grad_()
        for n in call.positional
        if inputs[n].is_floating_point()
    }
    moved = call.to_arguments(leaves)
    with torch.enable_grad():
        output = call.variant.reference(**{**call.arguments, **moved}).output
        gradients = torch.autograd.grad(
            output, list(leaves.values()), call.grad_output.double(), materialize_grads=True
        )
    return dict(zip(leaves, gradients, strict=True))


@dataclass(frozen=True)
class _Roundings:
    """The relative errors that a right function of a call may have.

    Attributes:
        step: of each input: it may be rounded twice, and its products are summed.
        sums: of each result, in proportion to its terms.
        least: the absolute error of the terms of a result, by underflow.
    """

    step: float
    sums: float
    least: float

    @classmethod
    def of(cls, call: Call) -> _Roundings:
        """Returns the errors for the dtype and the sizes of a call."""
        u, t = unit_roundoffs(call.dtype)
        narrow = t if t > u else 0.0
        sizes = call.axis_sizes
        terms = sum(sizes.get(x, 0) for x in "LSIDE")
        # of a score: the channels, and the keys that a projection of length N mixes before
        products = sizes.get("D", sizes.get("I", 1)) + (sizes["S"] if "N" in sizes else 0)
        step = 2 * narrow + (products + 8) * u
        least = smallest(call.dtype) + torch.finfo(torch.float32).smallest_normal
        if call.dtype == torch.float64:
            least = torch.finfo(torch.float64).smallest_normal
        return cls(step, float(gamma(2 * terms + 64, u)) + 2 * narrow + t, terms * least)


def output_budget(call: Call, result: Any) -> Tensor:
    """Returns the budget of each number of the output.

    Args:
        call: the call.
        result: of `reference_result`.
    """
    roundings, n = _Roundings.of(call), math.sqrt(_number_count(call))
    changes = _root_mean_square(call, roundings.step, lambda c: {"": reference_result(c).output})
    size: Tensor = _mass(call, result) + result.output.abs()
    return n * changes[""] + roundings.sums * size + roundings.least


def gradient_budgets(call: Call) -> dict[str, Tensor]:
    """Returns the budget of each number of each gradient, by input name."""
    roundings, n = _Roundings.of(call), math.sqrt(_number_count(call))
    changes = _root_mean_square(call, roundings.step, reference_gradients)
    # in float64 the reference rounds as often as the function
    sums = 2 * roundings.sums * (2 if call.dtype == torch.float64 else 1)
    # two sums lie within each other: an underflow in the gradient of a row's sum moves each term of
    # the gradient of a query
    least = roundings.least * max(call.axis_sizes.get(x, 1) for x in "LSIB")
    with TermSizes(torch.finfo(call.dtype).smallest_normal) as sizes:
        gradients = reference_gradients(call)
    return {
        name: n * change + sums * (sizes.of(gradients[name]) + gradients[name].abs()) + least
        for name, change in changes.items()
    }


def _number_count(call: Call) -> int:
    """Returns the numbers of the inputs on which a row of one head depends, at least."""
    sizes = call.axis_sizes
    specs = (call.variant.tensors[n] for n in call.inputs if call.inputs[n].is_floating_point())
    return sum(
        math.prod(sizes.get(x, 1) for x in spec.letters if x not in "BHGJVL") for spec in specs
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
    changes = {n: torch.zeros_like(x) for n, x in before.items()}
    # a step below the rounding of float64 would be lost in that of the reference
    used = max(step, 1e-9)
    for _ in range(_PATTERNS):
        moved = {n: _move(call, n, x, used, generator) for n, x in exact.inputs.items()}
        after = compute(replace(exact, inputs=moved))
        for name, x in after.items():
            change = ((x - before[name]) * (step / used)).nan_to_num(0.0)
            changes[name] = changes[name].hypot(change)  # the square of a tiny number is 0
    return {n: x / math.sqrt(_PATTERNS) for n, x in changes.items()}


def _move(call: Call, name: str, x: Tensor, step: float, generator: Generator) -> Tensor:
    """Returns an input whose numbers move by a step, relative to their size.

    Features of `linear`, which are at most 1 below 0, move by a step of 1 there: a function may
    compute them as elu(x) + 1.
    """
    if not x.is_floating_point():
        return x
    signs = torch.randint(0, 2, x.shape, generator=generator).double() * 2 - 1
    moved = x * (1 + step * signs)
    if call.variant.name == "linear" and name in ("query", "key"):
        # the size: a feature that is smaller than the step may become 0, but has no logarithm then
        moved = elu_features.invert((elu_features.compute(moved) + step * signs).abs())
    return moved
