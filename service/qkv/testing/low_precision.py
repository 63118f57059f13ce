"""Recognizes sums in float16 or bfloat16 by the size of their errors.

Such sums do not have one result: it depends on the order and on the blocks. Their errors have a
bound, the budget with the unit roundoff of the narrow dtype, and a usual size. On normal inputs, n
roundings cause errors of about sqrt(n) t (Higham and Mary, A new approach to probabilistic rounding
error analysis, SIAM J. Sci. Comput. 41, 2019), so the root of their mean square is small too.

Rounding errors have random signs, other than those of a wrong factor: their cosine with the output
is about 1 / sqrt(rows), since the numbers of a row share the rounding of the row's sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from qkv.testing.budget import output_budget, smallest, unit_roundoffs
from qkv.testing.check import error_units
from qkv.testing.gradient_budget import gradient_budgets
from qkv.testing.observation import Observation
from qkv.testing.plain_softmax import Evaluation, evaluate
from qkv.testing.truth import has_derivation

__all__ = ["sums_are_narrow"]

_NARROW: Final = (torch.float16, torch.bfloat16)
_SPREAD: Final = 50  # random errors of narrow sums have a maximum of about 10 medians
_STALLED: Final = 0.5  # terms times roundoff: a new term is about as large as a rounding
_LEAST: Final = 1e-3  # smaller outputs may be 0 in float16: their error is a multiple of them


def sums_are_narrow(observations: Sequence[Observation]) -> bool:
    """True if every error is one that sums in float16 or bfloat16 cause.

    The errors of all results of softmax are compared with those of narrow sums: of the output on
    each call, and their root mean square on calls with normal inputs.
    """
    if any(not has_derivation(o.call) for o in observations):
        return False
    if not any(_output_units(o) > 1 and _is_coarse(o) for o in _longest(observations)):
        return False
    for observation in observations:
        dtype = observation.call.dtype
        narrow = [dtype] if dtype in _NARROW else list(_NARROW)
        if not any(_fits(observation, unit_roundoffs(d)[1]) for d in narrow):
            return False
    return True


def _output_units(observation: Observation) -> float:
    truth, output = observation.truth, observation.results["output"]
    return float(error_units(output, truth.results["output"], truth.budgets["output"]).max())


def _longest(observations: Sequence[Observation]) -> list[Observation]:
    """Returns the observations with the longest sums: errors of narrow sums are largest there."""
    sizes = [(o.call.score_shape[3], o.call.inputs["query"].shape[-1]) for o in observations]
    S, D = (max(axis) for axis in zip(*sizes, strict=True))
    return [o for o, (s, d) in zip(observations, sizes, strict=True) if s == S or d == D]


def _is_coarse(observation: Observation) -> bool:
    """True if errors are larger than right functions of float16 inputs have, and in all numbers.

    Inputs, weights or outputs that are rounded to float16 or TF32 cause no such errors. A bug in
    one row or block leaves most numbers right, so that their median error is small.
    """
    exact = observation.truth.results["output"]
    error = (observation.results["output"].double() - exact).abs()
    units = error / output_budget(evaluate(observation.call), torch.float16)
    return bool(units.max() > 1) and bool(units.median() > units.max() / _SPREAD)


def _fits(observation: Observation, t: float) -> bool:
    """True if the output and its gradients differ by no more than sums with roundoff t cause."""
    steps = evaluate(observation.call)
    output, exact = observation.results["output"].double(), observation.truth.results["output"]
    if not bool(output.isfinite().all()) or not _gradients_fit(observation, steps, t):
        return False
    error = (output - exact).abs() - observation.truth.budgets["output"]
    mass = steps.weights @ steps.value.abs()
    terms = steps.visible.sum(-1, keepdim=True).double()
    # in a sum that stops to grow, nearly all terms are lost
    share = (terms * t).clamp(max=1.0)
    allowed = share * (mass + exact.abs()) + _score_share(steps, t) * mass
    # underflow of float16
    lost = smallest(torch.float16) * (terms + steps.value.abs().sum(2, keepdim=True))
    if bool((error > allowed + lost).any()):
        return False
    # a sum that stops to grow makes all errors of a row alike
    if _is_biased(observation) or bool(share.max() > _STALLED):
        return True
    if _follows(output - exact, exact):
        return False
    D = steps.query.shape[-1]
    usual = 4 * t * (terms + D).sqrt() + _score_share(steps, t) / math.sqrt(D)
    typical = usual * mass + lost
    root = float(error.clamp(min=0).square().mean().sqrt())
    is_usual = root <= float(typical.square().mean().sqrt())
    return is_usual and not bool((error > 4 * typical).any())


def _follows(error: Tensor, exact: Tensor) -> bool:
    """True if errors are like a multiple of the output, by eight standard deviations.

    Weights that are lost beside a large one cause up to five, on the family `steep`.
    """
    if float(exact.abs().max()) < _LEAST:
        return False
    rows = exact[..., 0].numel()
    size = float(error.norm() * exact.norm())
    return size > 0 and abs(float((error * exact).sum())) / size > 8 / math.sqrt(rows)


def _gradients_fit(observation: Observation, steps: Evaluation, t: float) -> bool:
    """True if the gradients are within the budget of sums with roundoff t."""
    call, results = observation.call, observation.results
    names = [n for n in results if n != "output"]
    if not names or call.grad_output is None:
        return True
    grad, heads = call.grad_output.double(), call.inputs["key"].shape[1]
    budgets = gradient_budgets(steps, grad, call.dtype, heads, t)
    exact = observation.truth.results
    for name in names:
        allowed = budgets[name.removeprefix("grad ")].nan_to_num(nan=torch.inf)  # 0 times infinity
        if float(error_units(results[name], exact[name], allowed).max()) > 1:
            return False
    return True


def _score_share(steps: Evaluation, t: float) -> Tensor:
    """Returns the largest relative change of a row's weights by scores that are summed narrowly."""
    size = abs(steps.scale) * (steps.query.abs() @ steps.key.abs().mT)
    moved = (size * (steps.query.shape[-1] + 2) * t).clamp(max=1)
    return (steps.weights * moved.expm1()).sum(-1, keepdim=True)


def _is_biased(observation: Observation) -> bool:
    """True if all inputs of a dtype are positive: rounding errors of their sums add up."""
    floats = [x for x in observation.call.inputs.values() if x.is_floating_point()]
    return all(bool((x > 0).all()) for x in floats)
