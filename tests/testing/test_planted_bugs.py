"""The oracle fails every bug that is planted in a flash-style kernel, and names those it knows."""

from __future__ import annotations

import pytest

from support.planted_bugs import BUGS, RIGHT, Bug

pytestmark = pytest.mark.slow


@pytest.mark.representative
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bug_fails_and_has_its_name(bug: Bug) -> None:
    report = bug.examine()
    assert not report.passed
    assert list(report.diagnosis)[:1] == ([bug.name] if bug.name else [])


@pytest.mark.parametrize("kernel", RIGHT)
def test_kernel_without_a_bug_passes(kernel: Bug) -> None:
    assert kernel.examine().passed
