"""Makes the examples of the OpenAPI document: sends requests to the service, and keeps responses.

`make docs` writes them into a file of the package, so that no worker runs them when it starts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from fastapi.testclient import TestClient

from qkv.api import openapi
from qkv.api.app import create_app
from qkv.api.openapi.document import EXAMPLES_FILE
from qkv.attention import catalogue
from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.signature import Input, fixed_size
from qkv.attention.variant import Variant
from qkv.settings import Settings
from qkv.tensors import RawTensor
from qkv.wire import json as wire_json
from qkv.wire.message import Message

FILE: Final = Path(openapi.__file__).with_name(EXAMPLES_FILE)

_INPUTS: Final[dict[str, Any]] = {
    "query": [[1, 0], [0, 1]],
    "key": [[1, 0], [0, 1]],
    "value": [[1, 2], [3, 4]],
}
_EMBEDDINGS: Final = [[0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64]]
_HEADS: Final = [_EMBEDDINGS, [[0.11, 0.64, 0.32], [0.82, 0.05, 0.47], [0.29, 0.91, 0.18]]]
_WEIGHTS: Final[dict[str, Any]] = {
    "W_query.weight": [[1, 2, 3], [4, 5, 6]],
    "W_key.weight": [[1, 0, 0], [0, 1, 0]],
    "W_value.weight": [[0, 0, 1], [0, 1, 0]],
}
_LAYER: Final = {"layout": "v2", "heads": 2, "tensors": _WEIGHTS}
_LAYERED: Final = {"inputs": {"x": _EMBEDDINGS}, "layer": _LAYER, "outputs": ["output"]}
_PARAMETERS: Final = {"causal": True, "dropout": 0.5, "seed": 6}
_TIMES: Final = {
    "queue_ms": 0.02, "transfer_ms": 0.02, "compute_ms": 0.11, "total_ms": 0.28,
    "median_ms": 0.11, "least_ms": 0.1, "most_ms": 0.14,
}  # fmt: skip
"""Times in place of measured ones."""

_STREAM: Final = """\
event: progress
data: {"done":0,"total":4,"variant":"softmax","length":256}

event: cell
data: {"index":0,"parameters":{},"variant":"softmax","length":256,"median_ms":1.9,"least_ms":1.8,\
"most_ms":2.4,"repeats":3,"flops":134217728,"bytes":2097152,"peak_bytes":614912}

