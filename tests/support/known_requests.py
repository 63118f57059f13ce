"""Requests with known outputs, and checks of problem documents."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import ml_dtypes
import numpy as np
import torch

from qkv.attention.variants import softmax
from qkv.errors import QkvError
from support.references import reference_of

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
        """Compares the outputs of a response with the reference.

        A score sums D products and a mask, each rounded. A weight has an error of twice its score's
        in the exponent, and that of a sum over S. An output averages values with such weights,
        which some kernels round to the values' dtype, and is rounded to that dtype itself.
        """
        assert outputs.keys() == set(self.outputs)
        lifted = {name: self._lifted(name) for name in self.inputs}
        arguments: dict[str, Any] = {ARGUMENTS[n]: t for n, t in lifted.items()} | self.parameters
        exact = reference_of(softmax.Call(**arguments))
        query, key, value = (lifted[n].double().abs() for n in ("query", "key", "value"))
        scale = self.parameters.get("scale")
        summed = float((query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT).max())
        summed *= abs(scale) if scale is not None else query.shape[-1] ** -0.5
        if "mask" in lifted and lifted["mask"].is_floating_point():
            mask = lifted["mask"].double()
            summed += float(mask.where(mask.isfinite(), 0.0).abs().max())
        eps = EPS["float64" if self.dtype == "float64" else "float32"]
        score = eps * (query.shape[-1] + 8) * summed + 2.0**-126  # underflow gives 0
        weight = (math.expm1(2 * score) + eps * (key.shape[-2] + 8)) / self._kept
        rounding = 2 * EPS[self.dtype] / self._kept
        bounds = {
            "output": float(value.max()) * (2 * weight + rounding),
            "weights": weight,
            "scores": score,
        }
        for name, tensor in outputs.items():
            self._compare(name, as_array(tensor), getattr(exact, name).numpy(), bounds[name])

    def _compare(self, name: str, found: Array, exact: Array, bound: float) -> None:
        rank = self.inputs["query"].ndim
        exact = exact.reshape(
            [n for i, n in enumerate(exact.shape) if (i or rank > 2) and (i != 1 or rank > 3)]
        )
        assert found.shape == exact.shape, name
        found = found.astype(np.float64)
        hidden = np.isneginf(exact)
        assert np.array_equal(np.isneginf(found), hidden), name
        off = np.abs(found[~hidden] - exact[~hidden]).max(initial=0.0)
        assert off <= bound, f"{name} is off by {off}, more than {bound}: {self}"

    def __str__(self) -> str:
        shapes = ", ".join(f"{n} {list(a.shape)}" for n, a in self.inputs.items())
        return f"{self.dtype} {shapes}; {self.parameters}"

    @property
    def _kept(self) -> float:
        return 1.0 - float(self.parameters.get("dropout", 0.0))

    def _lifted(self, name: str) -> torch.Tensor:
        """Returns an input with all four axes, for the reference."""
        array, rank = self.inputs[name], self.inputs["query"].ndim
        if name == "mask":
            array = array.reshape((1,) * (rank - array.ndim) + array.shape)
        if name != "key_lengths":
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
    plan, draw = np.random.default_rng([0, kind]), np.random.default_rng([1, kind, seed])

    def maybe(share: float) -> bool:
        return bool(plan.random() < share)

    rank, dtype = int(plan.integers(2, 5)), str(plan.choice(FLOATING))
    B, G, K = (int(n) for n in plan.integers(1, 4, 3))
    L, S, D, E = (int(n) for n in plan.choice([1, 2, 3, 5, 7, 8, 16, 17, 33, 64], 4))
    lead = {2: ((), (), ()), 3: ((B,), (B,), (B,)), 4: ((B, G * K), (B, G), (B, G))}[rank]
    inputs = {
        name: draw.normal(0, 1.5, (*axes, length, width)).astype(DTYPES[dtype])
        for name, axes, length, width in zip(
            ("query", "key", "value"), lead, (L, S, S), (D, D, E), strict=True
        )
    }
    if maybe(0.4):
        whole = (*lead[0], L, S)
        shape = tuple(1 if maybe(0.3) else n for n in whole[int(plan.integers(0, rank)) :])
        allowed = draw.random(shape) < 0.7
        added = np.where(allowed, draw.normal(0, 2, shape), -np.inf)
        kind_of_mask = str(plan.choice(["bool", *FLOATING]))
        inputs["mask"] = allowed if kind_of_mask == "bool" else added.astype(DTYPES[kind_of_mask])
    if maybe(0.3):
        inputs["key_lengths"] = draw.integers(0, S + 1, B if rank > 2 else 1)
    parameters: dict[str, Any] = {"causal": True} if maybe(0.4) else {}
    if maybe(0.3):
        parameters["query_offset"] = "end" if maybe(0.5) else int(plan.integers(-3, S + 1))
    if maybe(0.3):
        parameters["scale"] = float(plan.normal())
    if maybe(0.2):
        parameters["softcap"] = float(plan.uniform(0.5, 20))
    if maybe(0.3):
        parameters["window"] = [None if maybe(0.3) else int(plan.integers(0, 9)) for _ in "lr"]
    if maybe(0.15):
        parameters |= {"dropout": float(plan.uniform(0, 0.9)), "seed": int(plan.integers(2**63))}
    outputs = [("output",), ("output", "weights"), ("output", "weights", "scores")]
    return Case(
        inputs, parameters, dtype,
        outputs[int(plan.integers(3))], str(plan.choice(["lists", "base64"])),
    )  # fmt: skip
