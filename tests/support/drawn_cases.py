"""Cases of /v1/verify: requests for them, and an attention in numpy that computes outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import httpx
import numpy as np

from qkv.wire import safetensors
from qkv.wire.message import Message
from support.known_requests import Array, as_array, as_json

PATH: Final = "/v1/verify/softmax"


def draw(http: httpx.Client, path: str = PATH, **fields: Any) -> dict[str, Any]:
    """Returns a drawn case."""
    response = http.post(path, json=fields)
    assert response.status_code == 200, response.text
    case: dict[str, Any] = response.json()
    return case


def arrays(case: Mapping[str, Any]) -> dict[str, Array]:
    """Returns the inputs of a case that has base64, in its dtype."""
    return {name: as_array(tensor) for name, tensor in case["inputs"].items()}


def judge(http: httpx.Client, case: Mapping[str, Any], **outputs: Array) -> dict[str, Any]:
    """Returns the verdict on outputs, sent in their dtype."""
    response = post_outputs(http, case["case"], outputs)
    assert response.status_code == 200, response.text
    verdict: dict[str, Any] = response.json()
    return verdict


def post_outputs(
    http: httpx.Client, case: Any, outputs: Mapping[str, Array], path: str = PATH
) -> httpx.Response:
    """Sends outputs for a case."""
    tensors = {name: as_json(np.asarray(x), "base64") for name, x in outputs.items()}
    return http.post(path, json={"case": case, "outputs": tensors})


def softmax(
    inputs: Mapping[str, Array],
    *,
    causal: bool = False,
    shift: int = 0,
    scale: float | None = None,
    tiled: bool = False,
) -> Array:
    """Returns softmax attention in the dtype of its inputs, computed in float64.

    Args:
        inputs: query, key, value, and optionally a boolean mask.
        causal: True if query i sees no key after i.
        shift: keys that a query sees beyond i: a bug unless it is 0.
        scale: None: 1 / sqrt(D).
        tiled: True for the bug that query head h reads key head h mod G.
    """
    query, key, value = (inputs[n].astype(np.float64) for n in ("query", "key", "value"))
    H, G, D = query.shape[1], key.shape[1], query.shape[-1]
    heads = np.arange(H) % G if tiled else np.arange(H) // (H // G)
    scores = query @ key[:, heads].swapaxes(-1, -2) * (D**-0.5 if scale is None else scale)
    visible = np.asarray(inputs.get("mask", True))
    if causal:
        visible = visible & np.tri(scores.shape[-2], scores.shape[-1], shift, dtype=bool)
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    output: Array = weights / weights.sum(-1, keepdims=True) @ value[:, heads]
    return output.astype(inputs["query"].dtype)


def in_safetensors(fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> bytes:
    """Returns a request as a file."""
    return b"".join(safetensors.encode(Message(dict(fields), dict(tensors)), "outputs"))
