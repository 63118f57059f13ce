"""Tests of bench/layouts.py, which compares layers with real modules."""

from __future__ import annotations

import re

import layouts
import pytest
import torch

from qkv.attention.layers import layout_catalogue
from support.real_modules import CASES

pytestmark = pytest.mark.slow


@pytest.mark.representative
def test_command_prints_the_errors_of_modules(capsys: pytest.CaptureFixture[str]) -> None:
    layouts.main(["mha", "nanogpt"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert [row.split(" | ")[0] for row in rows] == ["| `mha`", "| `nanogpt`"]
    errors = [float(e) for row in rows for e in re.findall(r"\d\.\d*e-\d+", row)]
    assert len(errors) == 8
    assert max(errors) < 1e-5
    assert any(f"torch {torch.__version__}" in line for line in lines)


def test_unknown_module_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        layouts.main(["no-such-module"])
    assert "unknown: no-such-module" in capsys.readouterr().err


def test_every_layout_has_a_real_module_and_every_module_a_row() -> None:
    assert {case.layout for case in CASES.values()} == set(layout_catalogue.known())
    measured = layouts.PAGE.read_text().partition("<!-- made by")[2]
    rows = [line.split(" | ")[:3] for line in measured.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(
        [f"| `{case.layout}`", case.source, case.shows] for case in CASES.values()
    )
