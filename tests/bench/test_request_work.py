"""Tests of bench/request_work.py, with a traced service."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import request_work

from support.forked_services import forked_service

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.mark.slow
@pytest.mark.process
def test_counts_depend_on_the_code_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = request_work.measure()
    monkeypatch.setattr(request_work, "running_service", forked_service)
    second = request_work.measure()  # in a process that has imported other modules too
    assert first.keys() == second.keys()
    for name, work in first.items():
        assert work.bytecodes == pytest.approx(second[name].bytecodes, rel=0.02)
        assert work.files < work.functions < work.bytecodes
        assert sum(work.shares.values()) == pytest.approx(work.bytecodes)
        assert "engine/executor.py" in work.shares
    way = re.findall(r"^\| `(\S+/\w+\.py)` \|", CONTRIBUTING.read_text(), re.M)
    assert len(way) == 10
    # a plan that the process has kept runs no code of its file
    assert set(first["JSON, six tokens, with weights"].shares) >= {*way} - {"jobs/plan.py"}
    request_work.print_table(first)
    printed = capsys.readouterr().out
    assert all(
        f"{name}: {work.bytecodes:,.0f} bytecodes" in printed for name, work in first.items()
    )
