"""States over HTTP: in every format and client, on another server, with the bits of the whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pytest
import torch

import qkv
from qkv.wire import safetensors
from qkv.wire.message import Message
from support.commands import error_of, read_tensors, stdout_of, write_tensors
from support.each import each
from support.known_requests import DTYPES, as_array, as_json, assert_problem
from support.service import Server
from support.state_requests import CASES, Arrays, Case
from support.state_requests import tokens as drawn_tokens
from support.triton_client import (
    infer_inputs,
    raises_inference_error,
    requested_outputs,
    triton_client,
)

CUTS: Final = (0, 1, 70, 71, 150)
DELTA: Final = CASES["gated gated_delta"]
PARAMETERS: Final[dict[str, Any]] = {**DELTA.parameters, "chunk": 32}
PATH: Final = "/v1/attention/gated"
NAMES: Final = (
    "state.version", "state.sums", "state.tail_length", "state.tail_key", "state.tail_value",
    "state.tail_log_decay", "state.tail_beta",
)  # fmt: skip
ONE_OF_EACH: Final = (
    "gated gated_delta", "linear True", "efficient True", "taylor True", "mean",
)  # fmt: skip


def tokens(case: Case = DELTA, dtype: str = "float32", channels: bool = False) -> Arrays:
    """Returns 150 tokens of two key heads; `gated` has four value heads."""
    heads = (2, 2, 4) if case.variant == "gated" else (4, 2, 2)
    return drawn_tokens(0, 150, case, heads=heads, D=8, E=6, channels=channels, dtype=dtype)


def parameters_of(case: Case) -> dict[str, Any]:
    return {**case.parameters, "chunk": 32}


def path_of(case: Case) -> str:
    return f"/v1/attention/{case.variant}"


def parts(inputs: Arrays) -> list[Arrays]:
    return [
        {n: np.ascontiguousarray(x[:, :, a:b]) for n, x in inputs.items()}
        for a, b in pairwise(CUTS)
    ]


def whole(url: str, inputs: Arrays, case: Case = DELTA) -> Arrays:
    """Returns output and state of all tokens in one request."""
    with qkv.Client(url) as client:
        run = client.attend(
            case.variant, **inputs, **parameters_of(case), outputs=["output", "state"]
        )
    return dict(run.outputs)


def names_of(outputs: Arrays) -> list[str]:
    """Returns the names of the tensors of the state, in their order."""
    return [name for name in outputs if name.startswith("state.")]


def assert_same(outputs: list[Any], state: Arrays, expected: Arrays) -> None:
    joined = np.concatenate(outputs, 2)
    assert joined.tobytes() == expected["output"].tobytes()
    assert names_of(state) == names_of(expected)
    for name in names_of(state):
        assert state[name].dtype == expected[name].dtype, name
        assert state[name].tobytes() == expected[name].tobytes(), name


@each(
    ("name", "dtype", "channels"),
    [
        ("gated gated_delta", "float64", True), ("gated gated_delta", "bfloat16", False),
        ("linear True", "float32", False), ("efficient True", "float16", False),
        ("taylor True", "float64", False), ("mean", "float32", False),
    ],
)  # fmt: skip
@each("form", ["lists", "base64"])
def test_json_carries_a_state_bit_for_bit(
    server: Server, name: str, dtype: str, form: str, channels: bool
) -> None:
    """The tensors of the response are those of the next request, as they are in the text."""
    case = CASES[name]
    inputs = tokens(case, dtype, channels)
    state: dict[str, Any] = {}
    outputs = []
    for some in parts(inputs):
        sent = {n: as_json(x, form) for n, x in some.items()}
        body: dict[str, Any] = {
            "inputs": {**sent, **state}, "parameters": parameters_of(case),
            "outputs": ["output", "state"], "dtype": dtype, "encoding": form,
        }  # fmt: skip
        response = server.http.post(path_of(case), json=body)
        assert response.status_code == 200, response.text
        found = json.loads(response.text)["outputs"]
        outputs.append(as_array(found.pop("output")).astype(DTYPES[dtype]))
        state = found
    expected = whole(server.url, inputs, case)
    assert [*state] == names_of(expected)
    decoded = {n: as_array(x).astype(expected[n].dtype) for n, x in state.items()}
    assert_same(outputs, decoded, expected)


@each("name", [*ONE_OF_EACH])
@each("dtype", ["float64", "bfloat16"])
def test_safetensors_carry_a_state_bit_for_bit(server: Server, name: str, dtype: str) -> None:
    """The service's bytes of each tensor are sent back as they are."""
    case = CASES[name]
    inputs = tokens(case, dtype)
    state: dict[str, Any] = {}
    outputs = []
    for some in parts(inputs):
        tensors = {n: qkv.tensors.RawTensor.from_numpy(x) for n, x in some.items()}
        fields = {"parameters": parameters_of(case), "outputs": ["output", "state"]}
        content = b"".join(safetensors.encode(Message(fields, {**tensors, **state}), "inputs"))
        media = {"content-type": safetensors.MEDIA_TYPE, "accept": safetensors.MEDIA_TYPE}
        response = server.http.post(path_of(case), content=content, headers=media)
        assert response.status_code == 200, response.text
        found = dict(safetensors.decode(response.content, "outputs").tensors)
        outputs.append(found.pop("output").numpy())
        state = found
    decoded = {n: x.numpy() for n, x in state.items()}
    assert_same(outputs, decoded, whole(server.url, inputs, case))


