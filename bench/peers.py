"""qkv as a peer of the harness that compares servers.

Usage: run.py --extra bench/peers.py --peers qkv,triton. The variable QKV names the command; by
default it is the command of this checkout.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

harness: Any = importlib.import_module("run")  # run.py of the harness, not bench/run.py

Array = np.ndarray[Any, Any]
Built = tuple[dict[str, str], bytes]

NAMES = ("query", "key", "value")


def binary(*arrays: Array) -> Built:
    """Builds a request of the Open Inference Protocol with binary tensors."""
    inputs = [
        {
            "name": name,
            "datatype": "FP32",
            "shape": list(array.shape),
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in zip(NAMES, arrays, strict=True)
    ]
    outputs = [{"name": "output", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
    return headers, head + b"".join(array.tobytes() for array in arrays)


def native(*arrays: Array, encoded: bool) -> Built:
    """Builds a request of the native API in JSON, with nested lists or base64."""

    def written(array: Array) -> Any:
        if not encoded:
            return array.tolist()
        data = base64.b64encode(array.tobytes()).decode()
        return {"dtype": "float32", "shape": list(array.shape), "data": data}

    inputs = {name: written(array) for name, array in zip(NAMES, arrays, strict=True)}
    body = json.dumps({"inputs": inputs, "outputs": ["output"]}).encode()
    return {"Content-Type": "application/json"}, body


def parsed(_: Any, body: bytes, shape: tuple[int, ...]) -> Array:
    """Returns the output of a response in JSON."""
    output = json.loads(body)["outputs"]["output"]
    if isinstance(output, dict):
        return np.frombuffer(base64.b64decode(output["data"]), np.float32).reshape(shape)
    return np.array(output, np.float32).reshape(shape)


QKV = os.environ.get("QKV") or str(Path(__file__).parent.parent / ".venv/bin/qkv")
V2 = "/v2/models/softmax/infer"
NATIVE = "/v1/attention/softmax"

PEERS = {
    "qkv": harness.Peer(
        cmd=[QKV, "serve", "--host", "127.0.0.1", "--port", "{port}"],
        port=7020,
        ready=("GET", "/readyz"),
        encs={
            "oip-bin": harness.Enc(V2, build=binary, parse=harness.oipb_parse),
            "json": harness.Enc(NATIVE, lambda *a: native(*a, encoded=False), parsed, text=True),
            "base64": harness.Enc(NATIVE, lambda *a: native(*a, encoded=True), parsed),
        },
    )
}
