"""`Truth`: the exact output and gradients of a call, and the errors that a function may have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.testing import (
    budget,
    condition,
    gradient_budget,
    plain_softmax,
    recurrence,
    recurrence_budget,
)
from qkv.testing.call import Call
from qkv.testing.condition import reference_gradients, reference_result

_PLAIN_PARAMETERS = {"causal", "query_offset", "scale", "softcap", "window"}
_PLAIN_INPUTS = {"query", "key", "value", "mask", "key_lengths", "sinks"}


@dataclass(frozen=True)
class Truth:
    """The exact results of a call by name, and their budgets, in float64.

    Attributes:
        results: `output`, of a recurrence `state.sums`, and the gradients as `grad query` and so
            on.
        budgets: the largest error allowed for each number of the results.
    """

    results: dict[str, Tensor]
    budgets: dict[str, Tensor]


def has_derivation(call: Call) -> bool:
    """True if `budget` has a derivation for the call: plain softmax."""
    plain = call.parsed.keys() <= _PLAIN_PARAMETERS and call.inputs.keys() <= _PLAIN_INPUTS
    return call.variant.name == "softmax" and plain


def find_truth(call: Call, gradients: bool = False) -> Truth:
    """Returns the exact results of a call, from the variant's float64 reference or `recurrence`.

    Its gradients are those of autograd.

    Args:
        call: the call.
        gradients: True to add those of the required inputs.
    """
    exact = reference_gradients(call) if gradients else {}
    if call.is_recurrence:
        return _with_gradients(
            recurrence.evaluate(call),
            recurrence_budget.budgets(call),
            exact,
            condition.gradient_budgets(call) if exact else {},
        )
    result = reference_result(call)
    if has_derivation(call):
        steps = plain_softmax.evaluate(call)
        output = budget.output_budget(steps, call.dtype)
        allowed: dict[str, Tensor] = {}
        if exact and call.grad_output is not None:
            G, S = call.inputs["key"].shape[1:3]
            allowed = gradient_budget.gradient_budgets(
                steps, call.grad_output.double(), call.dtype, G
            )
            allowed |= {n: allowed[n][:, :, :S] for n in ("key", "value")}  # without a sink
    else:
        output = condition.output_budget(call, result)
        allowed = condition.gradient_budgets(call) if exact else {}
    return _with_gradients({"output": result.output.double()}, {"output": output}, exact, allowed)


def _with_gradients(
    results: dict[str, Tensor],
    budgets: dict[str, Tensor],
    gradients: dict[str, Tensor],
    allowed: dict[str, Tensor],
) -> Truth:
    """Adds gradients and their budgets."""
    for name, gradient in gradients.items():
        results[f"grad {name}"] = gradient
        budgets[f"grad {name}"] = allowed[name]
    return Truth(results, {n: _with_rounding(x, results[n]) for n, x in budgets.items()})


def _with_rounding(allowed: Tensor, exact: Tensor) -> Tensor:
    """Adds the rounding of the float64 reference itself."""
    eps = torch.finfo(torch.float64).eps
    return (allowed + 4 * eps * exact.abs()).nan_to_num(nan=0.0, posinf=torch.inf)
