"""Sweeps: their cells, crossovers of curves, and requests that are rejected before they run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from qkv.engine.device.cpu import CpuDevice
from qkv.engine.executor import execute
from qkv.errors import PayloadTooLarge, QkvError
from qkv.jobs.job import Job
from qkv.jobs.measure.sweep import crossovers
from qkv.jobs.measure.sweep_request import Curve, SweepFields, SweepRequest
from qkv.jobs.plan import Limits
from qkv.tensors import RawTensor
from qkv.wire import json as wire_json
from qkv.wire.responses import Crossover, VariantTiming
from support.examples import examples
from support.known_requests import DTYPES, assert_client_error, assert_problem
from support.service import Server
from support.sweep_requests import CELL, SMALL, SWEEP, parse_events, run_sweep
from support.sweep_requests import submitted_jobs as submitted_jobs

UNLIMITED: Final = Limits(response_bytes=1 << 62, job_bytes=1 << 62)


# ------------------------------------------------------------ where curves cross


def times(least_ms: float, median_ms: float, most_ms: float) -> VariantTiming:
    return VariantTiming(median_ms=median_ms, least_ms=least_ms, most_ms=most_ms, repeats=3)


def exact(medians: dict[int, float]) -> dict[int, VariantTiming]:
    """Returns a curve whose repeats all take the same time."""
    return {length: times(ms, ms, ms) for length, ms in medians.items()}


def test_crossing_is_on_straight_lines_between_logarithms() -> None:
    """t = n^2 / 4096 and t = n / 4 cross at 1024, which is not measured."""
    square = exact({n: n**2 / 4096 for n in (256, 512, 2048, 4096)})
    line = exact({n: n / 4 for n in (256, 512, 2048, 4096)})
    (there,), (back,) = crossovers([square, line]), crossovers([line, square])
    assert (there.before, there.after, back.before, back.after) == (0, 1, 1, 0)
    assert there.length == back.length == pytest.approx(1024)
    assert there.between == back.between == (512, 2048)
    assert crossovers([square, square]) == crossovers([square]) == crossovers([]) == []
    double = exact({n: 2 * t.median_ms for n, t in square.items()})
    assert crossovers([square, double]) == []


def test_curves_are_compared_at_common_lengths() -> None:
    one = exact({1: 1.0, 2: 1.0, 4: 9.0, 8: 9.0})
    (found,) = crossovers([one, exact({1: 2.0, 4: 2.0, 16: 1.0})])
    assert (found.before, found.after, found.between) == (0, 1, (1, 4))
    assert 1 < found.length < 4
    assert crossovers([one, exact({3: 1.0})]) == crossovers([one, {}]) == []


def test_equal_times_are_a_crossing_only_between_opposite_sides() -> None:
    flat = exact(dict.fromkeys((1, 2, 4, 8), 1.0))
    crossing = exact({1: 2.0, 2: 1.0, 4: 1.0, 8: 0.5})
    assert crossovers([flat, crossing]) == [
        Crossover(before=0, after=1, length=2.0, between=(1, 8))
    ]
    assert crossovers([flat, exact({1: 2.0, 2: 1.0, 4: 2.0, 8: 2.0})]) == []
    assert crossovers([flat, exact({1: 1.0, 2: 1.0, 4: 2.0, 8: 2.0})]) == []


def test_curves_may_cross_twice_and_each_pair_is_compared() -> None:
    wave = exact({1: 1.0, 2: 3.0, 4: 1.0})
    flat = exact(dict.fromkeys((1, 2, 4), 2.0))
    low = exact(dict.fromkeys((1, 2, 4), 1.5))
    found = crossovers([wave, flat, low])
    assert [(c.before, c.after) for c in found] == [(0, 1), (1, 0), (0, 2), (2, 0)]
    assert [1 < c.length < 2 for c in found] == [True, False, True, False]
    assert [c.between for c in found] == [(1, 2), (2, 4), (1, 2), (2, 4)]


def test_crossing_inside_the_range_of_the_repeats_is_ignored() -> None:
    """The medians cross at all four lengths, but the ranges overlap at three of them."""
    one = {1: times(1, 2, 3), 2: times(1, 2, 3), 4: times(1, 2, 3), 8: times(1, 2, 3)}
    noise = {
        1: times(2, 2.1, 4),
        2: times(0.5, 1.9, 2.5),
        4: times(3, 3.1, 4),
        8: times(0, 0.5, 0.9),
    }
    assert crossovers([one, noise]) == []  # at 4 the slowest repeat is not below, but equal


def test_crossing_is_between_the_nearest_lengths_without_overlap() -> None:
    one = dict.fromkeys((1, 2, 4, 8, 16), times(9, 10, 11))
    other = {
        1: times(19, 20, 21), 2: times(10, 11, 12), 4: times(9, 9.5, 12), 8: times(10, 10.5, 11),
        16: times(4, 5, 6),
    }  # fmt: skip
    (found,) = crossovers([one, other])
    assert (found.before, found.after, found.between) == (0, 1, (1, 16))
    assert 2 < found.length < 4  # the first crossing of the medians


# ------------------------------------------------------------ runs


def new_job(sweep: SweepRequest, curve: Curve, length: int) -> Job:
    plan = sweep.plan(curve, length)
    return Job(plan, sweep.draw(plan, length))


def test_inputs_are_the_same_for_all_variants() -> None:
    fields = {"variants": ["softmax", "linear", "mean"], "lengths": [5, 7], **SMALL, "seed": 3}
    sweep, again = SweepRequest(fields, UNLIMITED), SweepRequest(fields, UNLIMITED)
    jobs = [new_job(sweep, c, 7) for c in sweep.curves]
    for job in jobs:
        for name, tensor in job.tensors.items():
            assert tensor.shape == (1, 2, 7, 8)
            assert bytes(tensor.data) == bytes(jobs[0].tensors[name].data)
    twin = new_job(again, again.curves[0], 7)
    other = SweepRequest(fields | {"seed": 4}, UNLIMITED)
    apart = new_job(other, other.curves[0], 7)
    for name, tensor in jobs[0].tensors.items():
        assert bytes(tensor.data) == bytes(twin.tensors[name].data)
        assert bytes(tensor.data) != bytes(apart.tensors[name].data)
    query, key = (jobs[0].tensors[n].numpy() for n in ("query", "key"))
    assert not np.array_equal(query, key)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_inputs_are_normal_in_every_dtype(dtype: str) -> None:
    fields = {"variants": ["softmax"], "lengths": [512], "dtype": dtype, "batch": 2}
    sweep = SweepRequest(fields, UNLIMITED)
    query = new_job(sweep, sweep.curves[0], 512).tensors["query"].numpy()
    assert query.dtype == DTYPES[dtype]
    assert query.shape == (2, 8, 512, 64)
    assert abs(query.astype("f8").mean()) < 0.01
    assert abs(query.astype("f8").std() - 1) < 0.01


def test_every_cell_is_reported_in_order(server: Server) -> None:
    linformer = {"variant": "linformer", "parameters": {"rank": 4}}
    events = run_sweep(server, variants=["softmax", linformer], lengths=[16, 64, 32])
    names = [name for name, _ in events]
    assert names == ["progress", "cell"] * 6 + ["done"]
    progress = [data for name, data in events if name == "progress"]
    assert [p["done"] for p in progress] == list(range(6))
    assert all(p.keys() == {"done", "total", "variant", "length"} for p in progress)
    cells = [data for name, data in events if name == "cell"]
    places = [(c["index"], c["variant"], c["length"]) for c in cells]
    order = [(0, "softmax"), (1, "linformer")]
    assert places == [(i, name, n) for n in (16, 64, 32) for i, name in order]
    for cell, before in zip(cells, progress, strict=True):
        assert cell.keys() == CELL
        assert (before["variant"], before["length"]) == (cell["variant"], cell["length"])
        assert before["total"] == 6
        assert 0 < cell["least_ms"] <= cell["median_ms"] <= cell["most_ms"]
        assert cell["repeats"] == 2
        assert cell["bytes"] == 4 * 4 * 2 * cell["length"] * 8
        assert cell["peak_bytes"] >= cell["bytes"] // 4
    assert [c["flops"] for c in cells if not c["index"]] == [4 * 2 * n**2 * 8 for n in (16, 64, 32)]
    assert cells[1]["parameters"] == {"rank": 4}
    assert events[-1][1]["cells"] == 6
    curves = [
        {
            c["length"]: times(c["least_ms"], c["median_ms"], c["most_ms"])
            for c in cells
            if c["index"] == i
        }
        for i in (0, 1)
    ]
    reported = [Crossover.model_validate(c) for c in events[-1][1]["crossovers"]]
    assert reported == crossovers(curves)


def test_decoding_times_the_next_token_and_tells_what_is_kept(server: Server) -> None:
    """Softmax twice, from a cache and from all tokens; the other two from their states."""
    events = run_sweep(server, variants=["softmax", "linear", "gated"], lengths=[16, 70],
                       mode="decode", dtype="float64")  # fmt: skip
    cells = [data for name, data in events if name == "cell"]
    ways = [("softmax", "recompute"), ("softmax", "cache"), ("linear", "state"), ("gated", "state")]
    assert [(c["variant"], c["way"]) for c in cells] == 2 * ways
    assert [c["index"] for c in cells] == 2 * [0, 1, 2, 3]
    assert events[0][1]["total"] == 8
    kept = {(c["length"], c["index"]): c["held_bytes"] for c in cells}
    row = 2 * 8 * 8  # two heads of width 8 in float64
    assert [kept[n, 0] for n in (16, 70)] == [0, 0]
    assert [kept[n, 1] for n in (16, 70)] == [2 * 17 * row, 2 * 71 * row]
    numbers = 8 * (8 + 1)  # of the version and the length of the tail
    assert [kept[n, 2] for n in (16, 70)] == 2 * [numbers + 9 * row + 2 * 63 * row]
    assert [kept[n, 3] for n in (16, 70)] == 2 * [numbers + 8 * row + 2 * 63 * row]
    assert all(0 < c["least_ms"] <= c["median_ms"] <= c["most_ms"] for c in cells)


def test_decoding_from_a_cache_has_the_output_of_the_last_row() -> None:
    """One query attends to all keys."""
    request = {"variants": ["softmax"], "lengths": [40], "mode": "decode", **SMALL}
    sweep = SweepRequest(request, UNLIMITED)
    every, cached = (new_job(sweep, curve, 40) for curve in sweep.curves)
    query = np.ascontiguousarray(every.tensors["query"].numpy()[:, :, -1:])
    cached = Job(cached.plan, {**cached.tensors, "query": RawTensor.from_numpy(query)})
    outputs = []
    for job in (every, cached):
        assert job.tensors["key"].shape == (1, 2, 41, 8)
        (result,) = execute([job], CpuDevice(), stack=False)
        outputs.append(result.outputs["output"].numpy()[:, :, -1:])
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)


def test_variant_that_cannot_decode_is_refused(server: Server) -> None:
    body = SMALL | {"variants": ["linear", "linformer"], "lengths": [8], "mode": "decode"}
    problem = assert_problem(server.http.post(SWEEP, json=body), 422)
    assert problem["detail"].startswith("linformer cannot decode: got no state and no parameter")
    assert problem["pointer"] == "/variants/1"


def test_integers_may_have_a_decimal_point(server: Server) -> None:
    """JSON Schema takes 8.0 for an integer."""
    body = b'{"variants":["mean"],"lengths":[8.0],"heads":1e0,"seed":7.0,"repeats":1.0}'
    assert server.http.post(SWEEP, content=body).is_success


def test_each_repeat_is_a_job_of_lowest_priority(
    server: Server, submitted_jobs: list[tuple[Job, int]]
) -> None:
    run_sweep(server, variants=["linear"], lengths=[8, 16], repeats=3)
    peaks = [job.plan.measurement.peak for job, _ in submitted_jobs]
    assert peaks == [True, False, False, False] * 2
    assert all(job.plan.measurement.alone for job, _ in submitted_jobs)
    assert {priority for _, priority in submitted_jobs} == {3}


def test_cell_that_cannot_run_has_a_problem_and_the_sweep_continues(
    serve: Callable[..., Server],
) -> None:
    small = serve(max_scores=2 * 100 * 100, max_queue_bytes=1 << 20, max_response_bytes=1 << 18)
    events = run_sweep(small, variants=["softmax", "linear"], lengths=[64, 128, 1 << 14])
    cells = [data for name, data in events if name == "cell"]
    problems = {(c["index"], c["length"]): c["problem"] for c in cells if "problem" in c}
    assert problems.keys() == {(0, 128), (0, 1 << 14), (1, 1 << 14)}
    for cell in cells:
        assert cell.keys() == CELL or cell.keys() == {
            "index", "variant", "parameters", "length", "problem",
        }  # fmt: skip
    assert all(p["type"] == "urn:qkv:problem:payload-too-large" for p in problems.values())
    assert problems[0, 128]["limit"] == 20_000
    assert events[-1] == ("done", {"cells": 6, "crossovers": events[-1][1]["crossovers"]})
    huge = run_sweep(
        small, variants=["mean"], lengths=[1 << 20], batch=4096, heads=4096, width=65536
    )
    assert huge[1][1]["problem"]["status"] == 413


def test_deadline_applies_to_each_run(server: Server) -> None:
    body = SMALL | {"variants": ["mean"], "lengths": [8]}
    headers = {"X-Request-Timeout": "0.05"}
    with (
        server.hold(),
        server.http.stream("POST", SWEEP, json=body, headers=headers) as response,
    ):
        events = list(parse_events(response.iter_lines()))
    assert events[1][1]["problem"]["type"] == "urn:qkv:problem:deadline-exceeded"
    assert_problem(server.http.post(SWEEP, json=body, headers={"X-Request-Timeout": "soon"}), 400)


@pytest.mark.slow
@examples(300)
@hypothesis.given(
    strategies.dictionaries(
        strategies.sampled_from([*SweepFields.model_fields, "no"]),
        strategies.recursive(
            strategies.none() | strategies.integers(-3, 2**65) | strategies.floats()
            | strategies.sampled_from(["mean", "softmax", "float16", "variant", ""]),
            lambda inner: strategies.lists(inner, max_size=3)
            | strategies.dictionaries(strategies.sampled_from(["variant", "parameters"]), inner),
            max_leaves=6,
        ),
    )
)  # fmt: skip
def test_random_requests_are_rejected_or_have_cells(fields: dict[str, Any]) -> None:
    document = {"variants": ["mean"], "lengths": [8]} | fields
    limits = Limits(response_bytes=1 << 24, job_bytes=1 << 24)
    try:
        sweep = SweepRequest(wire_json.decode_fields(json.dumps(document).encode()), limits)
    except QkvError as error:
        assert_client_error(error, document)
        return
    for length in sweep.lengths:
        for curve in sweep.curves:
            try:
                job = new_job(sweep, curve, length)
            except PayloadTooLarge:
                continue
            assert job.plan.inputs.nbytes <= 1 << 24


def test_response_is_events(server: Server, serve: Callable[..., Server]) -> None:
    body = SMALL | {"variants": ["mean"], "lengths": [8]}
    for accept in ("application/vnd.safetensors", "text/event-stream;q=0"):
        assert_problem(server.http.post(SWEEP, json=body, headers={"Accept": accept}), 406)
    for accept in ("text/event-stream", "text/*", "application/json", "*/*"):
        assert server.http.post(SWEEP, json=body, headers={"Accept": accept}).is_success
    assert_problem(server.http.get(SWEEP), 405)
    tight = serve(max_body_bytes=20)
    assert assert_problem(tight.http.post(SWEEP, json=body), 413)["limit"] == 20


@pytest.mark.parametrize(
    ("named", "length", "sizes"),
    [
        ({"variant": "mean", "parameters": {"method": "loop"}}, 16384, {"heads": 1, "width": 256}),
        ({"variant": "softmax", "parameters": {"dropout": 0.5}}, 32768, {"heads": 1, "width": 64}),
        ({"variant": "softmax"}, 1 << 18, {"heads": 1, "width": 1}),
    ],
)
def test_small_requests_cannot_occupy_a_worker_for_minutes(
    server: Server, named: dict[str, Any], length: int, sizes: dict[str, int]
) -> None:
    """Each of these occupied a worker for a minute or more, also after the client disconnected."""
    events = run_sweep(server, variants=[named], lengths=[length], **sizes)
    assert events[1][1]["problem"]["status"] == 413
