"""Results of wrong variants: outputs and gradients of a call with known bugs, and budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from qkv.errors import QkvError
from qkv.testing import condition
from qkv.testing.budget import output_budget
from qkv.testing.call import Call
from qkv.testing.check import error_units
from qkv.testing.condition import reference_result
from qkv.testing.known_bugs import OUTPUT_FLAGS, Change
from qkv.testing.plain_softmax import OVERFLOW, evaluate
from qkv.testing.truth import has_derivation

_COLUMNS: Final = 4


class WrongResult:
    """The output of a wrong variant; its budget is computed only on request."""

    def __init__(self, call: Call) -> None:
        """Computes the output.

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
        if has_derivation(call):
            self._steps = evaluate(call)
            output = self._steps.output
        else:
            if call.flags - OUTPUT_FLAGS.keys():
                raise QkvError(f"{call.variant.name} has no formula for {sorted(call.flags)}")
            self._result = reference_result(call)
            output = self._result.output
        self.output = self._arranged(output)

    def distance(self, output: Tensor) -> float:
        """Returns the largest distance of a function's output, in units of the budget.

        It is infinite for another shape or an output that is far away: the budget is computed only
        for outputs that are near. Numbers without a definite result do not count.
        """
        if self.output.shape != output.shape:
            return torch.inf
        known = torch.ones_like(output, dtype=torch.bool)
        if self.call.flags & {"no-max", "no-sum-no-max"}:
            known = self._arranged(self._is_definite())
            # an overflow gives NaN or infinity, by the order of sum and quotient
            known = known & (output.isfinite() | self.output.isfinite())
        if not torch.equal(output.isfinite() | ~known, self.output.isfinite() | ~known):
            return torch.inf
        a, b = (x.double().masked_fill(~known, 0.0).nan_to_num(0.0) for x in (output, self.output))
        if bool((a - b).norm() > 0.5 * b.norm() + 1e-30):
            return torch.inf
        if self._is_far(output, known):
            return torch.inf
        units = error_units(output, self.output, self.budget)
        return float(units.masked_fill(~known, 0.0).max())

    def _is_far(self, output: Tensor, known: Tensor) -> bool:
        """True if a few columns are over budget: they cost little, and settle most cases."""
        if self._result is not None or self._rearrange or output.shape[-1] <= _COLUMNS:
            return False
        columns = slice(None, None, output.shape[-1] // _COLUMNS)
        value, wrong = self._steps.value[..., columns], self._steps.output[..., columns]
        allowed = output_budget(self._steps._replace(value=value, output=wrong), self.call.dtype)
        units = error_units(output[..., columns], wrong, allowed)
        return bool(units.masked_fill(~known[..., columns], 0.0).max() > 1)

    def _is_definite(self) -> Tensor:
        """Returns False for numbers whose sums without a maximum may overflow or underflow."""
        steps = self._steps
        top = steps.scores.amax(-1, keepdim=True)
        largest = steps.value.abs().amax((-2, -1), keepdim=True).clamp(min=1).log()
        total = steps.scores.logsumexp(-1, keepdim=True) + largest
        is_open = (top <= OVERFLOW) & ((total > OVERFLOW) | (top < -OVERFLOW + 8))
        return (~is_open).expand_as(steps.output)

    @property
    def budget(self) -> Tensor:
        """The error that a function with the bug may have, for each number of the output."""
        if self._result is None:
            allowed = output_budget(self._steps, self.call.dtype)
        else:
            allowed = condition.output_budget(self.call, self._result)
        return self._arranged(allowed)

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of the wrong variant by autograd; none without a plain formula."""
        if self._result is not None or self.call.grad_output is None:
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


def apply_changes(call: Call, changes: tuple[Change, ...]) -> Call:
    """Returns the call with all changes, in order."""
    for change in changes:
        call = change(call)
    return call
