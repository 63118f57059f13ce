"""Recognizes sums in float16 or bfloat16 by their errors.

Such sums do not have one result: it depends on the order and on the blocks. Their errors have a
bound, the budget with the unit roundoff of the narrow dtype, and a usual size. On normal inputs, n
roundings cause errors of about sqrt(n) t (Higham and Mary, A new approach to probabilistic rounding
error analysis, SIAM J. Sci. Comput. 41, 2019), so the root of their mean square is small too.

A function that is wrong in another way may stay below that bound, so each call has to show the
roundings: what remains of the errors of a row without a multiple of the row is at least as large
as the roundings of a sum and of the output make it. Zeros, half of the output, or right results of
short calls leave nothing, or the one rounding of the output.
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

_NARROW: Final = (torch.float16, torch.bfloat16)
_SPREAD: Final = 50  # random errors of narrow sums have a maximum of about 10 medians
_STALLED: Final = 0.5  # terms times roundoff: a new term is about as large as a rounding
_LEAST: Final = 1e-3  # smaller outputs may be 0 in float16: their error is a multiple of them
_ENOUGH: Final = 256  # numbers whose root mean square is known within a tenth
_TWICE: Final = 1.2  # two roundings cause 1.41 of one; weights that are rounded too, at most 1.25


def sums_are_narrow(observations: Sequence[Observation]) -> bool:
    """True if all errors are those that sums in float16 or bfloat16 cause.

    The errors of all results of softmax are compared with those of narrow sums: of the output on
    each call, and their root mean square on calls with normal inputs. A function may use another
    dtype for each dtype of its inputs, or be right in some.
    """
    if any(not has_derivation(o.call) for o in observations):
        return False
    failed = {o.call.dtype for o in observations if o.has_failed}
    return all(
        _are_narrow([o for o in observations if o.call.dtype == dtype], dtype) for dtype in failed
    )


def _are_narrow(observations: Sequence[Observation], dtype: torch.dtype) -> bool:
    """True if the errors of calls in one dtype are those of sums in a dtype as narrow or more."""
    longest = [o for o in _longest(observations) if _output_units(o) > 1]
    for narrow in _NARROW:
        t = unit_roundoffs(narrow)[1]
        if t < unit_roundoffs(dtype)[1] or not any(_is_coarse(o, narrow) for o in longest):
            continue
        shown = [_shows_roundings(o, narrow) for o in observations]
        if True in shown and False not in shown and all(_fits(o, t) for o in observations):
            return True
    return False


def _output_units(observation: Observation) -> float:
    truth, output = observation.truth, observation.results["output"]
    return float(error_units(output, truth.results["output"], truth.budgets["output"]).max())


def _longest(observations: Sequence[Observation]) -> list[Observation]:
    """Returns the observations with the longest sums: errors of narrow sums are largest there."""
    sizes = [(o.call.score_shape[3], o.call.inputs["query"].shape[-1]) for o in observations]
    S, D = (max(axis) for axis in zip(*sizes, strict=True))
    return [o for o, (s, d) in zip(observations, sizes, strict=True) if s == S or d == D]


def _is_coarse(observation: Observation, narrow: torch.dtype) -> bool:
    """True if errors are larger than right functions of narrow inputs have, and in all numbers.

    Inputs, weights or outputs that are rounded to the narrow dtype or to TF32 cause no such errors.
    A bug in one row or block leaves most numbers right, so that their median error is small.
    """
    exact = observation.truth.results["output"]
    error = (observation.results["output"].double() - exact).abs()
    units = error / output_budget(evaluate(observation.call), narrow)
    return bool(units.max() > 1) and bool(units.median() > units.max() / _SPREAD)


def _shows_roundings(observation: Observation, narrow: torch.dtype) -> bool | None:
    """True if errors beside a multiple of each row are as large as sums in a narrow dtype cause.

    None if the call cannot tell: its rounding errors add up, or most of its rows have one key with
    most of the weight.
    """
    exact = observation.truth.results["output"]
    mixed = evaluate(observation.call).weights.amax(-1) < 0.5
    if _is_biased(observation) or float(exact.abs().max()) < _LEAST:
        return None
    if int(mixed.sum()) * exact.shape[-1] < _ENOUGH:
        return None
    error = observation.results["output"].double() - exact
    rounding = exact.to(narrow).double() - exact
    size, once = (float(_beside(e, exact)[mixed].square().mean().sqrt()) for e in (error, rounding))
    # the output of wider inputs may be a quotient in float32: the sum is its only rounding
    return size >= (_TWICE if narrow == observation.call.dtype else 0.5) * once


def _beside(error: Tensor, exact: Tensor) -> Tensor:
    """Returns the errors of each row without the multiple of the row that is nearest to them."""
    row = exact / exact.abs().amax(-1, keepdim=True).clamp(min=1e-300)
    along = (error * row).sum(-1, keepdim=True) / row.square().sum(-1, keepdim=True).clamp(min=1)
    return error - along * row


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
    if _is_biased(observation):  # equal terms are summed up to 1/t of them before a sum stops
        return not bool((output < exact / (4 + 4 * terms * t) - lost).any())
    # a sum of weights that stops to grow makes all errors of a row alike
    if not bool(share.max() > _STALLED) and _follows(output - exact, exact):
        return False
    D = steps.query.shape[-1]
    usual = 2 * t * _summed(steps, t).sqrt() + _score_share(steps, t) / math.sqrt(D)
    typical = usual * mass + lost
    error = _beside(output - exact, exact).abs() - observation.truth.budgets["output"]
    root = float(error.clamp(min=0).square().mean().sqrt())
    is_usual = root <= float(typical.square().mean().sqrt())
    return is_usual and not bool((error > 4 * typical).any())


def _summed(steps: Evaluation, t: float) -> Tensor:
    """Returns the number of terms of each row that are large enough to change a sum."""
    least = t * steps.weights.amax(-1, keepdim=True).clamp(min=1e-300)
    return (steps.weights / least).clamp(max=1.0).sum(-1, keepdim=True)


def _follows(error: Tensor, exact: Tensor) -> bool:
    """True if errors are like a multiple of the output, by eight standard deviations.

    Rounding errors have random signs: their cosine with the output is about 1 / sqrt(rows), since
    the numbers of a row share the rounding of the row's sum. Weights that are lost beside a large
    one cause up to five deviations, on the family `steep`.
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
    """Returns the largest relative change of a row by scores that are summed narrowly.

    A score moves its own weight against those of the others, so that a row of one key stays.
    """
    size = abs(steps.scale) * (steps.query.abs() @ steps.key.abs().mT)
    moved = (size * (steps.query.shape[-1] + 2) * t).clamp(max=1).expm1()
    weights = steps.weights
    if steps.is_normalized:
        weights = torch.minimum(weights, 2 * weights * (1 - weights))
    return (weights * moved).sum(-1, keepdim=True)


def _is_biased(observation: Observation) -> bool:
    """True if all inputs of a dtype are positive: rounding errors of their sums add up."""
    floats = [x for x in observation.call.inputs.values() if x.is_floating_point()]
    return all(bool((x > 0).all()) for x in floats)
