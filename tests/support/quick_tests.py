"""The part of the tests that `make test` runs: the cheap and the representative ones.

Of each test it has one case. `.ci/run` and `make test-all` run the others too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final
from zlib import crc32

import pytest

EXPENSIVE: Final = frozenset({"process", "browser", "install", "slow"})


def quick_tests(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns those of all tests that `make test` runs, in their order."""
    quick = set(_one_case_each(filter(_is_quick, items)))
    return [item for item in items if item in quick]


def is_expensive(item: pytest.Item) -> bool:
    """True for a test whose marker names a reason why it takes long."""
    return not EXPENSIVE.isdisjoint(marker.name for marker in item.iter_markers())


def _is_quick(item: pytest.Item) -> bool:
    return item.get_closest_marker("representative") is not None or not is_expensive(item)


def _one_case_each(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Returns a case of each test, drawn by its name: the same one in every process and run."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    return [min(every, key=lambda case: crc32(case.nodeid.encode())) for every in cases.values()]