@each("name", [*ONE_OF_EACH])
@each("binary", [True, False])
def test_tritonclient_carries_a_state_bit_for_bit(server: Server, name: str, binary: bool) -> None:
    """The tensors are inputs and outputs of the model, by their names."""
    case = CASES[name]
    inputs, parameters = tokens(case), parameters_of(case)
    expected = whole(server.url, inputs, case)
    state: Arrays = {}
    outputs, names = [], names_of(expected)
    named = requested_outputs(**dict.fromkeys(("output", *names), binary))
    with triton_client(server.url) as client:
        metadata = client.get_model_metadata(case.variant)
        optional = {x["name"]: x["parameters"]["optional"] for x in metadata["inputs"]}
        assert all(optional[name] for name in names)
        assert {*names} <= {x["name"] for x in metadata["outputs"]}
        for some in parts(inputs):
            sent = infer_inputs({**some, **state}, None if binary else [])
            result = client.infer(case.variant, sent, outputs=named, parameters=parameters)
            outputs.append(result.as_numpy("output"))
            state = {name: result.as_numpy(name) for name in names}
        assert_same(outputs, state, expected)
        sent = infer_inputs(parts(inputs)[0])
        with raises_inference_error("outputs names state: expected each of its tensors"):
            wrong = requested_outputs(state=True)
            client.infer(case.variant, sent, outputs=wrong, parameters=parameters)


@each("binary", [True, False])
def test_no_token_continues_a_state_in_every_format(server: Server, binary: bool) -> None:
    """An axis of size 0 has no place in lists, which have no shape of their own."""
    inputs = tokens()
    expected = whole(server.url, inputs)
    none: Arrays = {n: x[:, :, :0] for n, x in inputs.items()}
    state = {n: expected[n] for n in NAMES}
    with qkv.Client(server.url) as client:
        run = client.attend("gated", **none, **PARAMETERS, state=state, outputs=["output", "state"])
    assert run.output.shape == (1, 4, 0, 6)
    assert_same([expected["output"], run.output], run.state, expected)
    sent = {n: as_json(x, "base64") for n, x in {**none, **state}.items()}
    fields = {"parameters": PARAMETERS, "outputs": ["output", "state"], "encoding": "base64"}
    response = server.http.post(PATH, json={"inputs": sent, **fields})
    assert response.status_code == 200, response.text
    found = {n: as_array(x) for n, x in response.json()["outputs"].items()}
    assert found["output"].shape == (1, 4, 0, 6)
    assert_same([expected["output"], found["output"]], found, expected)
    named = requested_outputs(**dict.fromkeys(("output", *NAMES), binary))
    with triton_client(server.url) as triton:
        inference = infer_inputs({**none, **state}, None if binary else [])
        result = triton.infer("gated", inference, outputs=named, parameters=PARAMETERS)
        assert_same([expected["output"]], {n: result.as_numpy(n) for n in NAMES}, expected)


def test_unstable_rule_has_a_note(server: Server) -> None:
    """In each protocol, of a run and of a comparison."""
    inputs = tokens()
    stable, grows = ({**inputs, "key": size * inputs["key"]} for size in (1.0, 3.0))
    with qkv.Client(server.url) as client:
        assert client.attend("gated", **stable, **PARAMETERS).notes == ()
        (note,) = client.attend("gated", **grows, **PARAMETERS).notes
        assert "beta |k|^2 of a token is above 2" in note
        arrays = {n: grows[n][:, :2] for n in ("query", "key", "value", "beta")}
        compared = client.compare([{"variant": "gated", "parameters": {"rule": "delta"}}], **arrays)
    assert f"gated: {note}." in compared.notes
    with triton_client(server.url) as triton:
        result = triton.infer("gated", infer_inputs(grows), parameters=PARAMETERS)
        assert result.get_response()["parameters"]["notes"] == note


def test_row_that_has_lost_digits_has_a_note(server: Server) -> None:
    """Keys opposite to the last query in `taylor`, and features that underflow in `linear`."""
    key = np.ones((1, 1, 40, 4)) + 1e-3 * np.random.default_rng(0).normal(size=(1, 1, 40, 4))
    value = np.random.default_rng(1).normal(size=(1, 1, 40, 3))
    alike: dict[str, Any] = {"query": np.abs(key), "key": key, "value": value}
    with qkv.Client(server.url) as client:
        for variant, other in (("taylor", {"query": -key}), ("linear", {"key": -700 * key})):
            options: Any = {"causal": True, "outputs": ["output", "state"]}
            assert client.attend(variant, **alike, **options).notes == ()
            (note,) = client.attend(variant, **{**alike, **other}, **options).notes
            assert note.startswith("the sum of the weights of a row has lost digits")


