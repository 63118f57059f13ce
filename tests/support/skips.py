"""A check of the skipped tests at the end of a run, for `--only-skip`."""

from __future__ import annotations

import pytest


class OnlySkips:
    """A pytest plugin; with it a run fails that has skipped tests without the marker.

    Args:
        marker: of the tests that may be skipped.
    """

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._others: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a skipped test that must not be skipped."""
        if report.skipped and self._marker not in report.keywords:
            self._others.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails the run."""
        if self._others:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Names the tests."""
        for nodeid in self._others:
            terminalreporter.write_line(f"skipped, but not marked {self._marker}: {nodeid}")
