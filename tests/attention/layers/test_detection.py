"""Detection by running: real modules are found, wrong candidates are far worse, doubt is named."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import pytest
import torch

from qkv import AsyncClient, Client, Detected, QkvError
from qkv.attention.layers.detection import MAX_DETECTED, MAX_TOKENS, Check, detect
from qkv.attention.layers.layer_options import LayerOptions
from qkv.client.detected import build_detect
from qkv.errors import InvalidContent
from qkv.jobs.convert import working_bytes
from qkv.tensors import RawTensor
from qkv.wire import safetensors
from qkv.wire.message import Message
from support.known_requests import as_json, assert_problem
from support.real_layers import REAL_LAYERS, llama
from support.service import Server

EPS: Final = torch.finfo(torch.float32).eps
M: Final = 16


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def plain(
    heads: int = 2, length: int = 6, dtype: str = "float32", scale: float | None = None
) -> tuple[dict[str, Any], Any, Any]:
    """Returns a layer v1 with an output projection, x, and its output by plain numpy."""
    draw = np.random.default_rng(0)
    names = ("W_query", "W_key", "W_value", "W_output")
    tensors = {name: draw.normal(size=(M, M)).astype(dtype) for name in names}
    x = draw.normal(size=(length, M)).astype(dtype)
    query, key, value, output = (tensors[name].astype(float) for name in names)
    parts = []
    for h in range(heads):
        columns = slice(h * M // heads, (h + 1) * M // heads)
        scores = (x @ query[:, columns]) @ (x @ key[:, columns]).T
        weights = np.exp(scores * (scale or (M // heads) ** -0.5))
        parts.append(weights / weights.sum(1, keepdims=True) @ (x @ value[:, columns]))
    return tensors, x, (np.concatenate(parts, 1) @ output).astype(dtype)


def interleaved(state: Mapping[str, torch.Tensor], heads: Mapping[str, int]) -> dict[str, Any]:
    """Returns Llama's weights in Meta's order, by Meta's formula, under their names."""
    changed = dict(state)
    for name, count in heads.items():
        weight = state[name]
        changed[name] = (
            weight.view(count, 2, -1, weight.shape[1]).transpose(1, 2).reshape_as(weight)
        )
    return changed


@pytest.mark.slow  # transformers takes 3 s to import
@pytest.mark.parametrize("name", REAL_LAYERS)
def test_real_module_is_found_and_others_are_a_thousand_times_worse(
    client: Client, name: str
) -> None:
    """Candidates of another layout that compute the same have the same error, and are no others."""
    real = REAL_LAYERS[name]()
    found = client.detect(real.state, real.x, real.y)
    best = found[0]
    assert {n: getattr(best, n) for n in real.expected} == real.expected
    assert best.error < 100 * EPS
    others = [f for f in found if f.error > best.error + 1e-12]
    if name != "qwen3":  # eps of its norm changes little
        assert others[0].error > 1000 * best.error
    assert [f.error for f in found] == sorted(f.error for f in found)
    assert len(found) == MAX_DETECTED


@pytest.mark.slow
@pytest.mark.representative
def test_metas_order_of_the_same_weights_is_found_as_interleaved(client: Client) -> None:
    real = llama()
    state = interleaved(real.state, {"q_proj.weight": 8, "k_proj.weight": 2})
    best, second, *_ = client.detect(state, real.x, real.y)
    assert (best.layout, best.rotary, best.heads, best.kv_heads) == ("llama", "interleaved", 8, 2)
    assert best.error < 100 * EPS
    assert second.error > 1000 * best.error


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_found_within_their_bound(client: Client, dtype: torch.dtype) -> None:
    real = llama(dtype)
    best, second, *_ = client.detect(real.state, real.x, real.y)
    assert {n: getattr(best, n) for n in real.expected} == real.expected
    assert best.error < 4 * torch.finfo(dtype).eps < 2 * second.error


@pytest.mark.slow
def test_layer_in_a_whole_model_is_selected_by_prefix(client: Client) -> None:
    real = REAL_LAYERS["bert"]()
    state = {f"layer.{i}.attention.{n}": t for i in (0, 1) for n, t in real.state.items()}
    best = client.detect(state, real.x, real.y, prefix="layer.1.attention")[0]
    assert (best.layout, best.heads) == ("bert", 4)
    with pytest.raises(QkvError, match="prefix is missing"):
        client.detect(state, real.x, real.y)


