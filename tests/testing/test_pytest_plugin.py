"""Tests of the plugin of pytest: its marker and its fixture."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from typing import Final

import pytest

from qkv.testing.case_spec import DTYPES
from support.paths import ROOT
from support.plugin_runs import KERNELS, QUICK, Run, one_test
from support.plugin_runs import run as run

pytest_plugins = ["pytester"]


def test_marker_makes_a_test_of_each_dtype_of_verify(run: Run) -> None:
    result = run(one_test("qkv_oracle(right)", 'qkv("softmax")'), "--collect-only", "-q")
    assert result.outlines[:4] == [f"test_kernels.py::test_it[{name}]" for name in DTYPES]


@pytest.mark.parametrize(
    ("dtype", "outcomes"),
    [
        ('"float32"', {"float32": "PASSED"}),
        ("torch.float16", {"float16": "PASSED"}),
        ('("float64", "bfloat16")', {"float64": "PASSED", "bfloat16": "PASSED"}),
        (
            '["float32", pytest.param("float16", marks=pytest.mark.xfail(strict=True))]',
            {"float32": "PASSED", "float16": "FAILED"},
        ),
    ],
)
def test_marker_names_the_dtypes(run: Run, dtype: str, outcomes: dict[str, str]) -> None:
    result = run(one_test("qkv_oracle(right)", f'qkv("softmax", dtype={dtype}, {QUICK})'), "-v")
    found = dict(re.findall(r"::test_it\[(\w+)\] (\w+)", result.stdout.str()))
    assert found == outcomes


def test_call_without_marker_checks_several_dtypes_in_one_test(run: Run) -> None:
    test = """
def test_it(qkv_oracle):
    report = qkv_oracle(right, "softmax", causal=True, dtype=["float32", "float16"], **QUICK)
    assert {check.dtype for check in report.checks} == {"float32", "float16"}
    assert report.parameters == {"causal": True}
"""
    result = run(test, "-v")
    result.assert_outcomes(passed=1)
    assert "::test_it PASSED" in result.stdout.str()


def test_verify_returns_the_report_of_a_wrong_function(run: Run) -> None:
    call = 'assert qkv_oracle.verify(unscaled).diagnosis == ["scale-missing"]'
    run(one_test(call, f'qkv("softmax", dtype="float32", {QUICK})')).assert_outcomes(passed=1)


def test_nearer_markers_and_the_call_win(run: Run) -> None:
    test = """
pytestmark = pytest.mark.qkv("linear", dtype="float16", seed=1, **QUICK)

@pytest.mark.qkv(dtype="float32", seed=2)
class TestKernel:
    @pytest.mark.qkv("softmax", causal=False, seed=3)
    def test_it(self, qkv_oracle):
        report = qkv_oracle(right, causal=True, seed=4)
        assert (report.variant, dict(report.parameters), report.seed) == (
            "softmax", {"causal": True}, 4)
        assert {check.family for check in report.checks} == {"normal"}
        assert qkv_oracle.verify(right).seed == 3
        assert qkv_oracle.verify(right, "sigmoid").variant == "sigmoid"
"""
    result = run(test, "-v")
    result.assert_outcomes(passed=1)
    assert "::TestKernel::test_it[float32] PASSED" in result.stdout.str()


def test_marker_and_parametrize_multiply(run: Run) -> None:
    dtypes = f'qkv("softmax", dtype=["float32", "float64"], {QUICK})'
    test = one_test("qkv_oracle(right, causal=c)", dtypes, 'parametrize("c", [False, True])')
    result = run(test.replace("(qkv_oracle):", "(qkv_oracle, c):"), "-v")
    result.assert_outcomes(passed=4)
    assert "::test_it[float64-False] PASSED" in result.stdout.str()


def test_marker_of_a_parameter_gives_options(run: Run) -> None:
    test = f"""
@pytest.mark.parametrize("c", [
    pytest.param(c, marks=pytest.mark.qkv("softmax", causal=c, dtype="float32", {QUICK}))
    for c in (False, True)])
def test_it(qkv_oracle, c):
    assert qkv_oracle(right).parameters == {{"causal": c}}