def test_a_state_of_one_server_continues_on_another(
    server: Server, serve: Callable[..., Server]
) -> None:
    """Nothing is kept: a retry has the same bits, and one state continues twice."""
    inputs, other = tokens(), serve()
    state: dict[str, Any] = {}
    outputs = []
    with qkv.Client(server.url) as one, qkv.Client(other.url) as two:
        for i, some in enumerate(parts(inputs)):
            arguments = {**some, **PARAMETERS, "state": state, "outputs": ["output", "state"]}
            run, again = (
                client.attend("gated", **arguments) for client in ((one, two), (two, two))[i % 2]
            )
            for name, array in run.outputs.items():
                assert array.tobytes() == again.outputs[name].tobytes()
            outputs.append(run.output)
            state = run.state
    assert_same(outputs, state, whole(server.url, inputs))


def test_both_clients_carry_a_state_of_either_library(server: Server) -> None:
    inputs = tokens()
    expected = whole(server.url, inputs)

    async def decode(kind: Callable[[Any], Any]) -> tuple[list[Any], dict[str, Any]]:
        async with qkv.AsyncClient(server.url) as client:
            state, outputs = None, []
            for some in parts(inputs):
                arrays = {n: kind(x) for n, x in some.items()}
                run = await client.attend(
                    "gated", **arrays, **PARAMETERS, state=state, outputs=["output", "state"]
                )
                state = run.state
                outputs.append(np.asarray(run.output))
            assert state is not None
            return outputs, state

    for kind in (np.asarray, torch.from_numpy):
        outputs, state = asyncio.run(decode(kind))
        assert all(isinstance(x, type(kind(inputs["query"]))) for x in state.values())
        assert_same(outputs, {n: np.asarray(x) for n, x in state.items()}, expected)


def test_a_compact_state_of_a_client_stays_compact(server: Server) -> None:
    """Sums alone are enough; a run that was not asked for a state has none."""
    inputs = tokens(dtype="float64")
    first, *rest = parts(inputs)
    expected = whole(server.url, inputs)
    with qkv.Client(server.url) as client:
        assert client.attend("gated", **first, **PARAMETERS).state == {}
        named = ["output", "state"]
        run = client.attend("gated", **first, **PARAMETERS, state="compact", outputs=named)
        outputs = [run.output]
        for some in rest:
            run = client.attend("gated", **some, **PARAMETERS, state=run.state, outputs=named)
            outputs.append(run.output)
        assert [*run.state] == ["state.version", "state.sums"]
        alone = {"state.sums": run.state["state.sums"]}
        again = client.attend("gated", **first, **PARAMETERS, state=alone, outputs=named)
        with_version = client.attend("gated", **first, **PARAMETERS, state=run.state, outputs=named)
    np.testing.assert_allclose(np.concatenate(outputs, 2), expected["output"], rtol=0, atol=1e-12)
    assert again.output.tobytes() == with_version.output.tobytes()


def test_errors_of_a_state_name_its_tensors(server: Server) -> None:
    with qkv.Client(server.url) as client:
        run = client.attend("gated", **tokens(), **PARAMETERS, outputs=["state"])
    inputs = {n: as_json(x, "base64") for n, x in {**tokens(), **run.state}.items()}
    for parameters, pointer in (
        ({**PARAMETERS, "scale": 1.0}, "/inputs/state.version"),
        ({**PARAMETERS, "rule": "linear"}, "/inputs"),
    ):
        body = {"inputs": inputs, "parameters": parameters}
        problem = assert_problem(server.http.post(PATH, json=body), 422)
        assert problem["pointer"].startswith(pointer)
    softmax = {n: inputs[n] for n in ("query", "key", "value", "state.sums")}
    bodies: list[dict[str, Any]] = [{"inputs": softmax}, {"inputs": softmax, "outputs": ["state"]}]
    for body in bodies:
        detail = assert_problem(server.http.post("/v1/attention/softmax", json=body), 422)["detail"]
        assert "state" in detail


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_command_line_continues_a_state(server: Server, tmp_path: Any, suffix: str) -> None:
    inputs, outputs = tokens(), []
    options = ["-p", "rule=gated_delta", "-p", "chunk=32", "--url", server.url]
    for i, some in enumerate(parts(inputs)):
        source = write_tensors(tmp_path / f"in{i}{suffix}", "inputs", some)
        target, saved = tmp_path / f"out{i}{suffix}", tmp_path / f"state{i}.safetensors"
        before = ["--state", tmp_path / f"state{i - 1}.safetensors"] if i else []
        stdout_of("attend", "gated", source, "-o", target, "--save-state", saved, *before, *options)
        found = read_tensors(target)
        assert [*found] == ["output"]
        outputs.append(found["output"])
    expected = whole(server.url, inputs)
    assert_same(outputs, read_tensors(saved), expected)
    wrong = ["--save-state", tmp_path / "state.npz", *options]
    assert "state.npz has none of the suffixes" in error_of(
        tmp_path, "attend", "gated", source, "-o", target, *wrong
    )
    no_state = ["--state", target, *options]
    assert "has no state" in error_of(tmp_path, "attend", "gated", source, "-o", target, *no_state)