@pytest.mark.parametrize(("heads", "scale"), [(1, None), (2, 1.0), (4, 0.3), (16, None)])
def test_heads_and_scale_are_found(client: Client, heads: int, scale: float | None) -> None:
    tensors, x, y = plain(heads, scale=scale)
    best, second, *_ = client.detect(tensors, x, y, scale=scale)
    assert (best.layout, best.heads, best.kv_heads, best.rotary) == ("v1", heads, heads, None)
    assert best.scale == pytest.approx(scale or math.sqrt(heads / M))
    assert best.error < 100 * EPS
    assert second.error > 100 * best.error


def test_result_runs_as_a_layer_with_the_same_output(client: Client) -> None:
    tensors, x, y = plain(scale=1.0)
    best = client.detect(tensors, x, y)[0]
    layer = best.layer | {"tensors": tensors}
    run = client.attend("softmax", x=x, layer=layer, outputs=["output"], **best.parameters)
    assert np.abs(run.output - y).max() <= 100 * EPS * np.abs(y).max()
    assert repr(best).startswith("Detected(v1, heads=2, kv_heads=2, positions: none, scale=1, not")


def test_async_client_returns_the_same(server: Server, client: Client) -> None:
    tensors, x, y = plain()

    async def detect() -> list[Detected]:
        async with AsyncClient(server.url) as other:
            return await other.detect(tensors, x, y)

    assert asyncio.run(detect()) == client.detect(tensors, x, y)


def test_what_is_given_is_not_varied(client: Client) -> None:
    tensors, x, y = plain(heads=2)
    found = client.detect(tensors, x, y, source="v1", heads=4, rope={"base": 100.0})
    assert {f.heads for f in found} == {4}
    assert {f.rope["base"] for f in found if f.rope} <= {100.0}
    ordered = client.detect(tensors, x, y, heads=4, rope={"order": "half", "dims": 2})
    assert {(f.rotary, *(f.rope or {}).values()) for f in ordered} <= {
        (None,), ("half", 10000.0, "half", 2),
    }  # fmt: skip


def test_one_position_ties_and_the_simplest_is_first(client: Client) -> None:
    tensors, x, y = plain(length=1)
    best, *others = client.detect(tensors, x, y)
    assert (best.heads, best.rotary, best.causal, best.scale) == (1, None, False, 0.25)
    assert {f.error for f in others} == {best.error}


def post(server: Server, x: Any, y: Any, tensors: Any = None, **fields: Any) -> Any:
    tensors = {n: as_json(t, "base64") for n, t in (tensors or plain()[0]).items()}
    check = {n: as_json(t, "base64") for n, t in (("x", x), ("y", y))}
    return server.http.post(
        "/v1/convert", json={"from": "auto", "tensors": tensors, "check": check} | fields
    )


@pytest.mark.parametrize("form", ["lists", "base64"])
def test_response_without_to_has_the_candidates_only(server: Server, form: str) -> None:
    _, x, y = plain()
    response = post(server, x, y, encoding=form)
    assert response.status_code == 200, response.text
    reply = response.json()
    assert list(reply) == ["from", "prefix", "ignored", "detected"]
    assert (reply["from"], reply["prefix"], reply["ignored"]) == ("v1", "", [])


def test_best_candidate_is_converted(server: Server) -> None:
    _, x, y = plain()
    reply = post(server, x, y, to="bloom").json()
    assert (reply["from"], reply["to"], reply["detected"][0]["heads"]) == ("v1", "bloom", 2)
    assert set(reply["tensors"]) == {"query_key_value.weight", "dense.weight"}
    assert reply["layer"] == {"layout": "bloom", "heads": 2, "kv_heads": 2}
    assert reply["check"]["largest_absolute_difference"] < 1e-9


def test_conversion_of_a_doubtful_result_is_refused(server: Server) -> None:
    _, x, y = plain()
    problem = assert_problem(post(server, x, y[::-1].copy(), to="v2"), 422)
    assert problem["detail"].startswith("check fits no candidate: got an error of ")
    assert "v1 with heads=" in problem["detail"]
    assert "expected at most 0.0001" in problem["detail"]
    problem = assert_problem(post(server, x[:1], plain(length=1)[2], to="v2"), 422)
    assert problem["detail"].startswith("check does not tell candidates apart: got equal errors")


