"""When tests ran, and so which of them executed a line with a probe."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any


class Runs:
    """The tests that one process ran, one after the other.

    Args:
        notes: of their events, as `line_tests.py` writes them.

    Attributes:
        seconds: of the tests that were not skipped.
    """

    def __init__(self, notes: list[dict[str, Any]]) -> None:
        self._starts: list[tuple[float, str]] = []
        self._shared: dict[str, list[str]] = {}
        self._ready: dict[str, float] = {}
        self._users: defaultdict[str, set[str]] = defaultdict(set)
        seconds: Counter[str] = Counter()
        skipped = set()
        for note in notes:
            test = note["test"]
            if note["event"] == "start":
                self._starts.append((note["at"], test))
                self._shared[test] = note["shared"]
                for fixture in note["shared"]:
                    self._users[fixture].add(test)
                continue
            if note["event"] == "setup":
                self._ready[test] = note["at"]
            if note["outcome"] == "skipped":
                skipped.add(test)
            seconds[test] += note["seconds"]
        self.seconds = {test: seconds[test] for test in seconds if test not in skipped}

    def of_lines(self, hits: Path) -> dict[int, set[str]]:
        """Returns the tests of each line with a probe.

        What runs while the fixtures of a test are set up has all tests that share one of them: it
        runs for the first one, or for any other.

        Args:
            hits: file of the numbers of lines and of the times at which they ran.
        """
        tests: defaultdict[int, set[str]] = defaultdict(set)
        for line in hits.read_text().splitlines() if hits.exists() else ():
            number, at = line.split()
            before = bisect_right(self._starts, (float(at), "\U0010ffff")) - 1
            if before >= 0:  # not while tests are collected
                test = self._starts[before][1]
                tests[int(number)].add(test)
                if float(at) <= self._ready.get(test, 0.0):
                    tests[int(number)].update(*(self._users[f] for f in self._shared[test]))
        return tests


def read_notes(file: Path) -> list[dict[str, Any]]:
    """Returns the notes of a file. The last line of a process that was killed may be a part."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
