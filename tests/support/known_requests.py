"""Requests with known outputs, and checks of problem documents."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

import httpx
import ml_dtypes
import numpy as np
import torch

from qkv.attention.catalogue import variants
from qkv.attention.variants import softmax
from qkv.client.arrays import to_raw
from qkv.errors import QkvError
from support.drawn_requests import sample
from support.references import reference_of
from support.variant_bounds import bounds_of
from support.variant_calls import with_padding

Array = np.ndarray[Any, Any]

DTYPES: Final[dict[str, np.dtype]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype("<i8"),
    "bool": np.dtype("?"),
}
EPS: Final = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
FLOATING: Final = tuple(EPS)
ARGUMENTS: Final = {
    "query": "query_BHLD",
    "key": "key_BGSD",
    "value": "value_BGSE",
    "mask": "mask_BHLS",
    "key_lengths": "key_lengths_B",
    "alibi_slopes": "alibi_slopes_H",
    "sinks": "sinks_H",
}
PROBLEMS: Final = {
    400: "malformed-request",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    406: "not-acceptable",
    413: "payload-too-large",
    415: "unsupported-media-type",
    422: "invalid-content",
    501: "unsupported-transfer-coding",
    503: "service-unavailable",
    504: "deadline-exceeded",
}


def assert_problem(
    response: httpx.Response, status: int = 422, document: Any = None
) -> dict[str, Any]:
    """Checks a problem document against RFC 9457 and the request, and returns it."""
    assert response.status_code == status, response.text
    assert status in PROBLEMS, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["type"] == f"urn:qkv:problem:{PROBLEMS[status]}"
    assert problem["status"] == status
    assert problem["title"]
    assert 0 < len(problem["detail"]) < 2000
    assert status != 422 or "pointer" in problem
    if document is not None and "pointer" in problem:
        assert points_into(document, problem["pointer"]), problem
    return problem


def points_into(document: Any, pointer: str) -> bool:
    """Returns True if a JSON pointer (RFC 6901) names a part, or a missing member of a part."""
    if pointer == "":
        return True
    first, *names = (n.replace("~1", "/").replace("~0", "~") for n in pointer.split("/"))
    for name in names[:-1]:
        try:
            document = document[int(name) if isinstance(document, list) else name]
        except (KeyError, IndexError, ValueError, TypeError):
            return False
    return first == "" and isinstance(document, dict | list)


def assert_client_error(error: QkvError, document: Any) -> None:
    """Checks that an error of a client has a fitting status and a pointer into the document."""
    assert error.status in (400, 404, 422)
    if error.status == 422:
        assert error.pointer is not None
        assert points_into(document, error.pointer), error.pointer


def as_json(array: Array, encoding: str) -> Any:
    """Encodes a tensor as JSON without the service's codec."""
    if encoding == "base64":
        data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}
    words = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}

    def spelled(value: Any) -> Any:
        if isinstance(value, list):
            return [spelled(v) for v in value]
        return words.get(str(value), value)

    with np.errstate(invalid="ignore"):  # a cast of a signalling NaN warns
        wide = array.astype(np.float64) if array.dtype.kind not in "bi" else array
    return spelled(wide.tolist())


def as_array(tensor: Any) -> Array:
    """Decodes the tensor of a JSON response without the service's codec."""
    if isinstance(tensor, dict):
        data = base64.b64decode(tensor["data"], validate=True)
        return np.frombuffer(data, DTYPES[tensor["dtype"]]).reshape(tensor["shape"])

    def read(value: Any) -> Any:
        return [read(v) for v in value] if isinstance(value, list) else float(value)

    return np.array(read(tensor))