"""

Examples = dict[str, tuple[str, dict[str, Any]]]
"""By name: a summary and a request."""


def write() -> None:
    """Writes the file, with a line for each operation."""
    lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in make_examples().items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def make_examples() -> dict[str, Any]:
    """Returns the examples of each operation: `request` and `response`, by name."""
    found: dict[str, Any] = {}
    with TestClient(create_app(Settings(device="cpu", threads=1))) as http:
        for operation, path, examples in _operations(http):
            requests, responses = {}, {}
            for name, (summary, body) in examples.items():
                response = http.post(path, json=body)
                assert response.status_code == 200, (path, name, response.text)
                requests[name] = {"summary": summary, "value": body}
                responses[name] = {"summary": summary, "value": _timeless(response.json())}
            found[operation] = {"request": requests, "response": responses}
    lengths = {"variants": ["softmax", "linear"], "lengths": [256, 1024], "repeats": 3}
    found["sweep"] = {
        "request": {"two": {"summary": "Two variants", "value": lengths}},
        "response": {"two": {"summary": "The first events", "value": _STREAM}},
    }
    return found


def _operations(http: TestClient) -> Iterator[tuple[str, str, Examples]]:
    """Yields each operation with examples: its id, its path, and its requests."""
    for variant in catalogue.variants().values():
        if (inputs := _inputs(variant)) is None:
            continue
        path = f"/v1/attention/{variant.name}"
        yield f"attend_{variant.name}", path, _runs(variant, inputs)
        if variant.backward is not None:
            output = http.post(path, json={"inputs": inputs}).json()["outputs"]["output"]
            with_grad = inputs | {"grad_output": _alternating_integers(np.shape(output))}
            gradients = f"/v1/gradients/{variant.name}"
            yield f"gradients_{variant.name}", gradients, _gradients(variant, with_grad)
    output = http.post("/v1/attention/softmax", json=_LAYERED).json()["outputs"]["output"]
    yield "convert", "/v1/convert", _conversions(http, output)
    yield "compare", "/v1/compare", _comparisons()
    yield "list_layers", "/v1/layers", {"layer": ("One layer of a model", _shapes())}
    yield "verify", "/v1/verify/softmax", _verifications(http)
    yield "v2_infer", "/v2/models/softmax/infer", {"lists": ("Three tensors", _inference())}


def _runs(variant: Variant, inputs: Mapping[str, Any]) -> Examples:
    examples: Examples = {
        "lists": ("Tensors as nested lists", {"inputs": inputs}),
        "base64": ("The same tensors as base64", _as_base64(inputs)),
    }
    if any(role in variant.inputs for role in ROLES):
        examples["layer"] = ("Embeddings through a layer of two heads", _LAYERED)
    if "weights" in variant.outputs:
        largest = {"inputs": inputs, "weights": {"top_k": 1}}
        examples["top_k"] = ("The largest weight of each row, and its key", largest)
        stats = {"inputs": inputs, "weights": "stats", "outputs": ["weights"]}
        examples["stats"] = ("Statistics instead of the weights", stats)
    if own := {n: v for n, v in _PARAMETERS.items() if n in variant.parameters.model_fields}:
        body = {"inputs": inputs, "parameters": own, "outputs": list(variant.outputs)}
        examples["parameters"] = (f"With {', '.join(own)}", body)
    return examples


def _gradients(variant: Variant, inputs: Mapping[str, Any]) -> Examples:
    examples: Examples = {
        "lists": ("Tensors as nested lists", {"inputs": inputs}),
        "base64": ("The same tensors as base64", _as_base64(inputs)),
    }
    if any(role in variant.inputs for role in ROLES):
        embeddings = {"x": _EMBEDDINGS, "grad_output": _alternating_integers((3, 2))}
        body = {"inputs": embeddings, "layer": _LAYER}
        examples["layer"] = ("Embeddings through a layer of two heads", body)
    return examples


def _conversions(http: TestClient, output: Any) -> Examples:
    plain: dict[str, Any] = {"from": "v2", "to": "v1", "tensors": _WEIGHTS}
    back = {
        "from": "v1",
        "to": "v2",
        "tensors": http.post("/v1/convert", json=plain).json()["tensors"],
    }
    biased = plain | {"tensors": _WEIGHTS | {"W_query.bias": [0.5, -0.5]}, "bias": "augment"}
    check = {"x": _EMBEDDINGS, "y": output}
    detection = {"from": "auto", "tensors": _WEIGHTS, "check": check}
    return {
        "v2_to_v1": ("nn.Linear's weights to plain parameters", plain),
        "v1_to_v2": ("Plain parameters to nn.Linear's weights", back),
        "bias": ("A bias, as a further row of the weights", biased),
        "detection": ("Heads and scale from the output of the real module", detection),
    }


def _comparisons() -> Examples:
    inputs, heads = (dict.fromkeys(_INPUTS, x) for x in (_EMBEDDINGS, [_HEADS]))
    causal = {"parameters": {"causal": True}}
    chosen = {
        "variants": [{"variant": "efficient"} | causal, "mean"],
        "anchor": {"variant": "linear"} | causal,
    }
    per_head = {"inputs": heads, "variants": ["linear"], "per_head": True}
    return {
        "plain": (
            "Two variants, compared with softmax",
            {"inputs": inputs, "variants": ["linear", "mean"]},
        ),
        "parameters": (
            "Variants with parameters, and another baseline",
            {"inputs": inputs, **chosen, "repeats": 3, "rows": 2},
        ),
        "heads": ("Figures of each of two heads", per_head),
    }


def _shapes() -> dict[str, Any]:
    prefix = "model.layers.0.self_attn"
    sizes = {"q_proj": 2048, "k_proj": 512, "v_proj": 512, "o_proj": 2048}
    shapes = {f"{prefix}.{name}.weight": [size, 2048] for name, size in sizes.items()}
    return {"shapes": shapes | {"model.norm.weight": [2048]}}


def _verifications(http: TestClient) -> Examples:
    sizes = {"B": 1, "H": 1, "L": 2, "S": 2, "D": 2}
    draw = {"family": "normal", "seed": 1, "sizes": sizes, "parameters": {"causal": True}}
    drawn = http.post("/v1/verify/softmax", json=draw).json()
    run = {"inputs": drawn["inputs"], "parameters": draw["parameters"], "outputs": ["output"]}
    outputs = http.post("/v1/attention/softmax", json=run).json()["outputs"]
    return {
        "draw": ("Inputs for a causal softmax", draw),
        "judge": ("The outputs for these inputs", {"case": drawn["case"], "outputs": outputs}),
    }


def _inference() -> dict[str, Any]:
    inputs = [
        {"name": name, "shape": [2, 2], "datatype": "FP32", "data": np.ravel(x).tolist()}
        for name, x in _INPUTS.items()
    ]
    return {"id": "1", "inputs": inputs}


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
    chunks = wire_json.encode(Message({}, arrays, encoding="base64"), "inputs")
    return json.loads(b"".join(chunks))


def _timeless(node: Any) -> Any:
    """Returns a response with fixed times, so that the file is the same each time."""
    if isinstance(node, list):
        return [_timeless(item) for item in node]
    if isinstance(node, dict):
        return {n: _TIMES.get(n, _timeless(value)) for n, value in node.items()}
    return node
