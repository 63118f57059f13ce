"""Tests of `verify` and `assert_matches`: how they call a function, and what they report."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from qkv.attention.catalogue import find, variants
from qkv.client.progress_bar import ProgressBar
from qkv.errors import QkvError
from qkv.testing import FAMILIES, Report, assert_matches, verify
from qkv.testing.budget import output_budget
from qkv.testing.families import choose_sizes, draw, families_of
from qkv.testing.plain_softmax import evaluate
from qkv.testing.truth import find_truth
from support.flash_kernel import flash_kernel
from support.pictures import matrix, panels
from support.shared_truths import shared_truths as shared_truths

QUICK: dict[str, Any] = {"dtype": "float32", "families": ["normal"], "gradients": False}


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns softmax attention without keywords and without grouped heads."""
    scores: Tensor = query @ key.mT * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value


@pytest.mark.parametrize(
    ("family", "sizes", "planes"),
    [
        ("normal", {"L": 300}, (2, 4, 4)),  # 90,000 pairs
        ("normal", {"L": 600}, (1, 2, 2)),
        ("normal", {"L": 600, "S": 600, "H": 8}, (1, 8, 8)),
        ("normal", {"L": 600, "B": 3, "G": 1}, (3, 2, 1)),
        ("grouped heads", {"L": 600}, (1, 4, 2)),
        ("padding", {"S": 600}, (2, 2, 2)),
    ],
)
def test_long_inputs_have_fewer_items_and_heads(
    family: str, sizes: dict[str, int], planes: tuple[int, int, int]
) -> None:
    """An item of `padding` has a length of its own, and only groups of several heads show a bug."""
    drawn = choose_sizes(find("softmax"), FAMILIES[family], sizes, {})
    assert tuple(drawn[x] for x in "BHG") == planes
    assert drawn.items() >= sizes.items()


def test_progress_counts_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, int, str]] = []
    monkeypatch.setattr(ProgressBar, "show", lambda _, *step: steps.append(step))
    verify(plain, "softmax", dtype="float32", families=["normal", "steep"], gradients=False)
    assert steps == [(0, 2, "float32, normal"), (1, 2, "float32, steep"), (2, 2, "diagnosis")]


def test_drawn_projections_have_the_rank_of_the_parameter() -> None:
    ranks: set[int] = set()

    def linformer(*tensors: Tensor, rank: int, **projections: Tensor) -> Tensor:
        ranks.update(len(projection) for projection in projections.values())
        keys, values = (projections[f"{role}_projection"] for role in ("key", "value"))
        query, key, value = tensors
        return plain(query, keys @ key, values @ value)

    assert verify(linformer, "linformer", rank=5, **QUICK).passed
    assert ranks == {5}


@pytest.mark.slow
def test_right_function_passes_in_every_dtype_with_gradients() -> None:
    report = verify(flash_kernel(), "softmax")
    assert report.passed
    ran = {check.dtype for check in report.checks if check.passed}
    assert ran == {"float32", "bfloat16", "float16", "float64"}
    results = {check.result for check in report.checks if check.passed}
    assert results == {"output", "grad query", "grad key", "grad value"}
    assert {check.family for check in report.checks} == {
        name for name in families_of("softmax") if not FAMILIES[name].is_strict
    }


def test_assert_matches_raises_with_the_report() -> None:
    assert_matches(flash_kernel(), "softmax", causal=True, dtype="bfloat16", gradients=False)
    with pytest.raises(AssertionError, match="looks like: scale-missing"):
        assert_matches(flash_kernel("scale-missing"), "softmax", **QUICK)


