"""qkv as a peer, for the harness that compares servers.

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
EncodedRequest = tuple[dict[str, str], bytes]

INPUT_NAMES = ("query", "key", "value")


def build_binary(*arrays: Array) -> EncodedRequest:
    """Builds a request of the Open Inference Protocol with binary tensors."""
    inputs = [
        {
            "name": name,
            "datatype": "FP32",
            "shape": list(array.shape),
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in zip(INPUT_NAMES, arrays, strict=True)
    ]
    outputs = [{"name": "output", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
    return headers, head + b"".join(array.tobytes() for array in arrays)


def build_native(*arrays: Array, is_base64: bool) -> EncodedRequest:
    """Builds a request of the native API in JSON, with nested lists or base64."""

    def encode(array: Array) -> Any:
        if not is_base64:
            return array.tolist()
        data = base64.b64encode(array.tobytes()).decode()
        return {"dtype": "float32", "shape": list(array.shape), "data": data}

    inputs = {name: encode(array) for name, array in zip(INPUT_NAMES, arrays, strict=True)}
    body = json.dumps({"inputs": inputs, "outputs": ["output"]}).encode()
    return {"Content-Type": "application/json"}, body


def parse_json(_: Any, body: bytes, shape: tuple[int, ...]) -> Array:
    """Returns the output of a response in JSON."""
    output = json.loads(body)["outputs"]["output"]
    if isinstance(output, dict):
        return np.frombuffer(base64.b64decode(output["data"]), np.float32).reshape(shape)
    return np.array(output, np.float32).reshape(shape)


QKV_COMMAND = os.environ.get("QKV") or str(Path(__file__).parent.parent / ".venv/bin/qkv")
V2_PATH = "/v2/models/softmax/infer"
NATIVE_PATH = "/v1/attention/softmax"

PEERS = {
    "qkv": harness.Peer(
        cmd=[QKV_COMMAND, "serve", "--host", "127.0.0.1", "--port", "{port}"],
        port=7020,
        ready=("GET", "/readyz"),
        encs={
            "oip-bin": harness.Enc(V2_PATH, build=build_binary, parse=harness.oipb_parse),
            "json": harness.Enc(
                NATIVE_PATH, lambda *a: build_native(*a, is_base64=False), parse_json, text=True
            ),
            "base64": harness.Enc(
                NATIVE_PATH, lambda *a: build_native(*a, is_base64=True), parse_json
            ),
        },
    )
}
