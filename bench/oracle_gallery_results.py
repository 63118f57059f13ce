"""`Row`: a planted bug, with the verdicts of a typical test and of the oracle."""

from __future__ import annotations

import math
from typing import NamedTuple

from oracle_bugs import Bug

from qkv.testing import Report

__all__ = ["Row", "Worked", "format_number"]


class Worked(NamedTuple):
    """The budget and errors of the output on the family `normal`.

    Attributes:
        dtype: of the inputs.
        budget: the median over the numbers of the output.
        output: the median size of the output.
        torch_units: the largest error of torch's kernel, in units of the budget.
        kernel_units: that of the flash-style kernel.
        narrow_units: that of the flash-style kernel with sums in bfloat16.
    """

    dtype: str
    budget: float
    output: float
    torch_units: float
    kernel_units: float
    narrow_units: float


class Row(NamedTuple):
    """The verdicts on a kernel.

    Attributes:
        bug: planted in the kernel.
        largest_error: of the typical test, absolute; infinite for NaN.
        is_close: True if `torch.allclose` passes.
        report: of the oracle.
        is_missed: True if the oracle passes the kernel with blocks of more keys than its inputs.
        fails_with_sizes: True if it then fails that kernel with inputs of several blocks.
    """

    bug: Bug
    largest_error: float
    is_close: bool
    report: Report
    is_missed: bool
    fails_with_sizes: bool

    @property
    def worst(self) -> str:
        """The largest error of a failed case in units of its budget, with the case."""
        failures = self.report.failures
        if not failures:
            ran = [c for c in self.report.cases if c.passed is not None]
            case = max(ran, key=lambda c: c.units)
        else:
            case = failures[0]
        units = format_number(case.units) if math.isfinite(case.units) else "NaN"
        return f"{units} ({case.family}{'' if case.result == 'output' else ', ' + case.result})"

    @property
    def is_named(self) -> bool:
        """True if the first name of the diagnosis is that of the bug."""
        return bool(self.bug.name) and list(self.report.diagnosis)[:1] == [self.bug.name]

    @property
    def is_accused(self) -> bool:
        """True if the diagnosis names another bug first."""
        return bool(self.report.diagnosis) and not self.is_named


def format_number(x: float) -> str:
    """Returns a number with two digits; with commas from 100 to a million."""
    if 100 <= x < 1e6:
        return f"{float(f'{x:.2g}'):,.0f}"
    return f"{x:.2g}".replace("e+0", "e+").replace("e-0", "e-")
