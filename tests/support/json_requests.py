"""Requests to softmax in JSON, and layers for them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np

from support.known_requests import DTYPES, as_json
from support.service import Server

EYE = [[1, 0], [0, 1]]
EXAMPLE: dict[str, Any] = {"inputs": {"query": EYE, "key": EYE, "value": [[1, 2], [3, 4]]}}
TENSORS = ("query", "key", "value")
LEADS = {2: (), 3: (2,), 4: (2, 4)}


def post(server: Server, document: Any, path: str = "/v1/attention/softmax") -> httpx.Response:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return server.http.post(path, content=body, headers={"Content-Type": "application/json"})


def run_request(server: Server, document: Any, **fields: Any) -> dict[str, Any]:
    response = post(server, document | fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    body: dict[str, Any] = response.json()
    return body


def tensors(rank: int, dtype: str = "float32", seed: int = 0, groups: int = 2) -> dict[str, Any]:
    """Returns query, key and value with L=3, S=5, D=8, E=6."""
    draw = np.random.default_rng(seed)
    lead = LEADS[rank]
    few = (2, groups) if rank == 4 else lead
    shapes = {"query": (*lead, 3, 8), "key": (*few, 5, 8), "value": (*few, 5, 6)}
    return {n: draw.normal(size=shape).astype(DTYPES[dtype]) for n, shape in shapes.items()}


def random_layer(layout: str, width: int, out: int, *, bias: bool = False) -> dict[str, Any]:
    """Returns a layer with random weights."""
    draw = np.random.default_rng(width * out)
    named: dict[str, Any] = {}
    for role in ("query", "key", "value"):
        weight = draw.normal(size=(width, out)).astype(np.float32)
        if layout == "v1":
            named[f"W_{role}"] = as_json(weight, "base64")
        else:
            named[f"W_{role}.weight"] = as_json(weight.T, "base64")
            if bias:
                named[f"W_{role}.bias"] = as_json(weight[0], "base64")
    return {"layout": layout, "tensors": named}