def test_report_states_worst_index_and_numbers() -> None:
    def off_by_one_number(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = plain(query, key, value)
        output[1, 2, 3, 4] += 1
        return output

    report = verify(off_by_one_number, "softmax", **QUICK)
    (check,) = report.checks
    assert check.worst == (1, 2, 3, 4)
    assert check.error == pytest.approx(1, abs=1e-5)
    assert check.got == pytest.approx(check.expected + 1, abs=1e-5)
    assert check.units == check.error / check.budget > 1
    assert check.cosine is not None
    assert check.cosine < 1
    assert check.torch_units is not None
    assert check.torch_units <= 1
    assert not report.diagnosis


def test_same_seed_gives_the_same_report() -> None:
    two: dict[str, Any] = {"dtype": "float32", "families": ["normal", "grouped heads"]}
    first, second, other = (
        verify(flash_kernel("gqa-tiled"), "softmax", **two, seed=seed).to_json()
        for seed in (0, 0, 1)
    )
    assert first == second
    assert first["checks"] != other["checks"]


def test_function_is_not_run_on_families_with_keywords_that_it_lacks() -> None:
    report = verify(plain, "softmax", dtype="float32", skip=["grouped heads"], gradients=False)
    assert report.passed
    reasons = {check.family: check.not_run for check in report.not_run}
    assert reasons == {
        "grouped heads": "skipped on request",
        "mask": "the function does not take 'mask'",
        "padding": "the function does not take 'key_lengths'",
        "sinks": "the function does not take 'sinks'",
    }


def test_report_does_not_pass_if_no_check_ran() -> None:
    report = verify(plain, "softmax", causal=True, dtype="float32")
    assert not report.passed
    assert "no check ran" in str(report)


def modifies(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query *= query.shape[-1] ** -0.5
    return (query @ key.mT).softmax(-1) @ value


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda q, k, v: plain(q, k, v)[..., :3], "wrong shape"),
        (lambda q, k, v: plain(q, k, v).double(), "wrong dtype: got float64, expected float32"),
        (lambda q, k, v: plain(q, k, v).to("meta"), "wrong device: got meta, expected cpu"),
        (lambda q, k, v: plain(q, k, v).to_sparse(), "wrong layout: got sparse_coo, expected a"),
        (lambda q, k, v: plain(q, k.mT, v), "raises RuntimeError: "),
        (lambda q, k, v: None, "raises TypeError: the function returns NoneType"),
        (modifies, "modifies its inputs: query"),
    ],
)
def test_fault_is_named(function: Any, problem: str) -> None:
    report = verify(function, "softmax", **QUICK)
    assert not report.passed
    assert report.checks[0].problem.startswith(problem)


