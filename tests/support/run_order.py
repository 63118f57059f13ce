"""The order of tests, and their groups: xdist runs each group in one process."""

from __future__ import annotations

from typing import Final

import pytest
from xdist.scheduler import LoadScopeScheduling

from support.quick_tests import is_expensive

GROUPS: Final = {
    "tests/server/ray_serve/": "Ray",
    "tests/playground/": "Chromium",
    "tests/attention/test_new_variant.py": "copied package",
    "tests/attention/test_minimal_variant.py": "copied package",
}
"""What tests share that is expensive to start, by the beginning of their ids."""


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """The distribution of groups to the processes of xdist, in the order of the tests.

    Not the option `loadgroup`: xdist 3.8 appends the group to `_nodeid`, which pytest 9 ignores.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """Returns the group of a test: its file, unless more files share what they start."""
    file = nodeid.partition("::")[0]
    return next((group for start, group in GROUPS.items() if file.startswith(start)), file)


def sort_groups(items: list[pytest.Item]) -> None:
    """Sorts the groups: shared ones, then those with expensive tests, then the others.

    A group is never divided: cheap groups at the end keep all processes busy until the end.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)

    def rank(group: str) -> int:
        if group in GROUPS.values():
            return 0
        return 1 if any(map(is_expensive, groups[group])) else 2

    items[:] = [test for group in sorted(groups, key=rank) for test in groups[group]]
