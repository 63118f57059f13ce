"""Jobs from plans have the bits and the errors of jobs that are validated anew."""

from __future__ import annotations

import json as stdlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import pytest

from qkv.engine.executor import execute
from qkv.errors import InvalidContent, QkvError
from qkv.jobs.annotations import annotate
from qkv.jobs.gradient_plan import GRAD_OUTPUT, GradientPlan
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.jobs.plan_cache import PlanCache
from qkv.tensors import FLOATING, RawTensor
from qkv.wire.message import Message
from support.batch_jobs import VARIANTS_AND_JOBS
from support.engines import CPU, LIMITS
from support.fitting_requests import Fitting, decode_document, with_other_numbers
from support.invalid_requests import INVALID, VALID, Refused
from support.known_requests import Array, random_case
from support.raw_connection import NAMES, random_inputs

FORMS: Final[tuple[Any, ...]] = ("full", "none", "stats", {"pool": 3}, {"top_k": 1}, {"rows": [0]})


def outcome(work: Callable[[], Job]) -> Any:
    """Returns all that follows from a job, its output included; or its error."""
    try:
        job = work()
    except QkvError as error:
        return type(error), error.detail, error.pointer
    (output,) = execute([job], CPU, False)
    plan = job.plan
    return (
        {n: (t.dtype, t.shape, bytes(t.data)) for n, t in output.outputs.items()}, output.backend,
        plan.arguments, plan.outputs, plan.form, annotate(plan), plan.output_specs,
        plan.bytes_in, plan.bytes_out, plan.flops, plan.score_count, plan.is_small, plan.batch_size,
        plan.inputs.dtype, plan.inputs.shapes, plan.inputs.axes.sizes, plan.uses_sdpa,
    )  # fmt: skip


