"""The part of the tests that `make test` runs, and the rest.

`make test` runs the cheap tests and the representative ones, of each test at most two cases.
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
MAX_CASES: Final = 2


def part_of(items: list[pytest.Item], part: str) -> list[pytest.Item]:
    """Returns the tests of a part in their order.

    Args:
        items: all tests, with their markers.
        part: "quick" or "rest".
    """
    quick = {
        case
        for cases in _cases_by_function(filter(_is_quick, items)).values()
        for case in _few_cases(cases)
    }
    return [item for item in items if (item in quick) == (part == "quick")]


def is_expensive(item: pytest.Item) -> bool:
    """True for a test whose marker names a reason why it takes long."""
    return not EXPENSIVE.isdisjoint(marker.name for marker in item.iter_markers())


def _is_quick(item: pytest.Item) -> bool:
    return item.get_closest_marker("representative") is not None or not is_expensive(item)


def _cases_by_function(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    return cases


def _few_cases(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Draws cases with as many different values of each parameter as possible.

    The names of the cases decide, so that every process and every run draws the same ones.
    """
    remaining = sorted(cases, key=lambda case: crc32(case.nodeid.encode()))
    drawn: list[pytest.Item] = []
    seen: set[tuple[str, int]] = set()
    while remaining and len(drawn) < MAX_CASES:
        case = max(remaining, key=lambda case: len(_values(case) - seen))
        remaining.remove(case)
        drawn.append(case)
        seen |= _values(case)
    return drawn


def _values(case: pytest.Item) -> set[tuple[str, int]]:
    """Returns the number of the value of each parameter."""
    return set(case.callspec.indices.items()) if hasattr(case, "callspec") else set()
