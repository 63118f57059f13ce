"""Examples of requests and responses for the OpenAPI document, made by running the requests."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np

from qkv import errors
from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.signature import Input, fixed_size
from qkv.attention.variant import Variant
from qkv.engine import local
from qkv.jobs.layers import list_layers
from qkv.tensors import RawTensor
from qkv.wire import CODECS, json, open_inference
from qkv.wire.message import Message

__all__ = ["PROBLEMS", "Examples", "attention", "conversions", "gradients", "inference", "layers"]

_log = logging.getLogger(__name__)

Examples = dict[str, tuple[str, dict[str, Any], dict[str, Any]]]
"""By name: a summary, a request, and its response."""

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
    errors.MalformedRequest("the body must be a JSON object"),
    errors.NotAcceptable(
        f"Accept excludes every format: got 'text/html', expected {' or '.join(CODECS)}"
    ),
    errors.PayloadTooLarge(
        "the body is too large: got 300000000 bytes, expected at most 268435456", limit=268435456
    ),
    errors.UnsupportedMediaType(
        f"Content-Type is not supported: got 'text/plain', expected {' or '.join(CODECS)}"
    ),
    errors.InvalidContent(
        'encoding is unknown: got "raw", expected lists or base64', pointer="/encoding"
    ),
    errors.Internal("internal error; it was logged with the id in X-Request-ID"),
    errors.stopping(),
    errors.DeadlineExceeded("the request waited 2500 ms in the queue, its deadline passed"),
)
"""An error of each kind, with a detail of the service."""


@cache
def attention(variant: Variant) -> Examples:
    """Returns examples of runs; none if the variant needs tensors that are not floating."""
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
            "Statistics instead of the weights",
            {"inputs": inputs, "weights": "stats", "outputs": ["weights"]},
        )
    parameters = {n: v for n, v in _PARAMETERS.items() if n in variant.parameters.model_fields}
    if parameters:
        requests["parameters"] = (
            f"With {', '.join(parameters)}",
            {"inputs": inputs, "parameters": parameters, "outputs": list(variant.outputs)},
        )
    return _with_responses(variant, requests, local.attend, "outputs")


@cache
def gradients(variant: Variant) -> Examples:
    """Returns examples of gradients; none if `attention` has none."""
    inputs = _inputs(variant)
    if inputs is None:
        return {}
    run = local.attend(variant.name, json.decode(json.dump({"inputs": inputs}), "inputs"))
    inputs["grad_output"] = _alternating_integers(run.tensors["output"].shape)
    requests = {
        "lists": ("Tensors as nested lists", {"inputs": inputs}),
        "base64": ("The same tensors as base64", _as_base64(inputs)),
    }
    if any(role in variant.inputs for role in ROLES):
        embeddings = {"x": _EMBEDDINGS, "grad_output": _alternating_integers((3, 2))}
        requests["layer"] = (
            "Embeddings through a layer of two heads",
            {"inputs": embeddings, "layer": _LAYER},
        )
    return _with_responses(variant, requests, local.gradients, "gradients")


@cache
def conversions() -> Examples:
    """Returns examples of conversions: v2 to v1, v1 to v2, with a bias, and of a detection."""
    plain = {"from": "v2", "to": "v1", "tensors": _WEIGHTS}
    back = {"from": "v1", "to": "v2", "tensors": _converted(plain)["tensors"]}
    biased = plain | {"tensors": _WEIGHTS | {"W_query.bias": [0.5, -0.5]}, "bias": "augment"}
    requests = {
        "v2_to_v1": ("nn.Linear's weights to plain parameters", plain),
        "v1_to_v2": ("Plain parameters to nn.Linear's weights", back),
        "bias": ("A bias, as a further row of the weights", biased),
        "detection": ("Heads and scale from the output of the real module", _detection()),
    }
    return {name: (summary, body, _converted(body)) for name, (summary, body) in requests.items()}


@cache
def layers() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a request for the layers of a model, and its response."""
    prefix = "model.layers.0.self_attn"
    sizes = {"q_proj": 2048, "k_proj": 512, "v_proj": 512, "o_proj": 2048}
    shapes = {f"{prefix}.{name}.weight": [size, 2048] for name, size in sizes.items()}
    request = {"shapes": shapes | {"model.norm.weight": [2048]}}
    layers = json.load(list_layers(json.dump(request)))
    return request, {"layers": layers, "max_body_bytes": 268435456}


