"""A pytest plugin for `tests/tools/mutants.py`: notes when each test runs, or runs some tests.

It imports nothing of this repository, because it also runs in the suite of another checkout.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that `mutants.py` passes."""
    parser.addoption("--chosen", help="a JSON list of ids: run these tests, in this order")
    parser.addoption("--noted", help="folder for the times of each test, and of lines with probes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the chosen tests, in their order."""
    if config.option.chosen:
        ids = json.loads(Path(config.option.chosen).read_text())
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in ids if name in found]


class _Notes:
    """Writes a line for each event of a test, in each process that runs tests."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._write(test=item.nodeid, event="start", at=time.time(), shared=_shared(item))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(
            test=report.nodeid,
            event=report.when,
            at=time.time(),
            outcome=report.outcome,
            seconds=report.duration,
        )

    def _write(self, **words: Any) -> None:
        with open(self._file, "a") as file:
            file.write(json.dumps(words) + "\n")


def _shared(item: pytest.Item) -> list[str]:
    """Returns the fixtures of a test that other tests use too, without those of all tests."""
    definitions = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009 - no public name
    return [
        f"{definition.baseid}::{name}"
        for name, (*_, definition) in definitions.items()
        if definition.scope != "function" and not name.startswith("_")
    ]


def pytest_configure(config: pytest.Config) -> None:
    """Starts the notes, and lets the probes of this process and of those that it starts note."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if config.option.noted and (worker or not config.getvalue("numprocesses")):
        os.environ |= {"JUDGED_HITS": config.option.noted, "JUDGED_PID": str(os.getpid())}
        config.pluginmanager.register(_Notes(Path(config.option.noted, f"{worker}.jsonl")))
