"""The census examines each model in a process with bounds, and goes on where it was interrupted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from census.bounded_runs import BoundedRuns
from census.census import Case, DescribedOutcome
from census.comparison import Verdict

# the census imports transformers, which takes seconds
pytestmark = pytest.mark.slow

CASES = [Case("bert"), Case("gpt2", {"n_head": 2})]


def examine(case: Case) -> DescribedOutcome:
    """Returns an outcome, or does what no model should."""
    if case.model_type == "slow":
        time.sleep(60)
    if case.model_type == "large":
        torch.ones(1 << 30)
    if case.model_type == "crash":
        os._exit(3)
    return DescribedOutcome(case, {"a": "a gate"}, "", (Verdict("h.0", "right", 1e-7),))


def refuse(case: Case) -> DescribedOutcome:
    """Fails: no model is examined again."""
    raise AssertionError(case)


@pytest.mark.parametrize(
    ("model_type", "problem"),
    [
        ("slow", "it takes more than 0.5 s"),
        ("large", "can't allocate memory"),
        ("crash", "its process ended with 3"),
    ],
)
def test_model_beyond_its_bounds_is_an_outcome(model_type: str, problem: str) -> None:
    runs = BoundedRuns(examine, DescribedOutcome, seconds=0.5, max_bytes=2 << 30)
    first, second = runs.run([Case(model_type), *CASES[:1]])
    assert problem in first.problem
    assert second == examine(CASES[0])


def test_kept_outcomes_are_not_examined_again(tmp_path: Path) -> None:
    file = tmp_path / "kept" / "described.jsonl"
    found = list(BoundedRuns(examine, DescribedOutcome, file).run(CASES))
    assert found == [examine(case) for case in CASES]
    assert list(BoundedRuns(refuse, DescribedOutcome, file).run(CASES)) == found


def test_outcomes_of_other_sources_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "described.jsonl"
    list(BoundedRuns(examine, DescribedOutcome, file).run(CASES))
    file.write_bytes(file.read_bytes().replace(file.read_bytes()[:64], b"0" * 64))
    (first, _) = BoundedRuns(refuse, DescribedOutcome, file).run(CASES)
    assert "AssertionError" in first.problem


def test_no_model_begins_after_the_last_minute(tmp_path: Path) -> None:
    file = tmp_path / "described.jsonl"
    list(BoundedRuns(examine, DescribedOutcome, file).run(CASES[:1]))
    assert len(list(BoundedRuns(examine, DescribedOutcome, file).run(CASES, minutes=0))) == 1
