"""`judge`: the report on the results of one call, which may come from any program or machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from qkv.attention.signature import fixed_size
from qkv.errors import InvalidContent, pointer_to
from qkv.testing.call import STATE, Call, state_dtype
from qkv.testing.diagnosis import diagnose
from qkv.testing.function_runner import Outcome
from qkv.testing.report import Report
from qkv.testing.verification import check_outcome

GRADIENT: Final = "grad_"
"""Begins the name of a gradient among results: `grad_query` is that of `query`."""


def judge(
    call: Call,
    results: Mapping[str, Tensor],
    *,
    family: str,
    seed: int = 0,
    function: str = "results",
) -> Report:
    """Returns the report on the results of one call.

    Args:
        call: the inputs and parameters that the results were computed from.
        results: `output`, and optionally `state.sums` of a recurrence and the gradient of every
            required input, such as `grad_query`; on the CPU.
        family: of the inputs, for the report.
        seed: of the inputs, for the report.
        function: the name of the function or file that is judged, for the report.

    Raises:
        InvalidContent: a result is missing or unknown, or has another shape or dtype.
    """
    check_results(call, results)
    checks, observation = check_outcome(family, call, Outcome(results_by_name(results)))
    return Report(
        function=function,
        variant=call.variant.name,
        parameters=call.parameters,
        seed=seed,
        checks=checks,
        diagnosis=diagnose([observation] if observation else []),
    )


def results_by_name(results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns results by their names in a report: `grad query` for `grad_query`."""
    return {n.replace(GRADIENT, "grad ", 1): x for n, x in results.items()}


def check_results(call: Call, results: Mapping[str, Tensor], needs_gradients: bool = False) -> None:
    """Checks the names, shapes and dtypes of results.

    Args:
        call: the call that they are of.
        results: as for `judge`.
        needs_gradients: True if gradients must be among them.

    Raises:
        InvalidContent: a result is missing or unknown, or has another shape or dtype.
    """
    check_shapes(call, {n: tuple(x.shape) for n, x in results.items()}, needs_gradients)
    for name, x in results.items():
        expected = state_dtype(call.dtype) if name == STATE else call.dtype
        if x.dtype not in (expected, *((torch.float64,) if name == STATE else ())):
            raise InvalidContent(
                f"outputs.{name} has the wrong dtype: got {_short(x.dtype)}, expected "
                f"{_short(expected)}",
                pointer=pointer_to("outputs", name),
            )


def check_shapes(
    call: Call, shapes: Mapping[str, tuple[int, ...]], needs_gradients: bool = False
) -> None:
    """Checks the names and shapes of results, before their numbers are converted.

    Args:
        call: the call that they are of.
        shapes: of the results, by name.
        needs_gradients: True if gradients must be among them.

    Raises:
        InvalidContent: a result is missing or unknown, or has another shape.
    """
    expected = expected_shapes(call)
    has_gradients = needs_gradients or any(n.startswith(GRADIENT) for n in shapes)
    for name in expected if has_gradients else ["output"]:
        if name not in shapes and name != STATE:
            raise InvalidContent(
                f"outputs.{name} is missing: got {', '.join(shapes) or 'nothing'}",
                pointer=pointer_to("outputs", name),
            )
    for name, shape in shapes.items():
        if name not in expected:
            raise InvalidContent(
                f"outputs.{name:.60} is not known: expected {', '.join(expected)}",
                pointer=pointer_to("outputs", name),
            )
        if shape != expected[name]:
            raise InvalidContent(
                f"outputs.{name} has the wrong shape: got {list(shape)}, expected "
                f"{list(expected[name])}",
                pointer=pointer_to("outputs", name),
            )


def expected_shapes(call: Call) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each result; gradients only if there are any. A state is optional."""
    sizes, letters = call.axis_sizes, call.variant.outputs["output"].letters
    shapes = {"output": tuple(fixed_size(x) or sizes[x] for x in letters)}
    if call.is_recurrence:
        shapes[STATE] = call.state_shape
    if call.grad_output is not None and call.has_gradients:
        shapes |= {GRADIENT + n: tuple(call.inputs[n].shape) for n in call.positional}
    return shapes


def _short(dtype: torch.dtype) -> str:
    return str(dtype)[6:]