def degenerate() -> dict[str, tuple[Any, Any, str, str]]:
    _, x, y = plain()
    nan = np.full_like(y, np.nan)
    long = np.ones((MAX_TOKENS + 1, M), np.float32)
    return {
        "zeros": (x, np.zeros_like(y), "check.y is all zeros", "/check/y"),
        "zero x": (np.zeros_like(x), y, "check.x is all zeros", "/check/x"),
        "nan": (x, nan, "check.y is not finite", "/check/y"),
        "long": (long, long, "check.x is too large: got 257 hidden states", "/check/x"),
        "length": (x, y[:3], "check.y has the wrong shape: got [3, 16]", "/check/y"),
        "rank": (x[0], y[0], "check.x has the wrong shape: got [16]", "/check/x"),
        "empty": (x[:0], y[:0], "check.x has the wrong shape: got [0, 16]", "/check/x"),
        "width": (x[:, :8], y, "check.x has the wrong width: got 8, expected 16", "/check/x"),
        "output": (x, y[:, :8], "check.y has the wrong width: got 8, expected 16", "/check/y"),
        "infinite": (x * np.float32(np.inf), y, "check.x is not finite", "/check/x"),
    }  # fmt: skip


@pytest.mark.parametrize("case", degenerate())
def test_degenerate_check_is_refused_by_name(server: Server, case: str) -> None:
    x, y, detail, pointer = degenerate()[case]
    problem = assert_problem(post(server, x, y), 422)
    assert problem["detail"].startswith(detail)
    assert problem["pointer"] == pointer


def test_weights_that_give_no_finite_output_are_refused(server: Server) -> None:
    tensors, x, y = plain()
    tensors["W_value"][0] = np.inf
    problem = assert_problem(post(server, x, y, tensors), 422)
    assert problem["detail"].startswith("check.x gives no finite output")


@pytest.mark.parametrize(
    ("check", "pointer"),
    [
        ({}, "/check/x"), ({"x": [[1.0]]}, "/check/y"), ({"x": 1, "y": 2}, "/check/x"),
        ({"x": [[1]], "y": [[1]], "z": [[1]]}, "/check/z"), (1, "/check"),
        ({"x": [[1]], "y": [[1]], "z": None}, "/check/z"), ({"x": [["a"]]}, "/check/x"),
    ],
)  # fmt: skip
def test_malformed_check_is_refused_by_name(server: Server, check: Any, pointer: str) -> None:
    body = {"from": "v1", "tensors": {}, "check": check}
    problem = assert_problem(server.http.post("/v1/convert", json=body), 422, body)
    assert problem["pointer"] == pointer


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("dtype", ["int64", "bool"])
def test_check_that_is_not_floating_is_refused(server: Server, name: str, dtype: str) -> None:
    _, x, y = plain()
    sent = {"x": x, "y": y}
    sent[name] = np.ones_like(x, dtype)
    for fields in ({}, {"to": "v2"}):
        problem = assert_problem(post(server, **sent, **fields), 422)
        assert problem["detail"].startswith(f"check.{name} has the wrong dtype: got {dtype}")
        assert problem["pointer"] == f"/check/{name}"


def wide(width: int) -> dict[str, Any]:
    """Returns a layer of llama from one channel to one channel."""
    draw = np.random.default_rng(0)
    tensors = {f"{r}_proj.weight": draw.normal(size=(width, 1)) for r in "qkv"}
    tensors["o_proj.weight"] = draw.normal(size=(1, width))
    return {name: array.astype(np.float32) for name, array in tensors.items()}


@pytest.mark.parametrize(
    ("fields", "detail", "pointer"),
    [
        ({}, "heads is missing: got ", "/heads"),
        ({"heads": 8192}, "check.x is too large: got ", "/check/x"),
    ],
)
def test_work_of_many_heads_is_refused(
    server: Server, fields: dict[str, Any], detail: str, pointer: str
) -> None:
    """Few weights may have many projected channels, heads and scores."""
    x = np.random.default_rng(1).normal(size=(MAX_TOKENS, 1)).astype(np.float32)
    problem = assert_problem(post(server, x, x, wide(8192), **fields), 422)
    assert problem["detail"].startswith(detail)
    assert problem["pointer"] == pointer


