"""Runs over a real socket."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.jobs.job import Job
from support.json_requests import EXAMPLE, LEADS, TENSORS, post, random_layer, run_request, tensors
from support.known_requests import FLOATING, Case, as_array, as_json
from support.service import Server
from support.sweep_requests import submitted_jobs as submitted_jobs

TIMES = ("queue_ms", "transfer_ms", "compute_ms", "total_ms")


pytestmark = pytest.mark.usefixtures("nothing_is_logged_as_an_error")


def test_example_of_the_design(server: Server) -> None:
    response = run_request(server, EXAMPLE | {"parameters": {"causal": True}, "weights": "full"})
    assert list(response) == ["variant", "outputs", "weights_are", "timing"]
    assert response["variant"] == "softmax"
    outputs = {name: np.round(tensor, 4).tolist() for name, tensor in response["outputs"].items()}
    assert outputs == {
        "output": [[1.0, 2.0], [2.3395, 3.3395]],
        "weights": [[1.0, 0.0], [0.3302, 0.6698]],
    }
    timing = response["timing"]
    assert {n: timing[n] for n in timing if n not in TIMES} == {
        "batch_size": 1, "device": "cpu", "backend": "explicit", "flops": 32, "bytes": 80,
    }  # fmt: skip


def test_requests_have_the_default_priority(
    server: Server, submitted_jobs: list[tuple[Job, int]]
) -> None:
    large = np.ones((8, 1024, 64), np.float32)
    with qkv.Client(server.url) as client:
        client.attend("softmax", query=large, key=large, value=large, outputs=["output"])
    assert submitted_jobs
    assert not {priority for _, priority in submitted_jobs} & {1, 3}


@pytest.mark.parametrize("encoding", ["lists", "base64"])
@pytest.mark.parametrize("rank", LEADS)
def test_response_has_the_rank_of_the_request(server: Server, rank: int, encoding: str) -> None:
    case = Case(tensors(rank), encoding=encoding)
    outputs = run_request(server, case.document)["outputs"]
    case.check(outputs)
    assert list(outputs) == ["output", "weights", "scores"]
    assert as_array(outputs["output"]).shape == (*LEADS[rank], 3, 6)
    assert as_array(outputs["weights"]).shape == (*LEADS[rank], 3, 5)
    assert as_array(outputs["scores"]).shape == (*LEADS[rank], 3, 5)


@pytest.mark.parametrize("dtype", FLOATING)
def test_dtype_is_the_dtype_of_lists(server: Server, dtype: str) -> None:
    inputs = tensors(3, dtype)
    listed = Case(inputs, dtype=dtype, encoding="lists").document | {"encoding": "base64"}
    response = run_request(server, listed)
    assert response["outputs"] == run_request(server, Case(inputs, dtype=dtype).document)["outputs"]
    exact = "float64" if dtype == "float64" else "float32"
    dtypes = {name: tensor["dtype"] for name, tensor in response["outputs"].items()}
    assert dtypes == {"output": dtype, "weights": exact, "scores": exact}


def test_lists_are_float32_by_default(server: Server) -> None:
    assert (
        run_request(server, EXAMPLE, encoding="base64")["outputs"]["output"]["dtype"] == "float32"
    )


def test_response_has_the_encoding_of_the_request(server: Server) -> None:
    mixed = {n: as_json(a, "lists") for n, a in tensors(2).items()}
    for name in mixed:
        inputs = mixed | {name: as_json(tensors(2)[name], "base64")}
        first = "base64" if name == "query" else "lists"
        for fields, expected in (({}, first), ({"encoding": None}, first)):
            output = run_request(server, {"inputs": inputs}, **fields)["outputs"]["output"]
            assert isinstance(output, dict) == (expected == "base64")
        for encoding in ("lists", "base64"):
            outputs = run_request(server, {"inputs": inputs}, encoding=encoding)["outputs"]
            assert all(isinstance(t, dict) == (encoding == "base64") for t in outputs.values())


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["output", "weights"]),
        ({"outputs": None}, ["output", "weights"]),
        ({"weights": "full"}, ["output", "weights"]),
        ({"weights": "none"}, ["output"]),
        ({"outputs": ["output"]}, ["output"]),
        ({"outputs": ["weights"]}, ["weights"]),
        ({"outputs": ["scores"]}, ["scores"]),
        ({"outputs": ["scores", "output"]}, ["output", "scores"]),
        ({"outputs": ["output"], "weights": "none"}, ["output"]),
        ({"outputs": ["output", "weights", "scores"]}, ["output", "weights", "scores"]),
    ],
)
def test_requested_outputs_are_returned(
    server: Server, fields: dict[str, Any], names: list[str]
) -> None:
    case = Case(tensors(4), {"causal": True}, outputs=tuple(names))
    response = run_request(
        server, {k: v for k, v in case.document.items() if k != "outputs"}, **fields
    )
    assert list(response["outputs"]) == names
    case.check(response["outputs"])


def test_timing_is_in_the_body_and_in_a_header(server: Server) -> None:
    response = post(server, Case(tensors(4)).document)
    timing = response.json()["timing"]
    assert timing.keys() == {*TIMES, "batch_size", "device", "backend", "flops", "bytes"}
    assert all(isinstance(timing[name], float) and timing[name] >= 0 for name in TIMES)
    assert timing["compute_ms"] > 0
    assert sum(timing[name] for name in TIMES[:3]) <= timing["total_ms"]
    header = dict(re.findall(r"(\w+);dur=([\d.]+)", response.headers["server-timing"]))
    assert {f"{n}_ms": float(t) for n, t in header.items()} == {
        n: round(timing[n], 4) for n in TIMES
    }


@pytest.mark.parametrize("outputs", [("output",), ("weights", "output"), ("scores",)])
def test_flops_and_bytes_are_the_analytic_counts(server: Server, outputs: tuple[str, ...]) -> None:
    B, H, G, L, S, D, E = 2, 4, 2, 3, 5, 8, 6
    mask = np.ones((1, S), bool)
    case = Case(tensors(4, "float16") | {"mask": mask}, dtype="float16", outputs=outputs)
    timing = run_request(server, case.document)["timing"]
    assert timing["flops"] == 2 * B * H * L * S * (D + E)
    input_bytes = 2 * (B * H * L * D + B * G * S * (D + E)) + S
    output_bytes = {
        "output": 2 * B * H * L * E,
        "weights": 4 * B * H * L * S,
        "scores": 4 * B * H * L * S,
    }
    assert timing["bytes"] == input_bytes + sum(output_bytes[name] for name in outputs)


@pytest.mark.parametrize("x_shape", [(3, 4), (2, 3, 4)])
@pytest.mark.parametrize(("heads", "axis"), [(None, ()), (1, (1,)), (2, (2,)), (6, (6,))])
def test_heads_add_an_axis_to_weights_and_scores(
    server: Server, x_shape: tuple[int, ...], heads: int | None, axis: tuple[int, ...]
) -> None:
    x = np.random.default_rng(0).normal(size=x_shape).astype(np.float32)
    document: dict[str, Any] = {
        "inputs": {"x": as_json(x, "base64")},
        "layer": random_layer("v1", 4, 6) | ({} if heads is None else {"heads": heads}),
        "outputs": ["output", "weights", "scores"],
    }
    outputs = {n: as_array(t) for n, t in run_request(server, document)["outputs"].items()}
    assert outputs["output"].shape == (*x_shape[:-1], 6)
    shape = (*x_shape[:-2], *axis, 3, 3)
    assert outputs["weights"].shape == outputs["scores"].shape == shape
    named = document["layer"]["tensors"]
    query, key, value = (x @ as_array(named[f"W_{role}"]) for role in TENSORS)
    lead, count, width = x_shape[:-2], heads or 1, 6 // (heads or 1)
    split = {
        n: np.moveaxis(t.reshape(*lead, 3, count, width), -2, -3).reshape(-1, count, 3, width)
        for n, t in (("query", query), ("key", key), ("value", value))
    }
    merged = np.moveaxis(outputs["output"].reshape(*lead, 3, count, width), -2, -3)
    Case(split, outputs=("output",)).check(
        {"output": as_json(merged.reshape(-1, count, 3, width), "base64")}
    )


def test_nan_and_infinity_are_strings_in_json(server: Server) -> None:
    words = EXAMPLE["inputs"] | {"value": [["Infinity", 2], ["-Infinity", "NaN"]]}
    outputs = run_request(server, {"inputs": words})["outputs"]["output"]
    assert outputs == [["NaN", "NaN"], ["NaN", "NaN"]]
    mask = EXAMPLE["inputs"] | {"mask": [[0.0, "-Infinity"], ["-Infinity", "-Infinity"]]}
    response = run_request(server, {"inputs": mask}, outputs=["output", "scores"])
    assert response["outputs"]["output"] == [[1.0, 2.0], [0.0, 0.0]]
    assert response["outputs"]["scores"][1] == ["-Infinity", "-Infinity"]


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-40, 1e-50, 1e9, -1e9])
@pytest.mark.parametrize("outputs", [("output",), ("output", "weights", "scores")])
def test_any_scale_gives_finite_outputs(
    server: Server, scale: float, outputs: tuple[str, ...]
) -> None:
    small = {n: np.sign(a) * 2.0**-20 for n, a in tensors(4).items()}
    inputs = {n: a.astype(np.float32) for n, a in small.items()}
    for causal in (False, True):
        case = Case(inputs, {"scale": scale, "causal": causal}, outputs=outputs)
        case.check(run_request(server, case.document)["outputs"])


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["lists", "base64"])
def test_large_bodies_are_handled_in_threads(server: Server, encoding: str) -> None:
    """Bodies and responses above 256 KiB are parsed and encoded in a thread."""
    draw = np.random.default_rng(1)
    inputs = {n: draw.normal(size=(640, 600)).astype(np.float32) for n in ("query", "key", "value")}
    case = Case(inputs, {"causal": True}, outputs=("output", "weights"), encoding=encoding)
    case.check(run_request(server, case.document)["outputs"])
