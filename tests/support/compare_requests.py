"""Compare requests, valid and invalid, in this process and over HTTP."""

from __future__ import annotations

import json
from typing import Any, Final

import httpx
import numpy as np

from qkv import local
from qkv.jobs.plan import Limits
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.known_requests import DTYPES, Array
from support.service import Server

COMPARE: Final = "/v1/compare"
UNLIMITED: Final = Limits(response_bytes=1 << 62, job_bytes=1 << 62)
VARIANTS: Final = ("efficient", "linear", "linformer", "mean", "sigmoid", "softmax", "taylor")
NEEDED: Final = {"linformer": {"rank": 3}}
X: Final = [[0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64]]
INPUTS: Final = {"query": X, "key": X, "value": X}


def random_inputs(
    dtype: str = "float32", B: int = 2, H: int = 2, G: int = 2, N: int = 9, D: int = 4
) -> dict[str, Array]:
    """Returns inputs of equal lengths, which every variant takes."""
    numbers = np.random.default_rng(5)
    shapes = {"query": (B, H, N, D), "key": (B, G, N, D), "value": (B, G, N, D)}
    return {n: numbers.normal(0, 2, s).astype(DTYPES[dtype]) for n, s in shapes.items()}


def compare(inputs: dict[str, Array], **fields: Any) -> dict[str, Any]:
    """Returns the response of a comparison in this process, as JSON."""
    raw = {name: RawTensor.from_numpy(array) for name, array in inputs.items()}
    fields.setdefault("repeats", 1)
    response: dict[str, Any] = json.loads(json.dumps(local.compare(Message(fields, raw))))
    return response


def variant_entry(name: str, **parameters: Any) -> dict[str, Any]:
    return {"variant": name, "parameters": NEEDED.get(name, {}) | parameters}


def post(server: Server, body: dict[str, Any], **more: Any) -> httpx.Response:
    return server.http.post(COMPARE, json=body, **more)


def assert_same_report(one: dict[str, Any], other: dict[str, Any]) -> None:
    for a, b in zip(
        (one["anchor"], *one["variants"]), (other["anchor"], *other["variants"]), strict=True
    ):
        assert {n: v for n, v in a.items() if n != "timing"} == {
            n: v for n, v in b.items() if n != "timing"
        }
    assert one["notes"] == other["notes"]
