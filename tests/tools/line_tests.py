"""A pytest plugin for `tests/tools/mutants.py`: notes the lines of each test, or runs some tests.

It imports nothing of this repository, because it also runs in the suite of another checkout.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

_SHARED = ("shared_process", "service_process", "cluster", "haproxy", "installed", "copied_package")
"""Fixtures that start processes which several tests use."""

# A process that a test starts has the test as its context. Forks and `os._exit` are patched,
# because workers are forked, and some end with it.
_CONFIG = """[run]
data_file = {lines}/processes
parallel = true
include = {of}/*
context = ${{JUDGED_TEST}}
sigterm = true
patch = fork, _exit
disable_warnings = no-data-collected, module-not-measured, module-not-imported, trace-changed
"""
_VARIABLES = ("COVERAGE_PROCESS_START", "JUDGED_TEST")

_tracing: list[Any] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that `mutants.py` passes."""
    parser.addoption("--chosen", help="a JSON list of ids: run these tests, in this order")
    parser.addoption("--noted", help="file for the start and the end of each test")
    parser.addoption("--lines", help="folder for the executed lines, with the tests as contexts")
    parser.addoption("--of", help="trace the files below this folder")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Starts coverage, before conftest.py imports the package."""
    options = early_config.known_args_namespace
    if options.lines:
        import coverage

        traced = coverage.Coverage(
            Path(options.lines, "lines"),
            data_suffix=True,  # each process of xdist has a file
            config_file=False,
            include=[f"{options.of}/*"],
            messages=False,
        )
        traced.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])
        traced.start()
        _tracing.append(traced)
        config = Path(options.lines, "processes.ini")
        config.write_text(_CONFIG.format(lines=options.lines, of=options.of))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the chosen tests, in their order."""
    if config.option.chosen:
        ids = json.loads(Path(config.option.chosen).read_text())
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in ids if name in found]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Attributes lines to the test, with its fixtures, here and in processes that it starts."""
    if not _tracing:
        return (yield)
    lines = item.config.option.lines
    shared = [name for name in _SHARED if name in getattr(item, "fixturenames", ())]
    if shared:
        with open(Path(lines, f"shared.{os.getpid()}.jsonl"), "a") as file:
            file.write(json.dumps({"test": item.nodeid, "shared": shared}) + "\n")
    os.environ |= dict(zip(_VARIABLES, (f"{lines}/processes.ini", item.nodeid), strict=True))
    _tracing[0].switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        _tracing[0].switch_context("")
        for name in _VARIABLES:
            os.environ.pop(name, None)


class _Notes:
    """Writes a line for each event. Under xdist the process that starts the others writes."""

    def __init__(self, file: str) -> None:
        self._file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, event="start", at=time.time())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(
            test=report.nodeid, event=report.when, outcome=report.outcome, seconds=report.duration
        )

    def _write(self, **words: Any) -> None:
        with open(self._file, "a") as file:
            file.write(json.dumps(words) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Starts the notes."""
    if config.option.noted and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Notes(config.option.noted))


def pytest_unconfigure() -> None:
    """Saves the executed lines."""
    while _tracing:
        traced = _tracing.pop()
        traced.stop()
        traced.save()
