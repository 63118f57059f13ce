"""Tests of the plugin of pytest: the lines in a terminal, and in a file of results."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from support.paths import ROOT
from support.plugin_runs import QUICK, Run, one_test, summary
from support.plugin_runs import run as run

pytest_plugins = ["pytester"]


def test_failure_shows_the_report_once_and_no_code_of_qkv(run: Run) -> None:
    test = one_test("qkv_oracle(unscaled)", f'qkv("softmax", dtype="float32", {QUICK})')
    for style in ("auto", "short"):
        result = run(test, f"--tb={style}")
        result.assert_outcomes(failed=1)
        text = result.stdout.str()
        (line,) = summary(result)
        report = text.removesuffix(text.partition(line)[1] + text.partition(line)[2])
        assert re.search(r"^E +looks like: scale-missing$", report, re.MULTILINE)
        assert report.count("unscaled as softmax: FAILED, 1 of 1 checks failed (seed 0)") == 1
        assert report.count("looks like") == 1
        assert "qkv_oracle(unscaled)" in report
        assert "qkv_pytest.py" not in text
        assert "verification.py" not in text


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("unscaled", "looks like scale-missing; softmax: 1 of 1 checks failed"),
        ("broken", "raises RuntimeError: broken; softmax: 1 of 1 checks failed"),
        ("twice", r"[\d.e+]+ times the budget \(normal, float32, output\); softmax: 1 of 1 checks"),
        ("without_causal", "the function does not take 'causal'; softmax: no check ran"),
    ],
)
def test_line_of_a_failure_begins_with_the_reason(run: Run, function: str, reason: str) -> None:
    causal = "causal=True" if function == "without_causal" else ""
    test = one_test(
        f"qkv_oracle({function}, {causal})", f'qkv("softmax", dtype="float32", {QUICK})'
    )
    (line,) = summary(run(test, "--force-short-summary", columns=200))
    assert re.match(rf"FAILED test_kernels.py::test_it\[float32\] - qkv: {reason}", line)


def test_line_of_a_failure_fits_a_narrow_terminal(run: Run) -> None:
    test = one_test("qkv_oracle(unscaled)", f'qkv("softmax", dtype="float32", {QUICK})')
    (line,) = summary(run(test, columns=80))
    assert (
        line == "FAILED test_kernels.py::test_it[float32] - qkv: looks like scale-missing; sof..."
    )


def test_line_of_a_failure_is_one_line_on_ci(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    result = run(one_test("qkv_oracle(unscaled)", f'qkv("softmax", dtype="float32", {QUICK})'))
    start = result.outlines.index(summary(result)[0])
    assert len(result.outlines[start:]) == 2


def test_reason_of_a_skip_is_the_exception_beside_families_that_did_not_run(run: Run) -> None:
    families = 'families=["mask", "normal"], gradients=False'
    result = run(one_test("qkv_oracle(only_float32)", f'qkv("softmax", {families})'), "-rs")
    result.assert_outcomes(passed=1, skipped=3)
    assert result.stdout.str().count(" is not taken: raises RuntimeError: only float32") == 3


@pytest.mark.slow
def test_xdist_and_junitxml_have_the_line_of_the_failure(run: Run, pytester: Any) -> None:
    test = one_test(
        "qkv_oracle(unscaled)", f'qkv("softmax", dtype=["float32", "float16"], {QUICK})'
    )
    words = ("-p", "xdist", "-n", "1", "--junitxml=junit.xml")
    result = run(test, *words, where="subprocess")
    result.assert_outcomes(failed=2)
    wanted = "qkv: looks like scale-missing; softmax: 1 of 1 checks failed"
    assert all(" - qkv: looks like scale-missing; softmax" in line for line in summary(result))
    failures = list(ElementTree.parse(pytester.path / "junit.xml").iter("failure"))
    assert [failure.get("message") for failure in failures] == [wanted] * 2
    assert all("unscaled as softmax: FAILED" in str(failure.text) for failure in failures)


def test_example_of_the_page_prints_the_documented_lines(run: Run) -> None:
    page = (ROOT / "docs/oracle.md").read_text().partition("## In pytest")[2]
    example, printed = re.findall(r"^```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:2]
    found = summary(run(example, columns=120))
    assert [re.sub(r"\d+ of \d+", "", line) for line in found] == [
        re.sub(r"\d+ of \d+", "", line) for line in printed.splitlines()
    ]
