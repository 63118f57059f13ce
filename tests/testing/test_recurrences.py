"""The oracle on recurrent functions: right ones pass, and planted bugs are found and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from qkv.attention.catalogue import find
from qkv.errors import InvalidContent
from qkv.testing import verify
from qkv.testing.case_file import CaseFile
from qkv.testing.case_spec import CaseSpec
from qkv.testing.families import families_of
from qkv.testing.family import NotDrawn
from qkv.testing.judgement import judge
from qkv.testing.recurrence import evaluate
from qkv.testing.recurrent_bugs import RECURRENT_BUGS
from qkv.wire import json, safetensors
from support.chunked_rule import chunked_rule
from support.each import each
from support.right_recurrences import RULES, RecurrentDraw

GATED_DELTA: dict[str, Any] = {"rule": "gated_delta"}
FEW = ["normal", "chunk tail", "state"]
MANY = [*FEW, "long history", "grouped heads", "key sizes", "tiny"]
FAST: dict[str, Any] = {"dtype": "float32", **GATED_DELTA}


@pytest.mark.parametrize("seed", range(12))
def test_right_function_passes_and_is_not_accused(seed: int) -> None:
    """Each rule, in many forms: tokens, chunks, a matrix, and functions of transformers."""
    draw = RecurrentDraw.of(seed)
    report = draw.verify(family_count=8)
    assert not report.failures, (draw, report)
    assert not report.diagnosis


@each("name", RULES)
def test_loop_is_the_reference_with_every_family(name: str) -> None:
    variant = find("gated")
    for family in families_of("gated"):
        spec = CaseSpec("gated", family, "float32", {"rule": name, "normalize_qk": True}, {"S": 20})
        try:
            call = spec.draw_if_applicable()
        except NotDrawn:
            continue
        found, truth = evaluate(call)["output"], variant.reference(**call.arguments).output
        torch.testing.assert_close(found, truth, rtol=1e-11, atol=1e-11 * float(truth.abs().max()))


@pytest.mark.parametrize("bug", ["scale-missing", *RECURRENT_BUGS])
def test_planted_bug_is_found_and_named(bug: str) -> None:
    normalizes = bug in ("keys-not-normalized", "epsilon-in-normalizer")
    options: dict[str, Any] = {"normalize_qk": True} if normalizes else {}
    report = verify(chunked_rule(bug), "gated", families=MANY, **FAST, **options)
    assert not report.passed
    assert report.diagnosis[:1] == [bug], report


@each("options", [{}, {"normalize_qk": True}])
def test_rule_without_a_bug_passes(options: dict[str, Any]) -> None:
    report = verify(chunked_rule(), "gated", families=MANY, **FAST, **options)
    assert report.passed, report


@pytest.mark.slow
@each("bug", ["state-transposed", "history-truncated", "beta-not-applied"])
def test_bug_is_named_in_a_narrow_dtype_and_in_every_dtype(bug: str) -> None:
    families = ["normal", "state", "long history"]
    for dtype in ("bfloat16", None):
        report = verify(chunked_rule(bug), "gated", **GATED_DELTA, dtype=dtype, families=families)
        assert report.diagnosis[:1] == [bug], report


def test_history_of_the_last_chunk_alone_is_truncated() -> None:
    report = verify(
        chunked_rule("last-chunk-kept"), "gated", families=[*FEW, "long history"], **FAST
    )
    assert report.diagnosis[:1] == ["history-truncated"], report


@each("chunk", [32, 48])
def test_bugs_of_other_chunks_are_named_by_the_parameter(chunk: int) -> None:
    families = ["normal", "chunk tail", "long history"]
    report = verify(
        chunked_rule("history-truncated", chunk=chunk), "gated", families=families, chunk=chunk,
        **FAST,
    )  # fmt: skip
    assert report.diagnosis[:1] == ["history-truncated"], report


@each("function", [qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule])
def test_functions_of_transformers_are_called_as_they_are(function: Any) -> None:
    """Tokens come before heads, `g` is the decay, and the state is float32 for float64 inputs."""
    report = verify(function, "gated", **GATED_DELTA, families=FEW)
    assert report.passed, report
    assert report.layout == "BTHD"
    assert "layout: B, T, H, D, found by running it" in str(report)
    reasons = {check.dtype: check.not_run for check in report.not_run}
    assert reasons == {"float64": "wrong dtype of the state: got float32, expected float64"}
    ran = {(check.family, check.result) for check in report.checks if check.passed}
    assert ran == {(family, result) for family in FEW for result in ("output", "state.sums")}


def test_decays_per_channel_are_drawn_by_a_size() -> None:
    function = kimi.recurrent_kimi_delta_attention
    report = verify(function, "gated", **FAST, families=FEW, sizes={"Z": 16})
    assert report.passed, report
    wrong = verify(chunked_rule("decay-after-update"), "gated", **FAST, sizes={"Z": 16})
    assert wrong.diagnosis[:1] == ["decay-after-update"]


@each("layout", ["BHTD", "BTHD", None])
@each("has_heads_first", [True, False])
def test_layout_is_given_or_found(layout: Any, has_heads_first: bool) -> None:
    kernel = chunked_rule()

    def heads_first(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        output, _ = kernel(*(x.transpose(1, 2) for x in (q, k, v, log_decay, beta)))
        return output.transpose(1, 2)

    function = heads_first if has_heads_first else kernel
    report = verify(function, "gated", **FAST, families=["normal"], layout=layout)
    assert report.passed is (layout is None or (layout == "BHTD") is has_heads_first)
    assert report.layout == ("BTHD" if layout is None and not has_heads_first else "")


def test_layout_is_found_in_a_dtype_that_the_function_takes() -> None:
    def narrow_only(*tensors: Tensor) -> Any:
        assert tensors[0].dtype == torch.bfloat16, "bfloat16 only"
        return chunked_rule()(*tensors)

    report = verify(narrow_only, "gated", **GATED_DELTA, families=["normal"], sizes={"H": 2})
    assert report.passed, report
    assert report.layout == "BTHD"


def test_layout_of_softmax_is_an_option_too() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, *, key_lengths: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if key_lengths is not None:
            seen = torch.arange(k.shape[2]) < key_lengths.view(-1, 1, 1, 1)
            scores = scores.masked_fill(~seen, -torch.inf)
        output: Tensor = scores.softmax(-1) @ v
        return output.transpose(1, 2)

    families = ["normal", "grouped heads", "padding", "strided"]
    options: dict[str, Any] = {"dtype": "float32", "families": families}
    assert verify(attend, "softmax", layout="BTHD", gradients=True, **options).passed
    assert not verify(attend, "softmax", **options).passed
    with pytest.raises(InvalidContent, match="no layout 'TBHD'"):
        verify(attend, "softmax", layout="TBHD", **options)  # type: ignore[arg-type]


def test_function_without_a_state_or_a_scale_is_not_asked() -> None:
    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any) -> Tensor:
        return chunked_rule()(q, k, v, g, beta)[0]

    report = verify(rule, "gated", **FAST, families=["normal", "state", "scale", "padding"])
    assert report.passed, report
    assert [check.not_run for check in report.not_run] == [
        "the function does not take 'initial_state'",
        "the function does not take 'scale'",
        "the function does not take 'key_lengths'",
    ]


@each(
    ("returned", "problem"),
    [
        (lambda s: s[..., :3], "wrong shape of the state: got (2, 4, 16, 3), expected (2, 4, 16,"),
        (lambda s: s.double(), "wrong dtype of the state: got float64, expected float32"),
    ],
)
def test_fault_of_a_state_is_named(returned: Any, problem: str) -> None:
    def rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, output_final_state: bool = False
    ) -> Any:
        output, state = chunked_rule()(q, k, v, g, beta, output_final_state=output_final_state)
        return output, None if state is None else returned(state)

    (check,) = verify(rule, "gated", **FAST, families=["normal"], layout="BTHD").checks
    assert check.problem.startswith(problem)


def test_gradients_of_decays_are_refused_by_name() -> None:
    with pytest.raises(InvalidContent, match="gradients are not judged: got gated with the rule g"):
        verify(chunked_rule(), "gated", **FAST, families=["normal"], gradients=True)


@pytest.mark.slow
def test_rule_linear_has_gradients() -> None:
    def rule(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Tensor = (query @ key.mT * query.shape[-1] ** -0.5).tril() @ value
        return output

    report = verify(rule, "gated", dtype="float32", families=["normal", "odd sizes"])
    assert {check.result for check in report.checks} >= {"output", "grad query", "grad value"}
    assert report.passed, report


@each("dtype", ["bfloat16", "float64"])
@each("codec", [safetensors, json])
def test_case_file_holds_gates_and_state_and_its_results_are_judged(codec: Any, dtype: str) -> None:
    for family in ("normal", "state", "scale", "infinite decay", "one token"):
        spec = CaseSpec("gated", family, dtype, GATED_DELTA, {"H": 2, "D": 8}, seed=3)
        call = spec.draw()
        encoded = b"".join(codec.encode(CaseFile(spec, call).to_message(), "inputs"))
        file = CaseFile.from_message(codec.decode(encoded, "inputs"))
        assert file.call.parameters == call.parameters
        assert file.call.inputs.keys() == call.inputs.keys()
        assert all(torch.equal(file.call.inputs[n], x) for n, x in call.inputs.items())
        exact = evaluate(file.call)
        results = {"output": exact["output"].to(call.dtype), "state.sums": exact["state.sums"]}
        assert judge(file.call, results, family=family).passed
    results["state.sums"] = 1 - results["state.sums"]
    assert not judge(file.call, results, family=family).passed


def test_unstable_wrong_rule_is_named_though_it_overflows() -> None:
    """Keys of size 4 make the state grow until it is infinite."""
    options = FAST | {"normalize_qk": True}
    families = ["normal", "steep", "large", "several blocks"]
    report = verify(chunked_rule("keys-not-normalized"), "gated", **options, families=families)
    assert report.diagnosis[:1] == ["keys-not-normalized"]
    zeros = verify(
        lambda q, k, v, g, beta: torch.zeros_like(v), "gated", **options, families=["large"]
    )
    assert "keys-not-normalized" not in zeros.diagnosis


def test_gates_at_their_places_may_have_any_name() -> None:
    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
        return v

    report = verify(rule, "gated", rule="gated_delta", dtype="float32", families=["normal"])
    assert [check.problem for check in report.checks] == [""]
