"""Rare tests: slow ones that depend on few files. CI runs those of whose files one has changed.

A mark names the files and folders that a test depends on: `@pytest.mark.rare("deploy")`. Its own
file and the versions of packages belong to them without being named.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from support.paths import ROOT

PACKAGES: Final = ("pyproject.toml", "constraints.txt")


class RareTests:
    """A pytest plugin that leaves rare tests, and prints which.

    Args:
        days: a rare test runs if a commit of so many days before the last one has changed one of
            its paths, and if git cannot tell.
        root: folder of the repository.
    """

    def __init__(self, days: int, root: Path = ROOT) -> None:
        self._root = root
        self._days = days
        self._changed = changed_files(root, days)
        self._left: dict[str, str] = {}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leaves the tests.

        Raises:
            pytest.UsageError: a mark names a path that does not exist: no commit changes it.
        """
        named = {path for item in items for path in _named_paths(item)}
        if missing := [path for path in sorted(named) if not (self._root / path).exists()]:
            raise pytest.UsageError(f"rare names no path: got {missing}, expected files or folders")
        left = [item for item in items if not self._is_run(item)]
        self._left = {item.nodeid: " ".join(self._paths_of(item)) for item in left}
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.nodeid not in self._left]
        if hasattr(config, "workeroutput"):
            config.workeroutput["rare"] = self._left

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Takes over which tests the processes of xdist have left: each one the same."""
        self._left |= getattr(node, "workeroutput", {}).get("rare", {})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Names the tests, with the paths that would have brought them."""
        if self._left:
            terminalreporter.section(f"rare tests: nothing of theirs changed in {self._days} days")
        for test, paths in self._left.items():
            terminalreporter.write_line(f"{test}: {paths}")

    def _paths_of(self, item: pytest.Item) -> list[str]:
        return [*_named_paths(item), item.path.relative_to(self._root).as_posix(), *PACKAGES]

    def _is_run(self, item: pytest.Item) -> bool:
        if self._changed is None or item.get_closest_marker("rare") is None:
            return True
        return any(
            file == path or file.startswith(f"{path}/")
            for path in self._paths_of(item)
            for file in self._changed
        )


def _named_paths(item: pytest.Item) -> list[str]:
    return [path for mark in item.iter_markers("rare") for path in mark.args]


def changed_files(root: Path, days: int) -> set[str] | None:
    """Returns the files that commits of so many days before the last one have changed.

    None if git cannot tell: a copy without history, or with a part of it. The days are counted from
    the last commit, so that the same commit always runs the same tests.
    """

    def git(*words: str) -> str:
        words = ("git", "-C", str(root), *words)
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    try:
        if git("rev-parse", "--is-shallow-repository").strip() != "false":
            return None
        since = int(git("log", "-1", "--format=%ct")) - days * 24 * 3600
        # What a merge has brought may be older than the merge. The default of git stops at the
        # first old commit, and a younger one may be behind it.
        options = ("--format=", "--name-only", "--no-renames", "-z", "--diff-merges=first-parent")
        listed = git("log", f"--since-as-filter=@{since}", *options)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    return set(filter(None, listed.replace("\n", "\0").split("\0")))
