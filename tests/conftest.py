"""How tests run: options, markers of tests by cost, their order, and what is loaded for them."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from support.quick_tests import quick_tests
from support.rare_tests import RareTests
from support.run_order import GroupScheduling, sort_groups
from support.run_times import RunTimes
from support.skips import OnlySkips

# Until all is collected: what is imported and collected is no garbage, for which collections would
# look a third of the time.
gc.disable()

MARKERS: Final = {
    "process": "process",
    "shared_process": "process",
    "service_process": "process",
    "command": "process",
    "cluster": "process",
    "browser": "browser",
    "installed": "install",
    "python_generators": "install",
    "node_folder": "install",
}
"""Marker of a test by an expensive fixture that it uses, directly or indirectly."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that `make test` and `.ci/run` use."""
    parser.addoption("--part", choices=("quick", "all"), default="all", help="what to run")
    parser.addoption("--only-skip", help="fail if a test without this marker is skipped")
    parser.addoption(
        "--rare-days", type=int, help="leave rare tests that no commit of these days concerns"
    )
    parser.addoption("--times", type=Path, help="write the seconds of each test to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    """Loads the fixtures where tests run, and adds what concerns a whole run, once."""
    # In processes that tests start, two threads of torch that wait for each other by spinning take
    # 12 s of CPU time instead of 3, beside another process of tests on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if _runs_tests(config):
        config.pluginmanager.import_plugin("support.fixtures")
    if days := config.getoption("rare_days"):  # in the processes of xdist too: they collect
        config.pluginmanager.register(RareTests(days))
    if not hasattr(config, "workerinput"):
        if marker := config.getoption("only_skip"):
            config.pluginmanager.register(OnlySkips(marker))
        config.pluginmanager.register(RunTimes(config.getoption("times")))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    """Gives each group of tests to one process, under `--dist loadscope`."""
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Any:
    """Marks tests by cost, selects the part that the command line names, and sorts the groups."""
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if fixture in MARKERS:
                item.add_marker(MARKERS[fixture])
    yield  # -m selects here, and Hypothesis marks its tests
    if config.getoption("part") == "quick":
        chosen = quick_tests(items)
        config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
        items[:] = chosen
    if hasattr(config, "workerinput"):
        sort_groups(items)


def pytest_collection_finish() -> None:
    """Hides all that exists from collections of garbage, which took a quarter of a second each."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Lets SIGINT and SIGHUP reach the processes that tests start."""
    # A shell starts a background job with SIGINT ignored, and nohup starts a command with SIGHUP
    # ignored, and every child inherits that. With a Python handler here, a child starts with the
    # default action, so that tests of Ctrl-C and of closing terminals work.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # the processes of xdist must stay too
    if _runs_tests(session.config) and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


def _runs_tests(config: pytest.Config) -> bool:
    """False in the process that distributes tests to those of xdist: it imports no torch."""
    return bool(config.getvalue("dist") == "no")