def assert_same_with_a_plan(
    kind: type[Plan], variant: str, messages: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that jobs of messages of one form are those of `from_message`, and need no other."""
    expected = [outcome(partial(Job.new, kind, variant, m, LIMITS)) for m in messages]
    plans = PlanCache(LIMITS)
    assert outcome(lambda: plans.new_job(kind, variant, messages[0])) == expected[0]
    assert len(plans) == 1
    with monkeypatch.context() as patch:
        patch.setattr(kind, "from_message", lambda *_: 1 / 0)
        for message, known in zip(messages, expected, strict=True):
            assert outcome(partial(plans.new_job, kind, variant, message)) == known
    assert len(plans) == 1


# ---------------------------------------------------------------- the same jobs


@pytest.mark.parametrize(("variant", "kind"), [
    pytest.param(p.values[0], p.values[1], id=p.id) for p in VARIANTS_AND_JOBS
])  # fmt: skip
def test_job_from_a_plan_equals_one_validated_anew(
    monkeypatch: pytest.MonkeyPatch, variant: Any, kind: type[Plan]
) -> None:
    """Every variant: lists and base64, layers in both layouts, key_lengths, masks, gradients."""
    seen: set[str] = set()
    group = "attention" if kind is Plan else "gradients"
    known = variant.parameters.model_fields
    for seed in range(12):
        parameters: dict[str, Any] = {"causal": bool(seed % 2)} if "causal" in known else {}
        if "rule" in known:
            parameters = {"rule": "gated_delta" if seed % 2 else "linear"}
        given: dict[str, Any] = {"parameters": parameters}
        if seed % 3 == 0:
            given["dtype"] = FLOATING[seed % 4]  # lists
        if kind is Plan:
            given["weights"] = FORMS[seed % len(FORMS)]
        document = Fitting(f"/v1/{group}/{variant.name}", seed).document(given)
        first = decode_document(document)
        try:
            Job.new(kind, variant.name, first, LIMITS)
        except InvalidContent:  # this form of weights does not exist here
            continue
        messages = [first, with_other_numbers(first, seed)]
        assert_same_with_a_plan(kind, variant.name, messages, monkeypatch)
        seen |= set(first.tensors)
        seen |= {first.fields["layer"]["layout"]} if first.layer else set()
        seen |= {f"untyped {t.is_untyped}" for t in first.tensors.values()}
    assert {"untyped True", "untyped False"} <= seen
    assert {i.name for i in variant.inputs.values()} <= seen
    if {"query", "key", "value"} <= variant.inputs.keys():
        assert {"v1", "v2"} <= seen
    if kind is GradientPlan:
        assert GRAD_OUTPUT in seen


@pytest.mark.parametrize("block", range(4))
def test_softmax_job_from_a_plan_equals_one_validated_anew(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Ranks, dtypes, masks that broadcast, heads in groups, all parameters."""
    for number in range(20 * block, 20 * (block + 1)):
        messages = [decode_document(random_case(number, seed).document) for seed in range(2)]
        assert_same_with_a_plan(Plan, "softmax", messages, monkeypatch)


def wild(random: Any, shape: tuple[int, ...], size: float) -> Array:
    """Returns numbers of about this size; large ones with an extreme number among them."""
    array = random.normal(size=shape).astype(np.float32) * np.float32(size)
    if size > 1:
        array.flat[random.integers(array.size)] = random.choice([3e38, -3e38, np.nan, np.inf, 2e19])
    return np.asarray(array)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_extreme_numbers_take_their_own_code_path(dtype: str) -> None:
    """The plan is that of other numbers; the kernel depends on the numbers of each job."""
    random, plans, backends = np.random.default_rng(0), PlanCache(LIMITS), []
    outputs = (["output"], ["output"], ["output", "weights"], ["weights", "scores"])
    for turn in range(70):
        G, K, L, S, D = (int(random.choice([1, 2, 3, 7, 16, 33])) for _ in range(5))
        E = D if random.random() < 0.8 else D + 1
        shapes = (1, G * K, L, D), (1, G, S, D), (1, G, S, E)
        parameters = [
            {"causal": bool(random.random() < 0.5)}, {"scale": float(random.choice([0.3, -1, 0]))},
            {"window": [1, None]}, {"softcap": 3.0}, {"query_offset": 1, "causal": True}, {},
            {"query_offset": "end", "causal": True},
        ][turn % 7]  # fmt: skip
        fields: dict[str, Any] = {"outputs": outputs[random.integers(4)], "parameters": parameters}
        for size in random.permutation([1e-30, 1.0, 1e5]):
            arrays = [wild(random, shape, size).astype(dtype) for shape in shapes]
            raw = {n: RawTensor.from_numpy(a) for n, a in zip(NAMES, arrays, strict=True)}
            message = Message(fields, raw)
            found = outcome(partial(plans.new_job, Plan, "softmax", message))
            assert found == outcome(partial(Job.new, Plan, "softmax", message, LIMITS))
            backends.append((fields["outputs"][0], found[1]))
    assert set(backends) == {("output", "sdpa"), ("output", "explicit"), ("weights", "explicit")}


# ---------------------------------------------------------------- the same errors

QKV: Final = {"query": [[1.0, 2.0]], "key": [[1.0, 2.0]], "value": [[1.0, 2.0]]}
LAYER: Final = {"layout": "v1", "tensors": {f"W_{n}": [[1.0, 2.0], [3.0, 4.0]] for n in NAMES}}


def changed(document: Any, *path: Any, to: Any) -> Any:
    """Returns a copy with another value at a path."""
    copy = stdlib.loads(stdlib.dumps(document))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return copy


PLAIN: Final[Any] = {"inputs": QKV, "outputs": ["output"]}
LENGTHS: Final[Any] = changed(PLAIN, "inputs", "key_lengths", to=[1])
HALF: Final[Any] = changed(PLAIN, "dtype", to="float16")
MASKED: Final[Any] = changed(PLAIN, "inputs", "mask", to=[[0.0]])
LAYERED: Final[Any] = changed(PLAIN, "layer", to=LAYER)
GRADIENT: Final[Any] = {"inputs": QKV | {GRAD_OUTPUT: [[1.0, 2.0]]}, "dtype": "float16"}


@pytest.mark.parametrize(
    ("good", "path", "to", "kind"),
    [
        (LENGTHS, ("inputs", "key_lengths"), [2], Plan),
        (LENGTHS, ("inputs", "key_lengths"), [-1], Plan),
        (HALF, ("inputs", "query", 0, 0), 1e300, Plan),
        (HALF, ("inputs", "value", 0, 1), "NaN", Plan),
        (MASKED, ("inputs", "mask", 0, 0), "-Infinity", Plan),
        (PLAIN, ("inputs", "query", 0, 0), 1 << 53, Plan),
        (LAYERED, ("layer", "tensors", "W_key", 0, 0), 1e300, Plan),
        (GRADIENT, ("inputs", GRAD_OUTPUT, 0, 0), 1e300, GradientPlan),
        (PLAIN, ("inputs", "query"), [[1, 2]], Plan),
        (PLAIN, ("weights",), {"rows": [0]}, Plan),
    ],
)
def test_other_numbers_have_the_same_error_after_right_ones(
    good: Any, path: tuple[Any, ...], to: Any, kind: type[Plan]
) -> None:
    """Twice, as there may be a plan of it; the right request still runs."""
    other = changed(good, *path, to=to)
    plans = PlanCache(LIMITS)
    right = outcome(lambda: Job.new(kind, "softmax", decode_document(good), LIMITS))
    wrong = outcome(lambda: Job.new(kind, "softmax", decode_document(other), LIMITS))
    for _ in range(2):
        assert outcome(lambda: plans.new_job(kind, "softmax", decode_document(good))) == right
        assert outcome(lambda: plans.new_job(kind, "softmax", decode_document(other))) == wrong


RUNS: Final = [row for row in INVALID if row.path.startswith("/v1/attention/")]


@pytest.mark.parametrize("row", RUNS, ids=str)
def test_plan_of_a_right_request_hides_no_refusal(row: Refused) -> None:
    """Of the table of invalid requests, whose errors the service checks."""
    variant, plans = row.path.rpartition("/")[2], PlanCache(LIMITS)
    plans.new_job(Plan, variant, decode_document(VALID[row.request][1]))
    for value in row.values:
        try:
            message = decode_document(row.body(value))
        except QkvError:  # no plan is looked up
            continue
        expected = outcome(partial(Job.new, Plan, variant, message, LIMITS))
        assert issubclass(expected[0], QkvError)
        for _ in range(2):
            assert outcome(partial(plans.new_job, Plan, variant, message)) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"parameters": {}}, {"parameters": {"causal": False}}, {"parameters": {"causal": True}},
        {"parameters": {"scale": 1}}, {"parameters": {"scale": 1.5}},
        {"parameters": {"scale": None}}, {"parameters": {"window": [1, None]}},
        {"parameters": {"window": [None, 1]}}, {"weights": "none"}, {"weights": {"top_k": 1}},
        {"weights": {"top_k": True}}, {"outputs": ["output"]}, {"outputs": ["weights", "output"]},
        {"parameters": {"causal": 0}}, {"parameters": {"scale": "1"}},
    ],
)  # fmt: skip
def test_requests_that_differ_in_a_field_have_their_own_plans(fields: Any) -> None:
    """Also where Python's values are equal: 1, 1.0 and True."""
    raw = {n: RawTensor.from_numpy(a) for n, a in random_inputs(0).items()}
    plans = PlanCache(LIMITS)
    others: list[dict[str, Any]] = [
        {}, {"parameters": {"causal": True}}, {"parameters": {"scale": 1.0}},
        {"weights": {"top_k": 1}}, {"outputs": ["output", "weights"]},
    ]  # fmt: skip
    for before in others:
        outcome(partial(plans.new_job, Plan, "softmax", Message(before, raw)))
    message = Message(fields, raw)
    expected = outcome(lambda: Job.new(Plan, "softmax", message, LIMITS))
    assert outcome(lambda: plans.new_job(Plan, "softmax", message)) == expected


def test_failed_request_leaves_no_plan() -> None:
    plans = PlanCache(LIMITS)
    for fields in ({"outputs": ["other"]}, {"parameters": {"scale": 1 << 70}}):
        raw = {n: RawTensor.from_numpy(a) for n, a in random_inputs(0).items()}
        with pytest.raises(QkvError):
            plans.new_job(Plan, "softmax", Message(fields, raw))
    assert not len(plans)
