"""`Check`: one result of a function, compared with the reference, for one family and dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Check:
    """One result compared with the float64 reference, for one family and dtype.

    Attributes:
        family: the family of inputs.
        dtype: of the inputs, such as "float32".
        result: "output", "grad query", "grad key", "grad value" or another gradient, or
            "state.sums" of a recurrence.
        passed: True if every number is within its budget; None: it did not run.
        error: absolute error at the worst index; infinite for a wrong NaN or infinity.
        budget: the error allowed there.
        units: error / budget at the worst index, the largest of the result.
        worst: the worst index.
        expected: the float64 result there.
        got: the function's result there.
        cosine: of the whole result with the expected one; None if a number is not finite.
        torch_error: the largest absolute error of torch's own kernel; None: there is none.
        torch_units: the largest error of torch's kernel in units of the budget.
        problem: the fault, if the function gave no result to compare; "" without one.
        not_run: the reason why the check did not run; "" if it ran.
        errors: the error of each number in units of the budget, of a failed check.
    """

    family: str
    dtype: str
    result: str
    passed: bool | None
    error: float = math.nan
    budget: float = math.nan
    units: float = math.nan
    worst: tuple[int, ...] = ()
    expected: float = math.nan
    got: float = math.nan
    cosine: float | None = None
    torch_error: float | None = None
    torch_units: float | None = None
    problem: str = ""
    not_run: str = ""
    errors: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Family, dtype and result in words."""
        return f"{self.family}, {self.dtype}, {self.result}"

    def to_json(self) -> dict[str, Any]:
        """Returns the check as JSON; numbers that are not finite are strings."""
        fields = {n: getattr(self, n) for n in self.__dataclass_fields__ if n != "errors"}
        return {n: _plain(x) for n, x in fields.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def error_units(values: Tensor, exact: Tensor, budget: Tensor) -> Tensor:
    """Returns the error of each number in units of its budget.

    It is 0 for an equal number, and infinite for NaN or infinity where a finite number is expected
    and the reverse. A number that the result's dtype cannot hold may be infinite.
    """
    wide = values.double()
    error = (wide - exact).abs()
    units = torch.where(error == 0, 0.0, error / budget)
    if bool(error.isfinite().all()):  # so are all numbers
        return units
    overflows = ~exact.to(values.dtype).isfinite() & exact.isfinite()
    same = (wide == exact) | (wide.isnan() & exact.isnan())
    units = units.masked_fill(~wide.isfinite() | ~exact.isfinite(), torch.inf)
    return units.masked_fill(same | (overflows & (wide == exact.to(values.dtype).double())), 0.0)


def compare(
    family: str,
    dtype: str,
    result: str,
    values: Tensor,
    exact: Tensor,
    budget: Tensor,
    kernel: Tensor | None,
) -> Check:
    """Returns the check of a result.

    Args:
        family: the family of inputs.
        dtype: of the inputs.
        result: the name of the result.
        values: the function's result.
        exact: the float64 result.
        budget: the largest error allowed for each number.
        kernel: the result of torch's own kernel, if there is one.
    """
    units = error_units(values, exact, budget)
    flat = int(units.flatten().argmax())
    worst = tuple(int(i) for i in np.unravel_index(flat, tuple(units.shape)))
    largest, got, expected = float(units[worst]), float(values[worst]), float(exact[worst])
    passed = largest <= 1
    error = abs(got - expected)
    a, b = values.double().flatten(), exact.flatten()
    cosine = _cosine(a, b) if bool(a.isfinite().all() & b.isfinite().all()) else None
    torch_error = torch_units = None
    if kernel is not None:
        torch_error = float((kernel.double() - exact).abs().nan_to_num(nan=torch.inf).max())
        torch_units = float(error_units(kernel, exact, budget).max())
    return Check(
        family,
        dtype,
        result,
        passed,
        error if math.isfinite(error) else math.inf * (largest > 0) if largest else 0.0,
        float(budget[worst]),
        largest,
        worst,
        expected,
        got,
        cosine,
        torch_error,
        torch_units,
        errors=None if passed else units.numpy(),
    )


def _cosine(a: Tensor, b: Tensor) -> float:
    """Returns the cosine of two vectors; 1 for equal vectors, also of zeros."""
    if torch.equal(a, b):
        return 1.0
    a, b = (x / x.abs().max().clamp(min=1e-300) for x in (a, b))
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else 0.0
