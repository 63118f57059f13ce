"""`Report`: the result of the oracle, as text, JSON and HTML for a notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

from qkv.client.notebook import picture
from qkv.testing.cases import Case
from qkv.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Report"]

_DETAILED: Final = 3  # failed cases with their numbers in the text


@dataclass(frozen=True)
class Report:
    """The verdicts of the oracle on one function.

    Attributes:
        function: its name.
        variant: the variant that it claims to compute.
        parameters: of the variant.
        seed: of the inputs.
        cases: one for each family, dtype and result.
        diagnosis: names of known bugs that reproduce the function's results, best first; pairs
            are joined by "+".
    """

    function: str
    variant: str
    parameters: Mapping[str, Any]
    seed: int
    cases: Sequence[Case]
    diagnosis: Sequence[str]

    @property
    def passed(self) -> bool:
        """True if a case ran and none failed."""
        return not self.failures and any(case.passed for case in self.cases)

    @property
    def failures(self) -> list[Case]:
        """The failed cases, with the largest error in units of the budget first."""
        failed = [case for case in self.cases if case.passed is False]
        return sorted(failed, key=lambda c: -_order(c))

    @property
    def not_run(self) -> list[Case]:
        """The cases that did not run."""
        return [case for case in self.cases if case.not_run]

    def __str__(self) -> str:
        """Returns the report as text."""
        failures, ran = self.failures, sum(case.passed is not None for case in self.cases)
        lines = [self._headline(len(failures), ran)]
        lines += [f"  looks like: {', '.join(self.diagnosis)}"] if self.diagnosis else []
        lines += _describe_failures(failures)
        lines += [f"  not run: {', '.join(names)}: {why}" for why, names in self._reasons().items()]
        if self.passed and (worst := self._nearest()):
            lines.append(f"  largest error: {worst.units:.2g} of its budget ({worst.name})")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON."""
        return {
            "function": self.function,
            "variant": self.variant,
            "parameters": dict(self.parameters),
            "seed": self.seed,
            "version": __version__,
            "passed": self.passed,
            "diagnosis": list(self.diagnosis),
            "cases": [case.to_json() for case in self.cases],
        }

    def figure(self) -> Figure:
        """Draws the worst failed case: its errors by head, and by row and column.

        Raises:
            ValueError: no failed case has a result to draw.
            ModuleNotFoundError: matplotlib is not installed.
        """
        case = self._drawable()
        if case is None or case.errors is None:
            raise ValueError(
                "the report has no errors to draw: got no failed case with a result, expected one"
            )
        from qkv.testing.error_figure import draw_errors  # needs matplotlib

        return draw_errors(case.name, case.errors)

    def _drawable(self) -> Case | None:
        """Returns the worst failed case with a result to draw."""
        cases = (c for c in self.failures if c.errors is not None and c.errors.ndim >= 2)
        return next(cases, None)

    def _repr_html_(self) -> str:
        """Returns the report for a notebook: a table and a picture of the errors."""
        head = "".join(f"<th>{n}</th>" for n in ("case", "verdict", "units", "worst", "expected",
                                                 "got", "cosine", "torch units"))  # fmt: skip
        rows = "".join(_row(case) for case in [*self.failures, *self._others()])
        ran = sum(case.passed is not None for case in self.cases)
        drawn = picture(self.figure) if self._drawable() else ""
        named = f"<p>looks like: <b>{escape(', '.join(self.diagnosis))}</b></p>"
        return (
            f"<p>{escape(self._headline(len(self.failures), ran))}</p>"
            f"{named if self.diagnosis else ''}{drawn}"
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        )

    def _reasons(self) -> dict[str, list[str]]:
        """Returns the reasons for cases that did not run, with their families.

        A reason of a dtype has the dtypes instead: its families ran in others.
        """
        ran = {case.family for case in self.cases if not case.not_run}
        reasons: dict[str, dict[str, None]] = {}
        for why in dict.fromkeys(case.not_run for case in self.not_run):
            cases = [case for case in self.not_run if case.not_run == why]
            of_dtype = all(case.dtype for case in cases) and any(c.family in ran for c in cases)
            reasons[why] = dict.fromkeys(c.dtype if of_dtype else c.family for c in cases)
        return {why: list(names) for why, names in reasons.items()}

    def _others(self) -> list[Case]:
        return [case for case in self.cases if case.passed is not False]

    def _headline(self, failed: int, ran: int) -> str:
        parameters = "".join(f", {n}={v!r}" for n, v in self.parameters.items())
        claim = f"{self.function} as {self.variant}{parameters}"
        if not ran:
            return f"{claim}: no case ran"
        verdict = "passed" if self.passed else "FAILED"
        return f"{claim}: {verdict}, {failed} of {ran} cases failed (seed {self.seed})"

    def _nearest(self) -> Case | None:
        ran = [case for case in self.cases if case.passed and not math.isnan(case.units)]
        return max(ran, key=lambda c: c.units, default=None)