class Pieces:
    """Counts the pieces of the work of a detection."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def pieces_until_refused(tensors: Mapping[str, Any], detail: str, **fields: Any) -> int:
    """Returns the count of pieces that run before a detection is refused."""
    pieces, x = Pieces(), np.ones((2, 4), np.float32)
    with pytest.raises(InvalidContent, match=detail):
        detect(tensors, Check(x, x), LayerOptions(**fields), raise_if_stopped=pieces)
    return pieces.count


def no_numbers(*shape: int, dtype: str = "float32") -> Any:
    """Returns an array of any shape that takes no memory."""
    return np.broadcast_to(np.ones((), dtype), shape)


def test_tensors_that_no_layout_reads_add_no_work() -> None:
    sent = {f"{r}_proj.weight": no_numbers(4, 4) for r in "qkvo"}
    sizes = [2**40, 720720, *range(200, 300)]
    more = {f"q_proj.{i}": no_numbers(size, dtype="bool") for i, size in enumerate(sizes)}
    detail = "q_proj.0 does not belong to this layout"
    assert pieces_until_refused(sent | more, detail, layout="llama") < 10


def test_too_many_numbers_of_heads_are_refused_before_one_is_tried() -> None:
    sizes = (720720, 665280), (554400, 498960)
    names = ("query_key_value.weight", "dense.weight")
    sent = {name: no_numbers(*shape) for name, shape in zip(names, sizes, strict=True)}
    detail = "heads is missing: got more than 4096 possible numbers of heads for falcon"
    assert pieces_until_refused(sent, detail, layout="falcon") == 0


@pytest.mark.parametrize("last", [1, 5, 30, 60])
def test_detection_ends_at_any_piece(last: int) -> None:
    tensors, x, y = plain()
    count = itertools.count(1)

    def stop_at_last() -> None:
        if next(count) == last:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        detect(tensors, Check(x, y), LayerOptions(layout="auto"), raise_if_stopped=stop_at_last)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("llama", "q_proj"), ("auto", "q_proj"), ("phi3", "qkv_proj"),
        ("neox", "query_key_value"), ("bloom", "query_key_value"), ("falcon", "query_key_value"),
    ],
)  # fmt: skip
def test_empty_bias_is_refused_by_name(server: Server, layout: str, name: str) -> None:
    one = np.ones((1, 1), np.float32)
    tensors = {f"{n}_proj.weight": one for n in "kv"} if name == "q_proj" else {}
    rows = 1 if name == "q_proj" else 3
    tensors |= {f"{name}.weight": one.repeat(rows, 0), f"{name}.bias": one[0, :0]}
    problem = assert_problem(post(server, one, one, tensors, **{"from": layout}), 422)
    assert problem["detail"].startswith(f"{name}.bias is invalid: got float32 of shape [0]")


def test_memory_of_projections_and_scores_is_admitted() -> None:
    x = RawTensor.from_numpy(np.ones((MAX_TOKENS, 1), np.float32))
    sent = {name: RawTensor.from_numpy(array) for name, array in wide(2048).items()}
    message = Message({"from": "auto"}, sent, check={"x": x, "y": x})
    projected, block = 8 * MAX_TOKENS * 3 * 2048, 8 * (1 << 22)
    assert working_bytes(message) > projected + 3 * block


def test_head_wider_than_a_rotary_embedding_may_be(client: Client) -> None:
    width = 1 << 18
    x = np.random.default_rng(1).normal(size=(3, 1)).astype(np.float32)
    found = client.detect(wide(width), x, x, source="llama", heads=1)
    assert all((f.rope or {}).get("dims", 2) <= 65536 for f in found)


def test_only_the_layer_at_the_prefix_is_sent() -> None:
    tensors, x, y = plain()
    state = {f"layers.{i}.{n}": t for i in (1, 10) for n, t in tensors.items()}
    state["layers.1.mask"] = np.ones(3, bool)
    spec = build_detect(state, x, y, {"from": "auto", "prefix": "layers.1"})
    sent = safetensors.decode(spec.content, "tensors")
    assert sent.tensors.keys() == {f"layers.1.{n}" for n in tensors}


def test_scale_without_check_and_no_target_are_refused(server: Server) -> None:
    tensors = {n: t.tolist() for n, t in plain()[0].items()}
    for fields, pointer in (({"to": "v2", "scale": 1.0}, "/scale"), ({}, "/to")):
        body = {"from": "v1", "tensors": tensors} | fields
        assert assert_problem(server.http.post("/v1/convert", json=body), 422)["pointer"] == pointer


def test_grouped_queries_of_a_fused_matrix_need_no_numbers_of_heads(client: Client) -> None:
    """Two groups of two query heads: rows are query heads, then key heads, then value heads."""
    draw = np.random.default_rng(3)
    fused = draw.normal(size=(8 * 8, M)).astype(np.float32)
    tensors = {"qkv_proj.weight": fused, "o_proj.weight": np.eye(32, dtype=np.float32)}
    x = draw.normal(size=(5, M)).astype(np.float32)
    layer = {"layout": "phi3", "heads": 4, "kv_heads": 2, "tensors": tensors}
    run = client.attend("softmax", x=x, layer=layer, outputs=["output"], causal=True)
    best = client.detect(tensors, x, run.output)[0]
    assert (best.layout, best.heads, best.kv_heads, best.causal) == ("phi3", 4, 2, True)
