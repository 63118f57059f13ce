"""`Report`: the result of the oracle, as text, JSON and HTML for a notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

from qkv.client.notebook import picture
from qkv.testing.check import Check
from qkv.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DETAILED: Final = 3  # failed checks with their numbers in the text


@dataclass(frozen=True)
class Report:
    """The checks of one function, and the names of its bugs.

    Attributes:
        function: its name.
        variant: the variant that it claims to compute.
        parameters: of the variant.
        seed: of the inputs.
        checks: one for each family, dtype and result.
        diagnosis: names of known bugs that reproduce the function's results, best first; pairs
            are joined by "+".
        layout: of the function's axes, if the oracle found another one than heads before tokens.
    """

    function: str
    variant: str
    parameters: Mapping[str, Any]
    seed: int
    checks: Sequence[Check]
    diagnosis: Sequence[str]
    layout: str = ""

    @property
    def passed(self) -> bool:
        """True if a check ran and none failed."""
        return not self.failures and any(check.passed for check in self.checks)

    @property
    def failures(self) -> list[Check]:
        """The failed checks, with the largest error in units of the budget first."""
        failed = [check for check in self.checks if check.passed is False]
        return sorted(failed, key=lambda c: -_order(c))

    @property
    def not_run(self) -> list[Check]:
        """The checks that did not run."""
        return [check for check in self.checks if check.not_run]

    def __str__(self) -> str:
        """Returns the report as text."""
        failures, ran = self.failures, sum(check.passed is not None for check in self.checks)
        lines = [self._headline(len(failures), ran)]
        lines += [f"  looks like: {', '.join(self.diagnosis)}"] if self.diagnosis else []
        lines += [f"  layout: {', '.join(self.layout)}, found by running it"] if self.layout else []
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
            "layout": self.layout,
            "checks": [check.to_json() for check in self.checks],
        }

    def figure(self) -> Figure:
        """Draws the worst failed check: its errors by head, and by row and column.

        Raises:
            ValueError: no failed check has a result to draw.
            ModuleNotFoundError: matplotlib is not installed.
        """
        check = self._drawable()
        if check is None or check.errors is None:
            raise ValueError(
                "the report has no errors to draw: got no failed check with a result, expected one"
            )
        from qkv.testing.error_figure import draw_errors  # needs matplotlib

        return draw_errors(check.name, check.errors)

    def _drawable(self) -> Check | None:
        """Returns the worst failed check with a result to draw."""
        checks = (c for c in self.failures if c.errors is not None and c.errors.ndim >= 2)
        return next(checks, None)

    def _repr_html_(self) -> str:
        """Returns the report for a notebook: a table and a picture of the errors."""
        head = "".join(f"<th>{n}</th>" for n in ("check", "verdict", "units", "worst", "expected",
                                                 "got", "cosine", "torch units"))  # fmt: skip
        rows = "".join(_row(check) for check in [*self.failures, *self._others()])
        ran = sum(check.passed is not None for check in self.checks)
        drawn = picture(self.figure) if self._drawable() else ""
        named = f"<p>looks like: <b>{escape(', '.join(self.diagnosis))}</b></p>"
        return (
            f"<p>{escape(self._headline(len(self.failures), ran))}</p>"
            f"{named if self.diagnosis else ''}{drawn}"
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        )

    def _reasons(self) -> dict[str, list[str]]:
        """Returns the reasons for checks that did not run, with their families.

        A reason of a dtype has the dtypes instead: its families ran in others.
        """
        ran = {check.family for check in self.checks if not check.not_run}
        reasons: dict[str, dict[str, None]] = {}
        for why in dict.fromkeys(check.not_run for check in self.not_run):
            checks = [check for check in self.not_run if check.not_run == why]
            of_dtype = all(check.dtype for check in checks) and any(c.family in ran for c in checks)
            reasons[why] = dict.fromkeys(c.dtype if of_dtype else c.family for c in checks)
        return {why: list(names) for why, names in reasons.items()}

    def _others(self) -> list[Check]:
        return [check for check in self.checks if check.passed is not False]

    def _headline(self, failed: int, ran: int) -> str:
        parameters = "".join(f", {n}={v!r}" for n, v in self.parameters.items())
        claim = f"{self.function} as {self.variant}{parameters}"
        if not ran:
            return f"{claim}: no check ran"
        verdict = "passed" if self.passed else "FAILED"
        return f"{claim}: {verdict}, {failed} of {ran} checks failed (seed {self.seed})"

    def _nearest(self) -> Check | None:
        ran = [check for check in self.checks if check.passed and not math.isnan(check.units)]
        return max(ran, key=lambda c: c.units, default=None)


def _order(check: Check) -> float:
    """Returns the size of an error; a fault is larger than any."""
    return math.inf if check.problem or math.isnan(check.units) else check.units


def _describe_failures(failures: Sequence[Check]) -> list[str]:
    """Returns the lines of the failed checks: the worst with their numbers, the others by name."""
    problems: dict[str, list[Check]] = {}
    for check in failures:
        if check.problem:
            problems.setdefault(check.problem, []).append(check)
    lines = [f"  {_names(checks)}: {problem}" for problem, checks in problems.items()]
    wrong = [check for check in failures if not check.problem]
    for check in wrong[:_DETAILED]:
        lines += _describe(check)
    if others := wrong[_DETAILED:]:
        lines.append(f"  and {len(others)} other failed checks: {_names(others)}")
    return lines


def _names(checks: Sequence[Check]) -> str:
    """Returns the families of checks; families that failed in the same dtypes share them."""
    dtypes: dict[str, dict[str, None]] = {}
    for check in checks:
        dtypes.setdefault(check.family, {})[check.dtype] = None
    families: dict[tuple[str, ...], list[str]] = {}
    for family, family_dtypes in dtypes.items():
        families.setdefault(tuple(sorted(family_dtypes)), []).append(family)
    return "; ".join(f"{', '.join(names)} ({', '.join(d)})" for d, names in families.items())


def _describe(check: Check) -> list[str]:
    """Returns the lines of a check that is over budget."""
    cosine = "not finite" if check.cosine is None else f"{check.cosine:.6f}"
    lines = [
        f"  {check.name}: {check.units:.3g} times the budget at {list(check.worst)}",
        f"    expected {check.expected:.9g}, got {check.got:.9g}: error {check.error:.3g}, "
        f"budget {check.budget:.3g}; cosine {cosine}",
    ]
    if check.torch_units is not None and check.torch_error is not None:
        units = f"{check.torch_units:.2g} of the budget"
        lines.append(f"    torch's kernel: error {check.torch_error:.3g}, {units}")
    return lines


def _row(check: Check) -> str:
    """Returns a row of the HTML table."""
    verdict = "not run" if check.passed is None else "passed" if check.passed else "FAILED"
    if note := check.problem or check.not_run:
        cells = [check.name, verdict]
        text = "".join(f"<td>{escape(x)}</td>" for x in cells)
        return f'<tr>{text}<td colspan="6">{escape(note)}</td></tr>'
    cosine = "" if check.cosine is None else f"{check.cosine:.6f}"
    torch_units = "" if check.torch_units is None else f"{check.torch_units:.2g}"
    cells = [
        check.name, verdict, f"{check.units:.3g}", str(list(check.worst)), f"{check.expected:.6g}",
        f"{check.got:.6g}", cosine, torch_units,
    ]  # fmt: skip
    return "<tr>" + "".join(f"<td>{escape(x)}</td>" for x in cells) + "</tr>"
