"""Examples of requests, with the answers that running them gives."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np

from qkv import errors
from qkv.attention.catalogue import Input, Variant, fixed_size
from qkv.attention.layers.projections import ROLES
from qkv.engine import local
from qkv.tensors import RawTensor
from qkv.wire import CODECS, json
from qkv.wire import open_inference as v2
from qkv.wire.message import Message

__all__ = ["PROBLEMS", "Pairs", "attention", "conversions", "gradients", "inference"]

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
_LAYER: Final = {"layout": "v2", "heads": 2, "tensors": _WEIGHTS}
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
    errors.TooLate("the device was not free within 2500 ms"),
)
"""One of each kind, in the service's own words."""


@cache
def attention(variant: Variant) -> Pairs:
    """Runs of a variant; none where it needs tensors that are not floating."""
    inputs = _inputs(variant)
    if inputs is None:
        return {}
    requests = {
        "lists": ("Tensors as nested lists", {"inputs": inputs}),
        "base64": ("The same tensors as base64", _as_base64(inputs)),
    }
    if any(role in variant.inputs for role in ROLES):
        requests["layer"] = (
            "Embeddings through a layer of two heads",
            {"inputs": {"x": _EMBEDDINGS}, "layer": _LAYER, "outputs": ["output"]},
        )
    if "weights" in variant.outputs:
        requests["top_k"] = (
            "The largest weight of each row, and its key",
            {"inputs": inputs, "weights": {"top_k": 1}},
        )
        requests["stats"] = (
            "Statistics of the weights, in their place",
            {"inputs": inputs, "weights": "stats", "outputs": ["weights"]},
        )
    known = {n: v for n, v in _PARAMETERS.items() if n in variant.parameters.model_fields}
    if known:
        requests["parameters"] = (
            f"With {', '.join(known)}",
            {"inputs": inputs, "parameters": known, "outputs": list(variant.outputs)},
        )
    return _answered(variant, requests, local.attend, "outputs")


@cache
def gradients(variant: Variant) -> Pairs:
    """Gradients of a variant; none where `attention` has none."""
    inputs = _inputs(variant)
    if inputs is None:
        return {}
    run = local.attend(variant.name, json.decode(json.dump({"inputs": inputs}), "inputs"))
    inputs["grad_output"] = _counted(run.tensors["output"].shape)
    requests = {
        "lists": ("Tensors as nested lists", {"inputs": inputs}),
        "base64": ("The same tensors as base64", _as_base64(inputs)),
    }
    if any(role in variant.inputs for role in ROLES):
        embeddings = {"x": _EMBEDDINGS, "grad_output": _counted((3, 2))}
        requests["layer"] = (
            "Embeddings through a layer of two heads",
            {"inputs": embeddings, "layer": _LAYER},
        )
    return _answered(variant, requests, local.gradients, "gradients")


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


def _inputs(variant: Variant) -> dict[str, Any] | None:
    """Small tensors for all that a variant needs; None where one cannot be floating."""
    needed = [i for i in variant.inputs.values() if not i.optional]
    if not all("float32" in i.dtypes for i in needed):
        return None
    return {i.name: _INPUTS.get(i.name) or _numbers(i) for i in needed}


def _numbers(spec: Input) -> Any:
    """A small tensor for an input of any axes, heads and batch left out."""
    return _counted([fixed_size(x) or 2 for x in spec.letters if x not in "BHG"])


def _counted(shape: Sequence[int]) -> Any:
    """1, -2, 3, ..."""
    count = np.arange(1, math.prod(shape) + 1)
    return np.where(count % 2, count, -count).reshape(shape).tolist()


def _as_base64(inputs: Mapping[str, Any]) -> Any:
    arrays = {n: RawTensor.from_numpy(np.array(v, np.float32)) for n, v in inputs.items()}
    (written,) = json.encode(Message({}, arrays, encoding="base64"), "inputs")
    return json.load(bytes(written))


def _answered(
    variant: Variant,
    requests: Mapping[str, tuple[str, dict[str, Any]]],
    run: Callable[[str, Message], Message],
    group: str,
) -> Pairs:
    """The requests with what the service answers, but for times, which are nobody's."""
    pairs: Pairs = {}
    for name, (summary, body) in requests.items():
        asked = json.decode(json.dump(body), "inputs")
        try:
            ran = run(variant.name, asked)
        except Exception:  # a variant that fails is no reason to serve none
            _log.exception("%s fails at its example %s", variant.name, name)
            continue
        timing = _TIMES | {"batch_size": 1} | ran.fields["timing"]
        timing["compute_ms"] = _TIMES["compute_ms"]
        answer = Message(ran.fields | {"timing": timing}, ran.tensors, encoding=asked.encoding)
        pairs[name] = summary, body, _written(answer, group)
    return pairs


def _converted(body: dict[str, Any]) -> dict[str, Any]:
    return _written(local.convert_message(json.decode(json.dump(body), "tensors")), "tensors")


def _written(message: Message, group: str) -> dict[str, Any]:
    written: dict[str, Any] = json.load(b"".join(json.encode(message, group)))
    return written
