"""Tests of `qkv verify` with files of inputs and results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from qkv.testing.case_spec import CaseSpec
from qkv.testing.truth import find_truth
from support.commands import error_of, invoke, stdout_of, write_tensors

SIZES = ("--sizes", "L=6,S=9,D=4")


def write_case(folder: Path, *words: object, suffix: str = ".safetensors") -> Path:
    path = folder / f"case{suffix}"
    stdout_of("oracle", "softmax", *SIZES, *words, "-o", path)
    return path


def right_results(dtype: str = "float32") -> dict[str, Any]:
    """Returns the results of the case that `write_case` writes."""
    call = CaseSpec("softmax", dtype=dtype, sizes={"L": 6, "S": 9, "D": 4}).draw()
    exact = find_truth(call, gradients=True).results
    return {n.replace("grad ", "grad_"): x.to(call.dtype).numpy() for n, x in exact.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case_suffix", [".safetensors", ".json"])
@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".json"])
def test_output_of_qkv_passes_in_every_format(
    tmp_path: Path, dtype: str, case_suffix: str, suffix: str
) -> None:
    words = ("--family", "mask", "--dtype", dtype, "--seed", 7)
    case, mine = write_case(tmp_path, *words, suffix=case_suffix), tmp_path / f"mine{suffix}"
    stdout_of("attend", "softmax", case, "-o", mine, "--local")
    printed = stdout_of("verify", "softmax", case, mine)
    assert printed.startswith(f"{mine} as softmax: passed, 0 of 1 checks failed (seed 7)\n")


def test_backward_pass_is_judged_too(tmp_path: Path) -> None:
    case, mine = write_case(tmp_path), tmp_path / "mine.safetensors"
    results = right_results()
    safetensors.numpy.save_file(results, mine)
    assert "0 of 4 checks failed" in stdout_of("verify", "softmax", case, mine)
    results["grad_query"] *= 2
    safetensors.numpy.save_file(results, mine)
    done = invoke("verify", "softmax", case, mine)
    assert done.exit_code == 1
    assert "normal, float32, grad query: " in done.stdout


def test_failed_report_is_on_stdout_with_status_1(tmp_path: Path) -> None:
    case, mine = write_case(tmp_path, "-p", "scale=0.25"), tmp_path / "mine.json"
    stdout_of("attend", "softmax", case, "-p", "scale=1", "-o", mine, "--local")
    done = invoke("verify", "softmax", case, mine)
    assert done.exit_code == 1
    assert done.stderr == ""
    assert done.stdout.startswith(f"{mine} as softmax, scale=0.25: FAILED, 1 of 1 checks failed")
    assert "  looks like: scale-missing\n" in done.stdout
    report = json.loads(invoke("verify", "softmax", case, mine, "--json").stdout)
    assert report["diagnosis"] == ["scale-missing"]
    assert report["passed"] is False


def test_npz_has_bfloat16_as_float32_only_if_it_is_exact(tmp_path: Path) -> None:
    case, mine = write_case(tmp_path, "--dtype", "bfloat16"), tmp_path / "mine.npz"
    stdout_of("attend", "softmax", case, "-o", mine, "--local")
    output = np.load(mine)["output"]
    np.savez(mine, output=output * np.float32(1 + 2.0**-20))
    line = error_of(tmp_path, "verify", "softmax", case, mine)
    assert line.startswith(f"Error: {mine}: outputs.output is not bfloat16: got ")
    assert line.endswith(" in float32, expected numbers that bfloat16 holds exactly")
    np.savez(mine, output=output.astype("f8") * 1e300)
    line = error_of(tmp_path, "verify", "softmax", case, mine)
    assert f"{mine}: outputs.output has the wrong dtype: got float64, expected bfloat16" in line


@pytest.mark.parametrize(
    ("results", "problem"),
    [
        ({}, "outputs.output is missing"),
        ({"out": np.zeros(3, "f4")}, "outputs.output is missing: got out"),
        ({"output": np.zeros(3, "f4")}, "outputs.output has the wrong shape: got [3]"),
        ({"output": np.zeros((2, 4, 6, 4))}, "wrong dtype: got float64, expected float32"),
    ],
)
def test_wrong_results_are_one_line_with_the_file(
    tmp_path: Path, results: dict[str, Any], problem: str
) -> None:
    case = write_case(tmp_path)
    mine = write_tensors(tmp_path / "mine.safetensors", "outputs", results)
    line = error_of(tmp_path, "verify", "softmax", case, mine)
    assert line.startswith(f"Error: {mine}: ")
    assert problem in line


def test_wrong_case_is_one_line_with_the_file(tmp_path: Path) -> None:
    case, mine = write_case(tmp_path), tmp_path / "mine.safetensors"
    safetensors.numpy.save_file(right_results(), mine)
    line = error_of(tmp_path, "verify", "linear", case, mine)
    assert line == f"Error: {case}: the variant is wrong: got 'softmax', expected 'linear'"
    line = error_of(tmp_path, "verify", "softmax", mine, mine)
    assert line.startswith(f"Error: {mine}: case is missing")
    npz = write_tensors(tmp_path / "case.npz", "inputs", {})
    assert "cannot hold a case" in error_of(tmp_path, "verify", "softmax", npz, mine)
    missing = tmp_path / "missing.safetensors"
    assert f"{missing}: No such file" in error_of(tmp_path, "verify", "softmax", missing, mine)
    content = case.read_bytes()
    other_shape = content.replace(b'F32","shape":[2', b'F32","shape":[9')
    for damaged in (b"", content[:100], content[:-1], other_shape):
        case.write_bytes(damaged)
        assert str(case) in error_of(tmp_path, "verify", "softmax", case, mine)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "CASE and RESULTS are missing, or --exec."),
        (("case.json",), "CASE and RESULTS are missing, or --exec."),
        (("a.json", "b.json", "--seed", "0"), "--seed needs --exec"),
        (("a.json", "b.json", "-p", "causal=true"), "--parameter needs --exec"),
        (("a.json", "b.json", "--exec", "x {in} {out}"), "--exec takes no CASE and RESULTS"),
    ],
)
def test_wrong_usage_is_one_line_with_status_2(words: tuple[str, ...], problem: str) -> None:
    done = invoke("verify", "softmax", *words)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()[-1:]
    assert problem in line


@pytest.mark.parametrize("family", ["state", "scale"])
def test_state_and_scale_of_a_recurrence_are_in_the_file(tmp_path: Path, family: str) -> None:
    case, mine = tmp_path / "case.safetensors", tmp_path / "mine.safetensors"
    words = ("-p", "rule=gated_delta", "-p", "chunk=16")
    stdout_of("oracle", "gated", "--family", family, *words, "-o", case)
    stdout_of("attend", "gated", case, "-p", "rule=gated_delta", "-o", mine, "--local")
    assert "passed, 0 of 1 checks failed" in stdout_of("verify", "gated", case, mine)
    call = CaseSpec("gated", family, parameters={"rule": "gated_delta", "chunk": 16}).draw()
    exact = {n: x.float().numpy() for n, x in find_truth(call).results.items()}
    safetensors.numpy.save_file(exact, mine)
    assert "0 of 2 checks failed" in stdout_of("verify", "gated", case, mine)
    transposed = exact["state.sums"].swapaxes(2, 3)
    safetensors.numpy.save_file({**exact, "state.sums": transposed.copy()}, mine)
    done = invoke("verify", "gated", case, mine)
    assert done.exit_code == 1
    assert "looks like: state-transposed" in done.stdout
