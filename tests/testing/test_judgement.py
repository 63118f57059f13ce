"""Tests of `judge`: results of one call from any program get the report of the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.attention.catalogue import variants
from qkv.errors import InvalidContent
from qkv.testing.call import Call
from qkv.testing.case_spec import CaseSpec
from qkv.testing.judgement import judge
from qkv.testing.truth import find_truth


def right_results(call: Call) -> dict[str, Tensor]:
    """Returns the exact output and gradients, rounded to the dtype of the call."""
    exact = find_truth(call, gradients=True).results
    return {name.replace("grad ", "grad_"): x.to(call.dtype) for name, x in exact.items()}


@pytest.mark.parametrize("variant", variants())
def test_right_results_of_every_variant_pass(variant: str) -> None:
    call = CaseSpec(variant).draw()
    results = right_results(call)
    report = judge(call, results, family="normal")
    assert report.passed
    assert [check.result for check in report.checks] == [n.replace("_", " ") for n in results]
    assert judge(call, {"output": results["output"]}, family="normal").passed


def test_wrong_results_fail_with_a_diagnosis() -> None:
    call = CaseSpec("softmax", "large", seed=3).draw()
    wrong = right_results(CaseSpec("softmax", "large", parameters={"scale": 1.0}, seed=3).draw())
    report = judge(call, wrong, family="large", seed=3, function="mine")
    assert not report.passed
    assert report.diagnosis == ["scale-missing"]
    assert str(report).startswith("mine as softmax: FAILED, 4 of 4 checks failed (seed 3)")


def test_wrong_gradient_alone_fails() -> None:
    call = CaseSpec("softmax").draw()
    results = right_results(call)
    results["grad_key"] = -results["grad_key"]
    (check,) = judge(call, results, family="normal").failures
    assert check.result == "grad key"


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_result_that_is_not_finite_fails(number: float) -> None:
    call = CaseSpec("softmax").draw()
    results = right_results(call)
    results["output"][1, 2, 3, 4] = number
    (check,) = judge(call, results, family="normal").failures
    assert check.worst == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"output": None}, "outputs.output is missing: got grad_query, grad_key, grad_value"),
        ({"grad_key": None}, "outputs.grad_key is missing"),
        ({"weights": torch.zeros(1)}, "outputs.weights is not known: expected output, grad_query"),
        (
            {"output": torch.zeros(2, 4, 32)},
            r"outputs.output has the wrong shape: got \[2, 4, 32\], expected \[2, 4, 32, 16\]",
        ),
        (
            {"grad_value": torch.zeros(2, 4, 32, 16).double()},
            "outputs.grad_value has the wrong dtype: got float64, expected float32",
        ),
    ],
)
def test_faults_of_names_shapes_and_dtypes_are_named(change: dict[str, Any], problem: str) -> None:
    call = CaseSpec("softmax").draw()
    changed = right_results(call) | change
    results = {name: x for name, x in changed.items() if x is not None}
    with pytest.raises(InvalidContent, match=problem):
        judge(call, results, family="normal")