def _order(case: Case) -> float:
    """Returns the size of an error; a fault is larger than any."""
    return math.inf if case.problem or math.isnan(case.units) else case.units


def _describe_failures(failures: Sequence[Case]) -> list[str]:
    """Returns the lines of the failed cases: the worst with their numbers, the others by name."""
    problems: dict[str, list[Case]] = {}
    for case in failures:
        if case.problem:
            problems.setdefault(case.problem, []).append(case)
    lines = [f"  {_names(cases)}: {problem}" for problem, cases in problems.items()]
    wrong = [case for case in failures if not case.problem]
    for case in wrong[:_DETAILED]:
        lines += _describe(case)
    if others := wrong[_DETAILED:]:
        lines.append(f"  and {len(others)} other failed cases: {_names(others)}")
    return lines


def _names(cases: Sequence[Case]) -> str:
    """Returns the families of cases; families that failed in the same dtypes share them."""
    dtypes: dict[str, dict[str, None]] = {}
    for case in cases:
        dtypes.setdefault(case.family, {})[case.dtype] = None
    families: dict[tuple[str, ...], list[str]] = {}
    for family, family_dtypes in dtypes.items():
        families.setdefault(tuple(sorted(family_dtypes)), []).append(family)
    return "; ".join(f"{', '.join(names)} ({', '.join(d)})" for d, names in families.items())


def _describe(case: Case) -> list[str]:
    """Returns the lines of a case that is over budget."""
    cosine = "not finite" if case.cosine is None else f"{case.cosine:.6f}"
    lines = [
        f"  {case.name}: {case.units:.3g} times the budget at {list(case.worst)}",
        f"    expected {case.expected:.9g}, got {case.got:.9g}: error {case.error:.3g}, "
        f"budget {case.budget:.3g}; cosine {cosine}",
    ]
    if case.torch_units is not None and case.torch_error is not None:
        units = f"{case.torch_units:.2g} of the budget"
        lines.append(f"    torch's kernel: error {case.torch_error:.3g}, {units}")
    return lines


def _row(case: Case) -> str:
    """Returns a row of the HTML table."""
    verdict = "not run" if case.passed is None else "passed" if case.passed else "FAILED"
    if note := case.problem or case.not_run:
        cells = [case.name, verdict]
        text = "".join(f"<td>{escape(x)}</td>" for x in cells)
        return f'<tr>{text}<td colspan="6">{escape(note)}</td></tr>'
    cosine = "" if case.cosine is None else f"{case.cosine:.6f}"
    torch_units = "" if case.torch_units is None else f"{case.torch_units:.2g}"
    cells = [
        case.name, verdict, f"{case.units:.3g}", str(list(case.worst)), f"{case.expected:.6g}",
        f"{case.got:.6g}", cosine, torch_units,
    ]  # fmt: skip
    return "<tr>" + "".join(f"<td>{escape(x)}</td>" for x in cells) + "</tr>"
