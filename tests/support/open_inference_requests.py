"""Requests of the Open Inference Protocol with inputs in JSON lists."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import httpx
import numpy as np

from support.service import Server

Array = np.ndarray[Any, Any]
INFER_PATH: Final = "/v2/models/softmax/infer"
LENGTH_HEADER: Final = "Inference-Header-Content-Length"
INPUTS: Final[dict[str, Array]] = {
    name: np.random.default_rng(i).normal(size=(1, 2, 3, 4)).astype(np.float32)
    for i, name in enumerate(("query", "key", "value"))
}


def input_entry(name: str, array: Array, **changed: Any) -> dict[str, Any]:
    """Returns an input with its data as a flat list."""
    shape, data = list(array.shape), array.ravel().tolist()
    return {"name": name, "datatype": "FP32", "shape": shape, "data": data} | changed


def request_with_lists(**fields: Any) -> dict[str, Any]:
    """Returns a request with inputs as lists."""
    return {"inputs": [input_entry(name, array) for name, array in INPUTS.items()]} | fields


def post(server: Server, content: Any, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """Sends bytes or a document without Content-Type."""
    if isinstance(content, dict):
        content = json.dumps(content).encode()
    request = server.http.build_request("POST", INFER_PATH, content=content, headers=headers)
    assert "content-type" not in request.headers
    return server.http.send(request)


def error_of(response: httpx.Response, status: int = 400) -> str:
    """Returns the message of an error response."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    document = response.json()
    assert list(document) == ["error"]
    assert 0 < len(document["error"]) < 2000
    return str(document["error"])