"""
    run(test).assert_outcomes(passed=2)


NEVER: Final = "qkv_oracle was never called"


@pytest.mark.parametrize(
    ("test", "fails"),
    [
        ('@pytest.mark.qkv("softmax", dtype="float32")\ndef test_it(qkv_oracle): pass', True),
        ('@pytest.mark.qkv("softmax")\ndef test_it(): pass', True),
        ("@pytest.mark.qkv(causal=True)\ndef test_it(): pass", True),
        ('pytestmark = pytest.mark.qkv("softmax")\ndef test_it(): pass', True),
        ("pytestmark = pytest.mark.qkv(causal=True)\ndef test_it(): pass", False),
        ('@pytest.mark.qkv("softmax")\ndef test_it(): pytest.skip("later")', False),
        ("def test_it(qkv_oracle): pass", False),
    ],
)
def test_marked_test_that_checks_no_function_fails(run: Run, test: str, fails: bool) -> None:
    result = run(f"\n{test}\n")
    assert ("FAILED" in result.stdout.str()) is fails
    assert (NEVER in result.stdout.str()) is fails


@pytest.mark.parametrize(
    ("marker", "arguments", "problem"),
    [
        ('"softmaxx"', "", "no variant 'softmaxx'; there are efficient, gated, linear, "),
        ("", "", "the variant is missing: got None, expected one of efficient, gated, linear, "),
        ('"softmax", "linear"', "", "the variant is missing: got ('softmax', 'linear'), expected "),
        ('"softmax", familys=1', "", "no option 'familys'; the options are dtype, families, "),
        ('"softmax"', "casual=True", "parameters of softmax are causal, query_offset, "),
        ('"linear", window=3', "", "linear refuses 'window'"),
        ('"softmax", families=["norml"]', "", "no family 'norml'; there are normal, "),
        ('"softmax", dtype="float8"', "", "no dtype 'float8'; there are float32, "),
        (
            '"softmax"',
            'dtype="float16"',
            "dtype is not taken by the call: got 'float16', expected ",
        ),
    ],
)
def test_invalid_argument_is_an_error_that_names_the_valid_ones(
    run: Run, marker: str, arguments: str, problem: str
) -> None:
    result = run(one_test(f"qkv_oracle(right, {arguments})", f"qkv({marker})"), "--maxfail=1")
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert problem in text
    assert f"qkv_oracle(right, {arguments})" in text
    assert "qkv_pytest.py" not in text
    assert "catalogue.py" not in text


def test_dtype_that_the_function_does_not_take_is_skipped_at_the_call(run: Run) -> None:
    result = run(one_test("qkv_oracle(only_float32)", f'qkv("softmax", {QUICK})'), "-rs")
    result.assert_outcomes(passed=1, skipped=3)
    line = len(KERNELS.splitlines()) + 4
    place = f"SKIPPED [1] test_kernels.py:{line}: float16 is not taken: raises RuntimeError: only"
    assert place in result.stdout.str()


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("unscaled", QUICK),
        ("broken", QUICK),
        ("only_float32", f'{QUICK}, dtype=["float16", "bfloat16"]'),
        ("without_causal", f"{QUICK}, causal=True"),
        ("lambda query, key, value: query[0]", QUICK),
    ],
)
def test_function_that_is_wrong_or_runs_in_no_dtype_is_not_skipped(
    run: Run, function: str, options: str
) -> None:
    result = run(one_test(f"qkv_oracle({function})", f'qkv("softmax", {options})'))
    result.assert_outcomes(failed=2 if "dtype" in options else 4)


def test_missing_torch_is_an_error_of_the_tests_that_need_it(run: Run) -> None:
    test = """
import sys
sys.modules["torch"] = None
for name in [name for name in sys.modules if name.partition(".")[0] == "qkv"]:
    del sys.modules[name]

def test_other(): pass
""" + one_test("qkv_oracle(right)", 'qkv("softmax", dtype="float32")')
    result = run(test)
    result.assert_outcomes(passed=1, errors=1)
    (line,) = [line for line in result.outlines if line.startswith("qkv.testing needs")]
    assert "torch is not installed; run `pip install '.[server]'`" in line
    assert "qkv_pytest.py" not in result.stdout.str()


def test_import_of_the_plugin_imports_nothing_else() -> None:
    program = (
        "import pytest, sys; before = set(sys.modules); import qkv_pytest;"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["qkv_pytest"]


@pytest.mark.parametrize("words", [(), ("-p", "qkv_pytest"), ("-p", "no:qkv_pytest")])
def test_entry_point_registers_the_plugin_once(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["pytest11"].items()]
    metadata = pytester.mkdir("installed-1.dist-info")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines]))
    monkeypatch.syspath_prepend(pytester.path)
    result = pytester.runpytest_inprocess("--markers", "-p", "no:schemathesis", *words)
    assert result.ret == 0
    assert result.stdout.str().count("@pytest.mark.qkv(") == ("no:qkv_pytest" not in words)
