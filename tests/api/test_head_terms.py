"""Infinite sinks in every form, and gradients of slopes and sinks, over a real socket."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
import pytest
import torch

from qkv import Client
from qkv.attention.variants import softmax
from support.json_requests import LEADS, run_request, tensors
from support.known_requests import DTYPES
from support.references import reference_of
from support.service import Server

PARAMETERS: Final = {"causal": True, "query_offset": "end"}

pytestmark = pytest.mark.usefixtures("nothing_is_logged_as_an_error")


def terms(rank: int, seed: int, dtype: str = "float32") -> dict[str, Any]:
    """Returns a slope and a sink for each query head; a request of rank 2 or 3 has one head."""
    draw = np.random.default_rng(seed)
    heads = LEADS[rank][1] if rank == 4 else 1
    return {n: draw.normal(size=heads).astype(DTYPES[dtype]) for n in ("alibi_slopes", "sinks")}


def truth(inputs: dict[str, Any], rank: int) -> Any:
    """Returns the outputs of the reference, with the axes of the request."""
    query, key, value = (
        torch.from_numpy(inputs[n][(None,) * (4 - rank)] if rank != 3 else inputs[n][:, None])
        for n in ("query", "key", "value")
    )
    slopes, sinks = (
        torch.from_numpy(inputs[n].astype(np.float64)) for n in ("alibi_slopes", "sinks")
    )
    return reference_of(
        softmax.Call(
            query, key, value, alibi_slopes_H=slopes, sinks_H=sinks, causal=True, query_offset="end"
        )
    )


def test_infinite_sinks_in_every_form(server: Server) -> None:
    """All mass goes to a sink of inf, none to one of -inf, whatever form the weights have."""
    row, values = [0.0, 0.0], [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    inputs: dict[str, Any] = {
        "query": [[[row] * 2] * 2],
        "key": [[[row] * 3] * 2],
        "value": [[values] * 2],
    }
    inputs["sinks"] = ["Infinity", "-Infinity"]
    expected: dict[str, dict[str, Any]] = {
        "full": {"weights": [[[[0, 0, 0]] * 2, [[1 / 3] * 3] * 2]]},
        "none": {"output": [[[[0, 0]] * 2, [[2 / 3, 2 / 3]] * 2]]},
        "stats": {
            "entropy": [[[0, 0], [np.log(3)] * 2]], "largest": [[[0, 0], [1 / 3] * 2]],
            "effective_keys": [[[0, 0], [3, 3]]], "received": [[[0, 0, 0], [2 / 3] * 3]],
        },
        '{"rows": [1]}': {"weights": [[[[0, 0, 0]], [[1 / 3] * 3]]]},
        '{"top_k": 3}': {"weights": [[[[0, 0, 0]] * 2, [[1 / 3] * 3] * 2]]},
        '{"pool": 1}': {"weights": [[[[0]], [[1]]]]},
    }  # fmt: skip
    for form, arrays in expected.items():
        weights = json.loads(form) if form.startswith("{") else form
        outputs = run_request(server, {"inputs": inputs, "weights": weights})["outputs"]
        for name, array in arrays.items():
            # sums of three terms in float32, and their logarithm and exponential
            close = 8 * float(np.finfo(np.float32).eps)
            np.testing.assert_allclose(
                outputs[name], array, rtol=0, atol=close, err_msg=f"{form} {name}"
            )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rank", LEADS)
def test_gradients_have_the_shape_and_dtype_of_their_inputs(
    server: Server, rank: int, dtype: str
) -> None:
    inputs = tensors(rank) | terms(rank, 1, dtype)
    grad = np.ones((*inputs["query"].shape[:-1], inputs["value"].shape[-1]), np.float32)
    with Client(server.url) as client:
        found = client.gradients("softmax", grad_output=grad, **(inputs | PARAMETERS))
    for name in ("alibi_slopes", "sinks"):
        assert found[name].shape == inputs[name].shape
        assert found[name].dtype == inputs[name].dtype
        step = 1e-4 * np.eye(len(inputs[name]))[0]
        ahead, behind = (
            truth(inputs | {name: inputs[name] + by}, rank).output for by in (step, -step)
        )
        assert ahead is not None
        assert behind is not None
        slope = float((ahead - behind).sum()) / 2e-4
        assert abs(found[name][0] - slope) <= 1e-4 * max(1.0, abs(slope))
