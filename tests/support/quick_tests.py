"""The part of the tests that `make test` runs, and the rest.

`make test` runs the cheap tests and the representative ones, of each test one case.
The rest is every other case: no test is in both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final
from zlib import crc32

import pytest

PARTS: Final = ("quick", "rest")
EXPENSIVE: Final = frozenset({"process", "browser", "install", "slow"})


def part_of(items: list[pytest.Item], part: str) -> list[pytest.Item]:
    """Returns the tests of a part in their order.

    Args:
        items: all tests, with their markers.
        part: "quick" or "rest".
    """
    quick = set(_one_case_each(filter(_is_quick, items)))
    return [item for item in items if (item in quick) == (part == "quick")]


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