@cache
def inference() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a request of the Open Inference Protocol, and its response, both in JSON."""
    arrays = {n: RawTensor.from_numpy(np.array(v, np.float32)) for n, v in _INPUTS.items()}
    result = local.attend("softmax", Message({"outputs": ["output"]}, arrays))
    timing = _TIMES | {"batch_size": 1} | result.fields["timing"]
    timing["compute_ms"] = _TIMES["compute_ms"]
    fields = {"model_name": "softmax", "model_version": "1", "id": "1", "parameters": timing}
    request, _ = open_inference.encode(Message({"id": "1"}, arrays), "inputs", ())
    response, _ = open_inference.encode(Message(fields, result.tensors), "outputs", ())
    return json.load(b"".join(request)), json.load(b"".join(response))


def _inputs(variant: Variant) -> dict[str, Any] | None:
    """Returns small required tensors of a variant; None if one cannot be floating."""
    needed = [i for i in variant.inputs.values() if not i.is_optional]
    if not all("float32" in i.dtypes for i in needed):
        return None
    return {i.name: _INPUTS.get(i.name) or _small_tensor(i) for i in needed}


def _small_tensor(spec: Input) -> Any:
    """Returns a small tensor for an input, without heads and batch."""
    return _alternating_integers([fixed_size(x) or 2 for x in spec.letters if x not in "BHG"])


def _alternating_integers(shape: Sequence[int]) -> Any:
    """Returns the integers 1, -2, 3, ... in a shape."""
    count = np.arange(1, math.prod(shape) + 1)
    return np.where(count % 2, count, -count).reshape(shape).tolist()


def _as_base64(inputs: Mapping[str, Any]) -> Any:
    arrays = {n: RawTensor.from_numpy(np.array(v, np.float32)) for n, v in inputs.items()}
    (encoded,) = json.encode(Message({}, arrays, encoding="base64"), "inputs")
    return json.load(bytes(encoded))


def _with_responses(
    variant: Variant,
    requests: Mapping[str, tuple[str, dict[str, Any]]],
    run: Callable[[str, Message], Message],
    group: str,
) -> Examples:
    """Returns the requests with the responses of the service, with fixed times."""
    examples: Examples = {}
    for name, (summary, body) in requests.items():
        request = json.decode(json.dump(body), "inputs")
        try:
            result = run(variant.name, request)
        except Exception:  # the service runs on without the example
            _log.exception("the example %s of %s failed", name, variant.name)
            continue
        timing = _TIMES | {"batch_size": 1} | result.fields["timing"]
        timing["compute_ms"] = _TIMES["compute_ms"]
        response_message = Message(
            result.fields | {"timing": timing}, result.tensors, encoding=request.encoding
        )
        examples[name] = summary, body, _encode(response_message, group)
    return examples


def _converted(body: dict[str, Any]) -> dict[str, Any]:
    return _encode(local.convert_message(json.decode(json.dump(body), "tensors")), "tensors")


def _detection() -> dict[str, Any]:
    """Returns the request that detects the heads of the layer of these examples."""
    run = {"inputs": {"x": _EMBEDDINGS}, "layer": _LAYER, "outputs": ["output"]}
    output = local.attend("softmax", json.decode(json.dump(run), "inputs")).tensors["output"]
    return {
        "from": "auto",
        "tensors": _WEIGHTS,
        "check": {"x": _EMBEDDINGS, "y": output.numpy().tolist()},
    }


def _encode(message: Message, group: str) -> dict[str, Any]:
    encoded: dict[str, Any] = json.load(b"".join(json.encode(message, group)))
    return encoded