@dataclass(frozen=True)
class Case:
    """A run of `softmax` with known outputs.

    Attributes:
        inputs: tensors by name, in the rank of the request.
        parameters: those of the variant.
        dtype: the dtype of query, key and value.
        outputs: the names of the requested outputs.
        encoding: lists or base64.
    """

    inputs: dict[str, Array]
    parameters: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    outputs: tuple[str, ...] = ("output", "weights", "scores")
    encoding: str = "base64"

    @property
    def document(self) -> dict[str, Any]:
        """The body of the request."""
        return {
            "inputs": {name: as_json(array, self.encoding) for name, array in self.inputs.items()},
            "parameters": self.parameters,
            "outputs": list(self.outputs),
            "dtype": self.dtype,
        }

    def check(self, outputs: Mapping[str, Any]) -> None:
        """Compares the outputs of a response with the reference, within the rounding errors."""
        assert outputs.keys() == set(self.outputs)
        lifted: dict[str, Any] = {ARGUMENTS[name]: self._lifted(name) for name in self.inputs}
        exact = reference_of(softmax.Call(**lifted, **self.parameters))
        clean = with_padding("softmax", lifted, 0.0)
        bounds = bounds_of("softmax", clean, self.parameters, exact)
        for name, tensor in outputs.items():
            bound = bounds[name].expand(getattr(exact, name).shape)
            self._compare(name, as_array(tensor), getattr(exact, name).numpy(), bound.numpy())

    def _compare(self, name: str, found: Array, exact: Array, bound: Array) -> None:
        rank = self.inputs["query"].ndim
        shape = [n for i, n in enumerate(exact.shape) if (i or rank > 2) and (i != 1 or rank > 3)]
        assert found.shape == tuple(shape), name
        found, hidden = found.astype(np.float64).reshape(exact.shape), np.isneginf(exact)
        assert np.array_equal(np.isneginf(found), hidden), name
        off = np.abs(found[~hidden] - exact[~hidden]) - bound[~hidden]
        assert (off <= 0).all(), f"{name} is off by {off.max()} more than allowed: {self}"

    def __str__(self) -> str:
        shapes = ", ".join(f"{n} {list(a.shape)}" for n, a in self.inputs.items())
        return f"{self.dtype} {shapes}; {self.parameters}"

    def _lifted(self, name: str) -> torch.Tensor:
        """Returns an input with all four axes, for the reference."""
        array, rank = self.inputs[name], self.inputs["query"].ndim
        if name == "mask":
            array = array.reshape((1,) * (rank - array.ndim) + array.shape)
        if name not in ("key_lengths", "alibi_slopes", "sinks"):
            array = array[(None,) * (4 - rank)] if rank != 3 else array[:, None]
        if array.dtype == DTYPES["bfloat16"]:
            return torch.from_numpy(array.astype(np.float32)).bfloat16()
        return torch.from_numpy(np.ascontiguousarray(array))


def random_case(kind: int, seed: int) -> Case:
    """Returns a case with any inputs and parameters; cases of one kind may share a batch.

    Args:
        kind: the seed of shapes, dtypes and parameters.
        seed: the seed of the numbers.
    """
    random = Random(f"case {kind}")  # independent of the choices of `sample`
    rank = random.randint(2, 4)
    sizes = {x: random.choice((1, 2, 3, 5, 7, 8, 16, 17, 33, 64)) for x in "LSDE"}
    sizes |= {2: {"B": 1, "G": 1, "H": 1}, 3: {"G": 1, "H": 1}, 4: {}}[rank]
    request = replace(sample(variants()["softmax"], kind, sizes), item_seed=seed)
    inputs = {name: to_raw(tensor).numpy() for name, tensor in request.named_tensors().items()}
    for name in inputs.keys() & {"query", "key", "value", "mask"}:
        inputs[name] = inputs[name].squeeze({4: (), 3: (1,), 2: (0, 1)}[rank])
    while "mask" in inputs and inputs["mask"].shape[:1] == (1,) and random.random() < 0.5:
        inputs["mask"] = inputs["mask"][0]  # it has fewer axes than the query
    dtype, parameters = str(request.dtype).removeprefix("torch."), dict(request.parameters)
    for name in inputs.keys() & {"alibi_slopes", "sinks"}:
        inputs[name] = inputs[name].astype(DTYPES[dtype])  # that of lists
    if parameters.get("window"):
        parameters["window"] = [*parameters["window"]]
    outputs = [("output",), ("output", "weights"), ("output", "weights", "scores")]
    encoding = random.choice(("lists", "base64"))
    return Case(inputs, parameters, dtype, random.choice(outputs), encoding)
