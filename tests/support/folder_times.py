"""Prints the number and the seconds of the tests of each folder, at the end of a run."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

__all__ = ["FolderTimes"]


class FolderTimes:
    """A pytest plugin; under xdist it adds up the reports of all processes."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds the seconds of a test, its setup or its teardown."""
        folder = report.nodeid.partition("::")[0].rpartition("/")[0]
        self._seconds[folder] += report.duration
        self._counts[folder] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints a line for each folder, the longest one first."""
        terminalreporter.section("seconds of each folder, in all processes together")
        for folder, seconds in sorted(self._seconds.items(), key=lambda pair: -pair[1]):
            terminalreporter.write_line(f"{seconds:8.1f} s {self._counts[folder]:6} {folder}")
