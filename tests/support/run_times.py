"""Seconds of a run of tests: a table of its folders, and a file with each test."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest


class RunTimes:
    """A pytest plugin; under xdist it adds up the reports of all processes.

    Args:
        file: for the seconds of each folder and each test, fixtures included, as JSON.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._tests: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds the seconds of a test, its setup or its teardown."""
        self._tests[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints a line for each folder, the longest one first, and writes the file."""
        seconds: defaultdict[str, float] = defaultdict(float)
        counts: Counter[str] = Counter()
        for test, its_seconds in self._tests.items():
            folder = test.partition("::")[0].rpartition("/")[0]
            seconds[folder] += its_seconds
            counts[folder] += 1
        folders = sorted(seconds, key=lambda folder: -seconds[folder])
        terminalreporter.section("seconds of each folder, in all processes together")
        for folder in folders:
            terminalreporter.write_line(f"{seconds[folder]:8.1f} s {counts[folder]:6} {folder}")
        if self._file:
            tests = dict(sorted(self._tests.items(), key=lambda pair: -pair[1]))
            table = {"folders": {folder: seconds[folder] for folder in folders}, "tests": tests}
            self._file.write_text(json.dumps(table, indent=1) + "\n")
