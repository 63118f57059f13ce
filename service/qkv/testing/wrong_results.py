"""Results of wrong variants: outputs, states and gradients of a call with bugs, and budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from qkv.errors import QkvError
from qkv.testing import condition, recurrence, recurrence_budget
from qkv.testing.budget import output_budget
from qkv.testing.call import Call, Change
from qkv.testing.check import error_units
from qkv.testing.condition import reference_result
from qkv.testing.known_bugs import OUTPUT_FLAGS
from qkv.testing.plain_softmax import OVERFLOW, evaluate
from qkv.testing.truth import has_derivation

_COLUMNS: Final = 4
_OVERFLOWED: Final = 1e4  # of an output whose state has overflowed, in float16 at least


class WrongResult:
    """The output of a wrong variant, and its state; their budgets are computed only on request."""

    def __init__(self, call: Call) -> None:
        """Computes the output, and the state of a recurrence.

        Args:
            call: with the changes of the bugs.

        Raises:
            QkvError: the changes make no valid call.
            RuntimeError: the changes make shapes that do not fit.
            ValueError: the same, from numpy.
        """
        self.call = call
        self._rearrange = [OUTPUT_FLAGS[f] for f in call.flags if f in OUTPUT_FLAGS]
        self._result = None
        self._states: dict[str, Tensor] = {}
        if has_derivation(call):
            self._steps = evaluate(call)
            output = self._steps.output
        elif call.is_recurrence:
            self._states = recurrence.evaluate(call)
            output = self._states.pop("output")
        else:
            if call.flags - OUTPUT_FLAGS.keys():
                raise QkvError(f"{call.variant.name} has no formula for {sorted(call.flags)}")
            self._result = reference_result(call)
            output = self._result.output
        self.output = self._arranged(output)

    def distance(self, results: Mapping[str, Tensor]) -> float:
        """Returns the largest distance of a function's output and state, in units of the budget.

        It is infinite for another shape or an output that is far away: the budget is computed only
        for outputs that are near. Numbers without a definite result do not count.
        """
        states = {n: x for n, x in self._states.items() if n in results}
        if not (self._states and bool(self._is_held().all())):
            states = {}
        if any(_is_another(results[n], x) for n, x in states.items()):
            return torch.inf
        distance = self._output_distance(results["output"])
        if distance > 1 or not states:
            return distance
        units = (error_units(results[n], x, self.budgets[n]) for n, x in states.items())
        return max(distance, *(float(x.max()) for x in units))

    def _output_distance(self, output: Tensor) -> float:
        """Returns the largest distance of a function's output."""
        if self.output.shape != output.shape:
            return torch.inf
        known = torch.ones_like(output, dtype=torch.bool)
        if self.call.flags & {"no-max", "no-sum-no-max"}:
            known = self._arranged(self._is_definite())
            # an overflow gives NaN or infinity, by the order of sum and quotient
            known = known & (output.isfinite() | self.output.isfinite())
        elif self._states:
            held = self._is_held()
            if bool((_largest(output)[~held] < _OVERFLOWED).any()):
                return torch.inf
            known = held.expand_as(output)
        if not torch.equal(output.isfinite() | ~known, self.output.isfinite() | ~known):
            return torch.inf
        a, b = (x.double().masked_fill(~known, 0.0).nan_to_num(0.0) for x in (output, self.output))
        if _is_another(a, b):
            return torch.inf
        if self._is_far(output, known):
            return torch.inf
        units = error_units(output, self.output, self.budgets["output"])
        return float(units.masked_fill(~known, 0.0).max())

    def _is_far(self, output: Tensor, known: Tensor) -> bool:
        """True if a few columns are over budget: they cost little, and settle most cases."""
        if (
            self._states
            or self._result is not None
            or self._rearrange
            or output.shape[-1] <= _COLUMNS
        ):
            return False
        columns = slice(None, None, output.shape[-1] // _COLUMNS)
        value, wrong = self._steps.value[..., columns], self._steps.output[..., columns]
        allowed = output_budget(self._steps._replace(value=value, output=wrong), self.call.dtype)
        units = error_units(output[..., columns], wrong, allowed)
        return bool(units.masked_fill(~known[..., columns], 0.0).max() > 1)

    def _is_held(self) -> Tensor:
        """Returns False for heads of a recurrence with numbers whose squares overflow the sums.

        An unstable wrong rule grows until its state is infinite. The NaN that follow depend on the
        order of sums, also for the tokens before in a chunk.
        """
        is_wide = self.call.dtype == torch.float64
        return _largest(self.output) < (1e150 if is_wide else 1e18)

    def _is_definite(self) -> Tensor:
        """Returns False for numbers whose sums without a maximum may overflow or underflow."""
        steps = self._steps
        top = steps.scores.amax(-1, keepdim=True)
        largest = steps.value.abs().amax((-2, -1), keepdim=True).clamp(min=1).log()
        total = steps.scores.logsumexp(-1, keepdim=True) + largest
        is_open = (top <= OVERFLOW) & ((total > OVERFLOW) | (top < -OVERFLOW + 8))
        return (~is_open).expand_as(steps.output)

    @cached_property
    def budgets(self) -> dict[str, Tensor]:
        """The error that a function with the bug may have, for each number of the results."""
        if self.call.is_recurrence:
            allowed = recurrence_budget.budgets(self.call)
        elif self._result is None:
            allowed = {"output": output_budget(self._steps, self.call.dtype)}
        else:
            allowed = {"output": condition.output_budget(self.call, self._result)}
        return {**allowed, "output": self._arranged(allowed["output"])}

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of the wrong variant by autograd; none without a plain formula."""
        if not has_derivation(self.call) or self.call.grad_output is None:
            return {}
        names = ("query", "key", "value")
        leaves = {n: self.call.exact_inputs[n].clone().requires_grad_() for n in names}
        call = replace(self.call, inputs={**self.call.exact_inputs, **leaves})
        output = self._arranged(evaluate(call).output)
        gradients = torch.autograd.grad(
            output, list(leaves.values()), self.call.grad_output.double()
        )
        return {f"grad {n}": x for n, x in zip(names, gradients, strict=True)}

    def _arranged(self, x: Tensor) -> Tensor:
        for rearrange in self._rearrange:
            x = rearrange(x)
        return x


def _largest(output: Tensor) -> Tensor:
    """Returns the largest number of each head, infinity for one that is not finite."""
    size: Tensor = output.double().abs().nan_to_num(torch.inf, torch.inf)
    return size.amax((2, 3), keepdim=True)


def _is_another(found: Tensor, wrong: Tensor) -> bool:
    """True if a result is far from that of the wrong variant, or has another shape."""
    if found.shape != wrong.shape:
        return True
    return bool((found.double() - wrong).norm() > 0.5 * wrong.norm() + 1e-30)


def apply_changes(call: Call, changes: tuple[Change, ...]) -> Call:
    """Returns the call with all changes, in order."""
    for change in changes:
        call = change(call)
    return call