def test_dtype_that_always_raises_is_not_run() -> None:
    def only_float32(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.dtype != torch.float32:
            raise TypeError("float32 only")
        return plain(query, key, value)

    families = ["normal", "large"]
    report = verify(only_float32, "softmax", families=families, gradients=False)
    assert report.passed
    assert {check.dtype for check in report.not_run} == {"bfloat16", "float16", "float64"}
    assert not verify(only_float32, "softmax", dtype="bfloat16", families=families).passed


def test_wrong_gradient_fails_and_is_named() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ctx.save_for_backward(q, k, v)
            return plain(q, k, v)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            tensors = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                q, k, v = tensors
                output = (q @ k.mT).softmax(-1) @ v  # without the scale
            return torch.autograd.grad(output, tensors, grads[0])

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result: Tensor = Wrong.apply(query, key, value)  # type: ignore[no-untyped-call]
        return result

    report = verify(function, "softmax", dtype="float32", families=["normal", "one query"])
    assert {check.result for check in report.failures} == {"grad query", "grad key", "grad value"}
    assert report.diagnosis[0] == "scale-missing"
    assert verify(function, "softmax", dtype="float32", families=["normal"], gradients=False).passed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_function_of_numpy_gets_and_returns_numpy_arrays(dtype: str) -> None:
    def attend(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        assert isinstance(query, np.ndarray)
        assert query.dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        q, k, v = (x.astype(np.float64) for x in (query, key, value))
        scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        output: np.ndarray = (weights / weights.sum(-1, keepdims=True) @ v).astype(query.dtype)
        return output

    families = ["normal", "large", "strided"]
    assert_matches(attend, "softmax", dtype=dtype, framework="numpy", families=families)


def test_strict_families_check_rows_that_see_nothing_and_nan() -> None:
    strict = [name for name in families_of("softmax") if FAMILIES[name].is_strict]
    options: dict[str, Any] = {"dtype": "float32", "gradients": False, "strict": True}
    report = verify(flash_kernel("nan-from-padding", "nan-from-masked-row"), "softmax", **options)
    failed = {check.family for check in report.failures}
    assert {"blind mask", "blind padding", "nan behind mask", "nan in padding"} <= failed
    assert failed <= set(strict)
    assert verify(flash_kernel("nan-from-masked-row"), "softmax", dtype="float32").passed


@pytest.mark.parametrize("name", [n for n in variants() if n != "softmax"])
def test_variant_of_the_service_passes_its_own_oracle(name: str) -> None:
    variant = find(name)

    def attend(*inputs: Tensor, **keywords: Any) -> Tensor:
        positional = [i.argument for i in variant.inputs.values() if not i.is_optional]
        named = {
            variant.inputs[n].argument if n in variant.inputs else n: x for n, x in keywords.items()
        }
        tensors = dict(zip(positional, inputs, strict=True)) | named
        output: Tensor = variant.attend(**tensors, outputs=frozenset({"output"})).output
        return output

    report = verify(attend, name, dtype="bfloat16", gradients=False)
    assert report.passed, report
    assert_matches(attend, name, dtype="float32", families=["normal", "odd sizes"])
    assert not verify(lambda *x, **k: attend(*x, **k) * 1.5, name, **QUICK).passed


def test_gqa_bug_of_linear_attention_is_named() -> None:
    def tiled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        H, G = query.shape[1], key.shape[1]
        key, value = (x[:, torch.arange(H) % G] for x in (key, value))
        tensors = {"query_BHLD": query, "key_BGSD": key, "value_BGSE": value}
        output: Tensor = find("linear").attend(**tensors, outputs=frozenset({"output"})).output
        return output

    report = verify(tiled, "linear", dtype="float32", gradients=False)
    assert report.diagnosis[0] == "gqa-tiled"


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        (family, parameters)
        for family in families_of("softmax")
        for parameters in ({}, {"causal": True}, {"softcap": 3.0, "window": (4, 2)})
        if not (parameters and family == "more queries")  # which has its own
    ],
)
def test_plain_formula_equals_the_reference(family: str, parameters: dict[str, Any]) -> None:
    call = draw(find("softmax"), family, torch.float32, parameters=parameters)
    truth, steps = find_truth(call), evaluate(call)
    bound = output_budget(steps, torch.float64)
    assert bool(((steps.output - truth.results["output"]).abs() <= bound).all())


def test_invalid_options_are_errors() -> None:
    for options in ({"no_such": 1}, {"families": ["no such"]}, {"dtype": "int8"}, {"dropout": 0.1}):
        with pytest.raises(QkvError):
            verify(plain, "softmax", **options)
    with pytest.raises(QkvError):
        verify(plain, "no such variant")


def failed_report() -> Report:
    """Returns the report of a function with a bug."""
    families = ["normal", "large", "mask"]
    return verify(flash_kernel("scale-missing"), "softmax", dtype="float32", families=families)


def test_report_as_text_json_and_html() -> None:
    report = failed_report()
    text = str(report)
    assert "attend as softmax: FAILED" in text
    assert "times the budget at [" in text
    assert "torch's kernel: error" in text
    fields = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert fields["passed"] is False
    assert fields["diagnosis"] == ["scale-missing"]
    assert {"family", "dtype", "worst", "expected", "got", "cosine", "units"} <= set(
        fields["checks"][0]
    )
    html = report._repr_html_()
    assert html.count("<tr>") == len(report.checks) + 1
    assert html.count("<img") == 1
    heads, plane = panels(report.figure())
    worst = report.failures[0]
    assert matrix(plane).max() == matrix(heads).max() == worst.units


def test_report_of_an_unfinished_number_is_valid_json() -> None:
    report = verify(flash_kernel("max-not-subtracted"), "softmax", dtype="float32")
    json.dumps(report.to_json(), allow_nan=False)
    assert len(panels(report.figure())) == 2


def test_report_without_failures_has_no_figure() -> None:
    report = verify(flash_kernel(), "softmax", dtype="float32", families=["normal"])
    assert "<img" not in report._repr_html_()
    with pytest.raises(ValueError, match="no errors to draw"):
        report.figure()
