"""Requests of the soak test: every variant in every format, with the expected outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

import numpy as np
import torch
from bodies import FORMATS

from qkv.attention.catalogue import variants
from qkv.client.arrays import to_raw
from qkv.tensors import RawTensor
from qkv.wire import json, open_inference, safetensors
from qkv.wire.message import Message
from support import accuracy
from support.accuracy_cases import DTYPES, SIZES, Case, make_inputs

LENGTHS: Final = (1, 7, 64, 257, 1000)
_MAX_WEIGHTS_LENGTH: Final = 257  # for greater lengths the encoding as text would dominate
_BINARY: Final = "application/octet-stream"


@dataclass(frozen=True)
class SoakRequest:
    """A request, and the outputs of the float64 reference.

    Attributes:
        name: description for messages.
        wire_format: a key of `FORMATS`.
        path, headers, body: the POST request.
        expected: exact outputs by name.
        error_bounds: largest allowed error of each number, by output.
        first_bytes: outputs in the first response; later responses must have the same bytes.
    """

    name: str
    wire_format: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    expected: Mapping[str, np.ndarray]
    error_bounds: Mapping[str, np.ndarray]
    first_bytes: dict[str, bytes] = field(default_factory=dict)

    def find_error(self, body: bytes, headers: Mapping[str, str]) -> str | None:
        """Returns the error in a response of status 200; None if it is correct.

        Names of headers are in lower case.
        """
        outputs = _decode(self.wire_format, body, headers)
        if outputs.keys() != self.expected.keys():
            names = sorted(self.expected)
            return f"{self.name}: outputs are wrong: got {sorted(outputs)}, expected {names}"
        for name, tensor in outputs.items():
            actual, expected = tensor.numpy(), self.expected[name]
            if actual.shape != expected.shape:
                return (
                    f"{self.name}: {name} has a wrong shape: got {actual.shape}, "
                    f"expected {expected.shape}"
                )
            error = np.abs(actual.astype(np.float64) - expected)
            if not (error <= self.error_bounds[name]).all():
                return f"{self.name}: {name} has too large an error: got {np.nanmax(error):.3g}"
            if self.first_bytes.setdefault(name, actual.tobytes()) != actual.tobytes():
                return f"{self.name}: {name} differs from the first response"
        return None


def generate_soak_requests(
    lengths: Iterable[int] = LENGTHS, seed: int = 0
) -> Iterator[SoakRequest]:
    """Yields every variant at every length in every format; dtypes and `causal` alternate."""
    for index, (variant, N) in enumerate(product(variants().values(), lengths)):
        for number, wire_format in enumerate(FORMATS):
            dtype = DTYPES[(index + number) % len(DTYPES)]
            causal = index % 2 == 0 if "causal" in variant.parameters.model_fields else None
            yield _build_soak_request(Case(variant, dtype, "random", N, causal), wire_format, seed)


def _build_soak_request(case: Case, wire_format: str, seed: int) -> SoakRequest:
    tensors = make_inputs(case, seed)
    names = {spec.argument: spec.name for spec in case.variant.inputs.values()}
    raw = {names[argument]: to_raw(tensor) for argument, tensor in tensors.items()}
    outputs = ["output", "weights"] if case.N <= _MAX_WEIGHTS_LENGTH else ["output"]
    build = _build_v2 if wire_format == "V2 binary" else _native_builder(wire_format)
    reference = accuracy.compute_reference(case, tensors, None)
    expected = {name: getattr(reference, name).numpy() for name in outputs}
    return SoakRequest(
        f"{case.variant.name} {case} in {str(case.dtype)[6:]}, {wire_format}",
        wire_format,
        *build(case, raw, outputs),
        expected,
        {
            name: bound.reshape(expected[name].shape)
            for name, bound in _error_bounds(case, seed, outputs)
        },
    )


def _error_bounds(
    case: Case, seed: int, outputs: Iterable[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the error bounds of docs/accuracy.md by output, for numbers of usual size."""
    errors, sensitivity = accuracy.measure(case, seed), accuracy.measure_sensitivity(case, seed)
    weights_dtype = accuracy.weights_dtype_of(case.dtype)
    weights_eps = torch.finfo(weights_dtype).eps
    sums_eps = torch.finfo(torch.float64).eps / getattr(case.variant.module, "_CANCELLED", 1.0)
    roundings = 8 + 2 * SIZES["D"] + case.N + math.log(8)  # no input exceeds 8
    for name in outputs:
        dtype = case.dtype if name == "output" else weights_dtype
        scale = errors.units[name] / torch.finfo(dtype).eps
        rounding = (weights_eps + sums_eps) * scale + sensitivity[name]
        bound = errors.units[name] + roundings * rounding
        yield name, bound.numpy()


def _build_v2(
    case: Case, raw: dict[str, RawTensor], outputs: list[str]
) -> tuple[str, dict[str, str], bytes]:
    requested = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    message = Message({"outputs": requested, "parameters": case.parameters}, raw)
    chunks, length = open_inference.encode(message, "inputs", raw)
    headers = {"Content-Type": _BINARY, open_inference.LENGTH_HEADER: str(length)}
    return f"/v2/models/{case.variant.name}/infer", headers, b"".join(chunks)


def _native_builder(wire_format: str) -> Callable[..., tuple[str, dict[str, str], bytes]]:
    codec: Any = safetensors if wire_format == "safetensors" else json

    def build(
        case: Case, raw: dict[str, RawTensor], outputs: list[str]
    ) -> tuple[str, dict[str, str], bytes]:
        fields = {"outputs": outputs, "parameters": case.parameters}
        if codec is json:
            fields["dtype"] = str(case.dtype)[6:]
        encoding = FORMATS[wire_format] if codec is json else None
        body = b"".join(codec.encode(Message(fields, raw, encoding=encoding), "inputs"))
        path = f"/v1/attention/{case.variant.name}"
        return path, {"Content-Type": codec.MEDIA_TYPE}, body

    return build


def _decode(wire_format: str, body: bytes, headers: Mapping[str, str]) -> dict[str, RawTensor]:
    if wire_format == "V2 binary":
        length = int(headers[open_inference.LENGTH_HEADER.lower()])
        return open_inference.decode(body, "outputs", length).tensors
    codec: Any = safetensors if wire_format == "safetensors" else json
    outputs: dict[str, RawTensor] = codec.decode(body, "outputs").tensors
    return outputs
