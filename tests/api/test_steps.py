"""Steps over HTTP: in every format and client, with a layer, and what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import numpy as np
import pytest

import qkv
from qkv.wire import safetensors
from qkv.wire.message import Message
from support.commands import read_tensors, stdout_of, write_tensors
from support.known_requests import as_array, as_json, assert_problem
from support.service import Server
from support.triton_client import (
    infer_inputs,
    raises_inference_error,
    requested_outputs,
    triton_client,
)

EPS: Final = float(np.finfo(np.float64).eps)
PATH: Final = "/v1/attention/softmax"
ALL: Final = ["output", "weights", "steps"]
NAMES: Final = (
    "query", "key", "value", "scores", "scaled", "masked", "exponentials", "row_sums", "weights",
    "terms", "output",
)  # fmt: skip


def inputs(L: int = 5, S: int = 5, **sizes: int) -> dict[str, Any]:
    """Returns normal inputs of 2 items, 4 heads and 2 key heads, of widths 3 and 2."""
    B, H, D = (sizes.get(x, n) for x, n in (("B", 2), ("H", 4), ("D", 3)))
    random = np.random.default_rng(0)
    shapes = {"query": (B, H, L, D), "key": (B, 2, S, D), "value": (B, 2, S, 2)}
    return {n: random.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}


def expected(url: str, **more: Any) -> dict[str, Any]:
    """Returns the steps of causal softmax by the client."""
    with qkv.Client(url) as client:
        return client.attend("softmax", **inputs(), causal=True, outputs=ALL, **more).steps


def assert_same(found: dict[str, Any], steps: dict[str, Any]) -> None:
    assert [*found] == [f"steps.{name}" for name in steps]
    for name, array in steps.items():
        assert found[f"steps.{name}"].tobytes() == array.tobytes(), name


def test_steps_lead_from_the_inputs_to_the_output(server: Server) -> None:
    with qkv.Client(server.url) as client:
        run = client.attend("softmax", **inputs(), causal=True, outputs=ALL)
        assert client.attend("softmax", **inputs()).steps == {}
        capped = client.attend("softmax", **inputs(), softcap=2.0, outputs=["steps"])
        (one,) = client.attend("softmax", **inputs(), outputs=["steps.scores"]).steps
    steps = run.steps
    assert [*steps] == [*NAMES]
    assert all(array.dtype == np.float64 for array in steps.values())
    np.testing.assert_array_equal(steps["query"], inputs()["query"])
    future = np.triu(np.ones((5, 5), bool), 1)
    assert (steps["masked"][..., future] == -np.inf).all()
    # the scale is rounded and applied
    np.testing.assert_allclose(
        steps["masked"][..., ~future], steps["scores"][..., ~future] / 3**0.5, rtol=2 * EPS, atol=0
    )
    np.testing.assert_allclose(steps["weights"], run.weights, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(steps["output"], run.output, rtol=1e-6, atol=1e-6)
    terms = steps["terms"]
    close = terms.shape[-2] * EPS * abs(terms).sum(-2)  # of sums in two orders
    assert (abs(terms.sum(-2) - steps["output"]) <= close).all()
    assert "capped" in capped.steps
    assert "masked" not in capped.steps
    assert one == "scores"


@pytest.mark.parametrize("form", ["lists", "base64"])
def test_json_has_steps(server: Server, form: str) -> None:
    body = {
        "inputs": {n: as_json(x, form) for n, x in inputs().items()}, "outputs": ["steps"],
        "parameters": {"causal": True}, "encoding": form,
    }  # fmt: skip
    response = server.http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    found = json.loads(response.text)["outputs"]
    assert_same({n: as_array(x) for n, x in found.items()}, expected(server.url))
    assert form == "base64" or found["steps.masked"][0][0][0][1] == "-Infinity"


def test_safetensors_and_tritonclient_have_steps(server: Server) -> None:
    tensors = {n: qkv.tensors.RawTensor.from_numpy(x) for n, x in inputs().items()}
    fields = {"parameters": {"causal": True}, "outputs": ["steps"]}
    content = b"".join(safetensors.encode(Message(fields, tensors), "inputs"))
    media = {"content-type": safetensors.MEDIA_TYPE, "accept": safetensors.MEDIA_TYPE}
    response = server.http.post(PATH, content=content, headers=media)
    found = safetensors.decode(response.content, "outputs").tensors
    assert_same({n: x.numpy() for n, x in found.items()}, expected(server.url))
    names = [f"steps.{name}" for name in NAMES]
    sent = infer_inputs(inputs())
    with triton_client(server.url) as client:
        listed = {x["name"]: x for x in client.get_model_metadata("softmax")["outputs"]}
        assert {*names} <= listed.keys()
        assert listed["steps.terms"]["datatype"] == "FP64"
        for binary in (True, False):
            outputs = requested_outputs(**dict.fromkeys(names, binary))
            result = client.infer("softmax", sent, outputs=outputs, parameters={"causal": True})
            assert_same({n: result.as_numpy(n) for n in names}, expected(server.url))
        with raises_inference_error("outputs names steps: expected each of its tensors"):
            client.infer("softmax", sent, outputs=requested_outputs(steps=True))


def test_other_clients_have_steps(server: Server, tmp_path: Any) -> None:
    """The asynchronous one, and the command line."""

    async def run() -> dict[str, Any]:
        async with qkv.AsyncClient(server.url) as client:
            return (await client.attend("softmax", **inputs(), causal=True, outputs=ALL)).steps

    steps = expected(server.url)
    assert_same({f"steps.{n}": x for n, x in asyncio.run(run()).items()}, steps)
    source, target = write_tensors(tmp_path / "in.npz", "inputs", inputs()), tmp_path / "out.npz"
    options = ["-p", "causal=true", "--return", "steps", "--url", server.url]
    stdout_of("attend", "softmax", source, "-o", target, *options)
    assert_same(read_tensors(target), steps)


def test_steps_of_a_layer_begin_with_its_heads(server: Server) -> None:
    random = np.random.default_rng(0)
    names = ("W_query", "W_key", "W_value")
    tensors = {f"{n}.weight": random.normal(size=(6, 6)) for n in names}
    x = random.normal(size=(1, 4, 6))
    layer = {"layout": "v2", "heads": 2, "tensors": tensors}
    with qkv.Client(server.url) as client:
        steps = client.attend("softmax", x=x, layer=layer, outputs=ALL).steps
    heads = x @ tensors["W_query.weight"].T
    close = 6 * EPS * (abs(x) @ abs(tensors["W_query.weight"].T))  # of sums in two orders
    error = abs(steps["query"].swapaxes(1, 2).reshape(1, 4, 6) - heads)
    assert (error <= close).all()
    assert steps["output"].shape == (1, 2, 4, 3)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"S": 65}, "inputs that are too large: got S=65, expected at most 64"),
        ({"B": 17}, "inputs that are too large: got B=17, expected at most 16"),
        ({"L": 64, "S": 64, "H": 8}, "steps that are too large: got "),
    ],
)
def test_steps_of_large_inputs_are_refused(
    server: Server, sizes: dict[str, int], message: str
) -> None:
    sent = {n: as_json(x, "base64") for n, x in inputs(**sizes).items()}
    response = server.http.post(PATH, json={"inputs": sent, "outputs": ["output", "steps"]})
    problem = assert_problem(response, 422)
    assert message in problem["detail"]
    assert problem["pointer"] == "/outputs"
    kept = server.http.post(PATH, json={"inputs": sent, "outputs": ["output"]})
    assert kept.status_code == 200


def test_steps_that_a_request_does_not_have_are_refused(server: Server) -> None:
    with qkv.Client(server.url) as client:
        same = {n: x[:, :2] for n, x in inputs().items()}
        run = client.attend("linear", **same, causal=True, outputs=["state", "steps"])
        assert run.steps
        assert run.state
        for outputs, state, message in (
            (["steps"], run.state, "outputs names steps beside a state: got state."),
            (["steps.nothing"], None, "linear has no output 'steps.nothing'"),
        ):
            with pytest.raises(qkv.QkvError, match=message):
                client.attend("linear", **same, causal=True, state=state, outputs=outputs)
        with pytest.raises(qkv.QkvError, match="softmax has no output 'steps"):
            client.attend("softmax", **same, outputs=["steps.capped"])


def test_catalogue_describes_steps(server: Server) -> None:
    for variant in server.http.get("/v1/variants").json()["variants"]:
        steps = variant["steps"]
        assert steps["names"][-1]["name"] == "output"
        assert steps["max_tokens"] == 64
