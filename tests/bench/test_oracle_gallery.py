"""Tests of bench/oracle_gallery.py: its page has the planted bugs, with the verdicts they get."""

from __future__ import annotations

import re
from pathlib import Path

import oracle_gallery
import pytest
import torch
from oracle_bugs import BUGS, RIGHT, Bug
from oracle_gallery_page import build_summary
from oracle_gallery_results import Row

from support.paths import ROOT

PAGE = oracle_gallery.PAGE.read_text()
SHOWN = ("max-not-subtracted", "zero-keys-counted", "products-tf32", "gqa-tiled")


def cells_of(bug: Bug) -> list[str]:
    """Returns the cells of a bug on the page."""
    (line,) = re.findall(rf"^\| {re.escape(bug.text)} \| (.*) \|$", PAGE, re.MULTILINE)
    return [cell.strip() for cell in line.split(" | ")]


def test_page_has_every_bug_with_its_switch_and_figures() -> None:
    assert len(BUGS) >= 20
    for bug in BUGS:
        settings, close, failed, units, diagnosis = cells_of(bug)
        assert settings.startswith(f"`{bug.switch}`")
        assert re.match(r"(passes|fails): ([\d.e+-]+|NaN)$", close), bug
        assert re.match(r"[1-9]\d* of \d+$", failed), bug
        assert re.match(r"([\d,.e+]+|NaN) \(", units), bug
        assert diagnosis.startswith(f"`{bug.name}`" if bug.name else "no name"), bug
    assert len(re.findall(r"^\| .* \| .* of \d+ \|", PAGE, re.MULTILINE)) == len(BUGS) + len(RIGHT)


def test_summary_of_both_pages_counts_the_rows() -> None:
    passed = sum(cells_of(bug)[1].startswith("passes") for bug in BUGS)
    first = f"Of {len(BUGS)} planted bugs, `torch.allclose(atol=1e-2)` passes {passed}. "
    assert first in PAGE
    assert first in (ROOT / "docs/oracle.md").read_text()


@pytest.mark.parametrize("switch", SHOWN)
def test_bug_has_the_verdicts_of_the_page(switch: str) -> None:
    (bug,) = (bug for bug in BUGS if bug.switch == switch)
    _, is_close = oracle_gallery.run_typical(bug)
    report = oracle_gallery.run_oracle(bug)
    _, close, failed, _, diagnosis = cells_of(bug)
    assert is_close == close.startswith("passes")
    assert failed == f"{len(report.failures)} of {len(report.cases)}"
    assert list(report.diagnosis) == re.findall(r"`(.*?)`", diagnosis)


def test_right_kernels_pass_both_tests() -> None:
    for bug in RIGHT:
        assert oracle_gallery.run_typical(bug).is_close
        assert oracle_gallery.run_oracle(bug).passed


def test_wrong_diagnosis_is_counted_and_shown() -> None:
    (bug,) = (bug for bug in BUGS if bug.switch == "gqa-tiled")
    report = oracle_gallery.run_oracle(bug)
    accused = Row(bug._replace(name=""), 0.5, False, report, False, False)
    assert accused.is_accused
    assert "gives 1 wrong name." in build_summary([accused])


@pytest.mark.slow
def test_command_writes_both_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PAGE", "SUMMARY"):
        page = tmp_path / f"{name}.md"
        page.write_text(f"# By hand\n{oracle_gallery.START}old{oracle_gallery.END}## Below\n")
        monkeypatch.setattr(oracle_gallery, name, page)
    threads = torch.get_num_threads()
    oracle_gallery.main(["--quick", "--write"])
    torch.set_num_threads(threads)
    summary = capsys.readouterr().out.partition("\n")[0]
    for name in ("PAGE", "SUMMARY"):
        text = getattr(oracle_gallery, name).read_text()
        assert text.startswith(f"# By hand\n{oracle_gallery.START}\n{summary}\n")
        assert text.endswith(f"{oracle_gallery.END}## Below\n")
