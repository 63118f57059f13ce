"""Examples of requests, with the answers that running them gives."""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any, Final

import numpy as np

from qkv import errors, local
from qkv.catalogue import Input, Variant, fixed_size
from qkv.layers.projections import ROLES
from qkv.message import Message
from qkv.tensors import RawTensor
from qkv.wire import CODECS, json, v2

__all__ = ["PROBLEMS", "Pairs", "attention", "conversions", "inference"]

_log = logging.getLogger("qkv.routes.examples")

Pairs = dict[str, tuple[str, dict[str, Any], dict[str, Any]]]
"""By name: what it shows, a request, and its answer."""

_INPUTS: Final[dict[str, Any]] = {
    "query": [[1, 0], [0, 1]],
    "key": [[1, 0], [0, 1]],
    "value": [[1, 2], [3, 4]],
}
_EMBEDDINGS: Final = [[0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64]]
_WEIGHTS: Final[dict[str, Any]] = {
    "W_query.weight": [[1, 2, 3], [4, 5, 6]],
    "W_key.weight": [[1, 0, 0], [0, 1, 0]],
    "W_value.weight": [[0, 0, 1], [0, 1, 0]],
}
_PARAMETERS: Final = {"causal": True, "dropout": 0.5, "seed": 6}
_TIMES: Final = {"queue_ms": 0.02, "transfer_ms": 0.02, "compute_ms": 0.11, "total_ms": 0.28}

PROBLEMS: Final[tuple[errors.QkvError, ...]] = (
    errors.Unparseable("the body must be a JSON object"),
    errors.NotFound("no saved layer 'encoder'", pointer="/layer"),
    errors.NotAcceptable(f"Accept 'text/html' has none of {', '.join(CODECS)}"),
    errors.TooLarge("the body has 300000000 bytes; at most 268435456 are read", limit=268435456),
    errors.UnsupportedMediaType(
        f"Content-Type 'text/plain' is not read here; send {' or '.join(CODECS)}"
    ),
    errors.InvalidContent(
        'encoding came as "raw"; it must be lists or base64', pointer="/encoding"
    ),
    errors.Internal("this is a fault of the service, and is logged"),
    errors.NotNow("the service is stopping", retry_after=5),
)
"""One of each kind, in the service's own words."""


@cache
def attention(variant: Variant) -> Pairs:
    """Runs of a variant; none where it needs tensors that are not floating."""
    needed = [i for i in variant.inputs.values() if not i.optional]
    if not all("float32" in i.dtypes for i in needed):
        return {}
    inputs = {i.name: _INPUTS.get(i.name) or _numbers(i) for i in needed}
    arrays = {n: RawTensor.from_numpy(np.array(v, np.float32)) for n, v in inputs.items()}
    (base64,) = json.encode(Message({}, arrays, encoding="base64"), "inputs")
    requests = {
        "lists": ("Tensors as nested lists", {"inputs": inputs}),
        "base64": ("The same tensors as base64", json.load(bytes(base64))),
    }
    if any(role in variant.inputs for role in ROLES):
        requests["layer"] = (
            "Embeddings through a layer of two heads",
            {
                "inputs": {"x": _EMBEDDINGS},
                "layer": {"layout": "v2", "heads": 2, "tensors": _WEIGHTS},
                "outputs": ["output"],
            },
        )
    known = {n: v for n, v in _PARAMETERS.items() if n in variant.parameters.model_fields}
    if known:
        requests["parameters"] = (
            f"With {', '.join(known)}",
            {"inputs": inputs, "parameters": known, "outputs": list(variant.outputs)},
        )
    pairs: Pairs = {}
    for name, (summary, body) in requests.items():
        try:
            pairs[name] = summary, body, _run(variant.name, body)
        except Exception:  # a variant that fails is no reason to serve none
            _log.exception("%s fails at its example %s", variant.name, name)
    return pairs


@cache
def conversions() -> Pairs:
    """Conversions there and back, and of a bias."""
    plain = {"from": "v2", "to": "v1", "tensors": _WEIGHTS}
    back = {"from": "v1", "to": "v2", "tensors": _converted(plain)["tensors"]}
    biased = plain | {"tensors": _WEIGHTS | {"W_query.bias": [0.5, -0.5]}, "bias": "augment"}
    requests = {
        "v2_to_v1": ("nn.Linear's weights to plain parameters", plain),
        "v1_to_v2": ("And back", back),
        "bias": ("A bias, as one more row", biased),
    }
    return {name: (summary, body, _converted(body)) for name, (summary, body) in requests.items()}


@cache
def inference() -> tuple[dict[str, Any], dict[str, Any]]:
    """A request of the Open Inference Protocol, in JSON, and its answer."""
    arrays = {n: RawTensor.from_numpy(np.array(v, np.float32)) for n, v in _INPUTS.items()}
    ran = local.attend("softmax", Message({"outputs": ["output"]}, arrays))
    timing = _TIMES | {"batch_size": 1} | ran.fields["timing"]
    timing["compute_ms"] = _TIMES["compute_ms"]
    fields = {"model_name": "softmax", "model_version": "1", "id": "1", "parameters": timing}
    asked, _ = v2.encode(Message({"id": "1"}, arrays), "inputs", ())
    answered, _ = v2.encode(Message(fields, ran.tensors), "outputs", ())
    return json.load(b"".join(asked)), json.load(b"".join(answered))


def _numbers(spec: Input) -> Any:
    """A small tensor for an input of any axes, heads and batch left out: 1, -2, 3, ..."""
    shape = [fixed_size(x) or 2 for x in spec.letters if x not in "BHG"]
    count = np.arange(1, math.prod(shape) + 1)
    return np.where(count % 2, count, -count).reshape(shape).tolist()


def _run(variant: str, body: dict[str, Any]) -> dict[str, Any]:
    """What the service answers, with times that are nobody's."""
    asked = json.decode(json.dump(body), "inputs")
    ran = local.attend(variant, asked)
    timing = _TIMES | {"batch_size": 1} | ran.fields["timing"]
    timing["compute_ms"] = _TIMES["compute_ms"]
    fields = ran.fields | {"timing": timing}
    return _written(Message(fields, ran.tensors, encoding=asked.encoding), "outputs")


def _converted(body: dict[str, Any]) -> dict[str, Any]:
    return _written(local.convert_message(json.decode(json.dump(body), "tensors")), "tensors")


def _written(message: Message, group: str) -> dict[str, Any]:
    written: dict[str, Any] = json.load(b"".join(json.encode(message, group)))
    return written
