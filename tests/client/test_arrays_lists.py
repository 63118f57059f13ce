"""Both clients take lists, tuples and nested ones of them where they take arrays."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from qkv import Client, errors
from support.clients import client as client
from support.clients import in_asyncio, numbers, send_sync
from support.service import Server

INPUTS: dict[str, Any] = {
    "query": [[1, 0], [0.5, 1], [2, 2]],
    "key": ((1, 0), (0, 1), (1, 1)),
    "value": [(1, 2), np.array([3.0, 4.0]), array("f", [5, 6])],
}
ARRAYS = {name: np.asarray(value, np.float32) for name, value in INPUTS.items()}
both_clients = pytest.mark.parametrize("send", [send_sync, in_asyncio])


@both_clients
def test_lists_are_the_arrays_that_numpy_makes_of_them(
    server: Server, send: Callable[..., Any]
) -> None:
    found = send(server.url, lambda c: c.attend("softmax", **INPUTS, causal=True))
    expected = send(server.url, lambda c: c.attend("softmax", **ARRAYS, causal=True))
    assert type(found.output) is np.ndarray
    assert np.array_equal(found.output, expected.output)
    assert np.array_equal(found.weights, expected.weights)
    compared = send(server.url, lambda c: c.compare(["linear"], **INPUTS))
    expected = send(server.url, lambda c: c.compare(["linear"], **ARRAYS))
    assert compared.variants[0].output == expected.variants[0].output


@both_clients
def test_lists_beside_arrays_have_their_dtype(server: Server, send: Callable[..., Any]) -> None:
    inputs = numbers("float64") | {"sinks": [0.5, 1, 0, 0]}
    run = send(
        server.url,
        lambda c: c.attend("softmax", **inputs, key_lengths=[5, 2], window=[2, 0], mask=[[1.5]]),
    )
    expected = send(
        server.url,
        lambda c: c.attend(
            "softmax",
            **inputs | {"sinks": np.array(inputs["sinks"])},
            key_lengths=np.array([5, 2]),
            window=[2, 0],
            mask=np.array([[1.5]]),
        ),
    )
    assert run.output.dtype == np.float64
    assert np.array_equal(run.output, expected.output)
    half = torch.ones(2, 2, dtype=torch.bfloat16)
    mixed = {"query": [[1, 2], [3, 4]], "key": half, "value": half}
    run = send(server.url, lambda c: c.attend("softmax", outputs=["output"], **mixed))
    assert run.outputs["output"].dtype == np.dtype("bfloat16")


@both_clients
def test_gradients_and_layers_take_lists(server: Server, send: Callable[..., Any]) -> None:
    ones = [[1, 1], [1, 1], [1, 1]]
    found = send(server.url, lambda c: c.gradients("softmax", **INPUTS, grad_output=ones))
    plain = np.asarray(ones, np.float32)
    expected = send(server.url, lambda c: c.gradients("softmax", **ARRAYS, grad_output=plain))
    assert np.array_equal(found["query"], expected["query"])
    weights = {f"W_{name}": [[1, 0], [0, 1]] for name in INPUTS}
    layer = {"layout": "v1", "tensors": weights}
    run = send(server.url, lambda c: c.attend("softmax", x=INPUTS["query"], layer=layer))
    x = ARRAYS["query"]
    expected = send(server.url, lambda c: c.attend("softmax", query=x, key=x, value=x))
    assert np.array_equal(run.output, expected.output)
    converted = send(server.url, lambda c: c.convert(weights, source="v1", target="v2"))
    assert converted.tensors["W_query.weight"].tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("arguments", "detail"),
    [
        ({"query": [[1, 2], [3]]}, "query is ragged: got [[1, 2], [3]], expected lists of equal"),
        ({"query": [["a", "b"]]}, "query is invalid: got [['a', 'b']], expected nested lists of"),
        ({"query": [[1, 1e39]]}, "query has numbers outside the range of float32"),
        ({"key_lengths": [1.5]}, "key_lengths"),
        ({"key_lengths": [2**63]}, "key_lengths is invalid: got 9.2"),
        ({"mask": [[True, None]]}, "mask is invalid: got [[True, None]], expected nested lists"),
    ],
)
def test_invalid_list_is_an_error_with_its_name(
    client: Client, arguments: dict[str, Any], detail: str
) -> None:
    with pytest.raises(errors.InvalidContent) as caught:
        client.attend("softmax", **INPUTS | arguments)
    assert caught.value.detail.startswith(detail)


def test_numbers_of_lists_do_not_wrap(client: Client) -> None:
    with pytest.raises(errors.InvalidContent) as caught:
        client.convert({"W_query": [[1e39]]}, source="v1", target="v2")
    assert caught.value.detail.startswith("W_query has numbers outside the range of float32")
    ones = np.ones((1, 1), np.float32)
    weights = {"W_query": [[2**63]], "W_key": ones, "W_value": ones}
    converted = client.convert(weights, source="v1", target="v2")
    assert converted.tensors["W_query.weight"].tolist() == [[2.0**63]]


def test_list_is_an_input_only_of_the_variants_that_have_it(client: Client) -> None:
    for name in ("mean", "softmax"):
        entry = next(v for v in client.variants() if v["variant"] == name)
        assert ("sinks" in entry["inputs"]) == (name == "softmax")
    with pytest.raises(errors.InvalidContent) as caught:
        client.attend("mean", value=INPUTS["value"], sinks=[0])
    assert caught.value.detail.startswith("mean has no parameter 'sinks'")


def test_input_among_the_parameters_is_named_as_one(server: Server) -> None:
    body = {"inputs": {}, "parameters": {"query": [[1, 2]]}}
    problem = server.http.post("/v1/attention/softmax", json=body).json()
    assert problem["detail"] == (
        "softmax has no parameter 'query': got an input among the parameters, expected query as "
        "a tensor among the inputs"
    )
    assert problem["pointer"] == "/parameters/query"
