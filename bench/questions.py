"""Requests of the soak test: every variant in every format, with the correct outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

import accuracy
import numpy as np
import torch
from bodies import FORMATS
from families import DTYPES, SIZES, Case, inputs

from qkv.attention.catalogue import variants
from qkv.client.arrays import to_raw
from qkv.tensors import RawTensor
from qkv.wire import json, open_inference, safetensors
from qkv.wire.message import Message

LENGTHS: Final = (1, 7, 64, 257, 1000)
_MOST_WEIGHTS: Final = 257  # for greater lengths the encoding as text would dominate
_BINARY: Final = "application/octet-stream"


@dataclass(frozen=True)
class Question:
    """A request, and the outputs of the float64 reference.

    Attributes:
        name: description for messages.
        form: a key of `FORMATS`.
        path, headers, body: the POST request.
        right: exact outputs by name.
        bound: largest allowed error of each number, by output.
        bits: bytes of the outputs in the first response; later responses must have the same.
    """

    name: str
    form: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    right: Mapping[str, np.ndarray]
    bound: Mapping[str, np.ndarray]
    bits: dict[str, bytes] = field(default_factory=dict)

    def fault(self, body: bytes, headers: Mapping[str, str]) -> str | None:
        """Returns the error in a response of status 200; None if it is correct.

        Names of headers are in lower case.
        """
        found = _decode(self.form, body, headers)
        if found.keys() != self.right.keys():
            wanted = sorted(self.right)
            return f"{self.name}: outputs are wrong: got {sorted(found)}, expected {wanted}"
        for name, tensor in found.items():
            came = tensor.numpy()
            if came.shape != self.right[name].shape:
                return f"{self.name}: {name} has a wrong shape: got {came.shape}"
            off = np.abs(came.astype(np.float64) - self.right[name])
            if not (off <= self.bound[name]).all():
                return f"{self.name}: {name} is off by {np.nanmax(off):.3g}"
            if self.bits.setdefault(name, came.tobytes()) != came.tobytes():
                return f"{self.name}: {name} has other bits than before"
        return None


def questions(lengths: Iterable[int] = LENGTHS, seed: int = 0) -> Iterator[Question]:
    """Yields every variant at every length in every format; dtypes and `causal` alternate."""
    for turn, (variant, N) in enumerate(product(variants().values(), lengths)):
        for number, form in enumerate(FORMATS):
            dtype = DTYPES[(turn + number) % len(DTYPES)]
            causal = turn % 2 == 0 if "causal" in variant.parameters.model_fields else None
            yield _question(Case(variant, dtype, "random", N, causal), form, seed)


def _question(case: Case, form: str, seed: int) -> Question:
    tensors = inputs(case, seed)
    names = {spec.argument: spec.name for spec in case.variant.inputs.values()}
    raw = {names[argument]: to_raw(tensor) for argument, tensor in tensors.items()}
    outputs = ["output", "weights"] if case.N <= _MOST_WEIGHTS else ["output"]
    write = _v2 if form == "V2 binary" else _native(form)
    truth = accuracy.reference(case, tensors, None)
    right = {name: getattr(truth, name).numpy() for name in outputs}
    return Question(
        f"{case.variant.name} {case} in {str(case.dtype)[6:]}, {form}",
        form,
        *write(case, raw, outputs),
        right,
        {name: bound.reshape(right[name].shape) for name, bound in _bounds(case, seed, outputs)},
    )


def _bounds(case: Case, seed: int, outputs: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the error bounds of docs/accuracy.md by output, for numbers of usual size."""
    found, moved = accuracy.measure(case, seed), accuracy.moved(case, seed)
    exact = torch.finfo(accuracy.exact(case.dtype)).eps
    sums = torch.finfo(torch.float64).eps / getattr(case.variant.module, "_CANCELLED", 1.0)
    roundings = 8 + 2 * SIZES["D"] + case.N + math.log(8)  # no input exceeds 8
    for name in outputs:
        made = case.dtype if name == "output" else accuracy.exact(case.dtype)
        scale = found.units[name] / torch.finfo(made).eps
        bound = found.units[name] + roundings * ((exact + sums) * scale + moved[name])
        yield name, bound.numpy()


def _v2(
    case: Case, raw: dict[str, RawTensor], outputs: list[str]
) -> tuple[str, dict[str, str], bytes]:
    wanted = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    message = Message({"outputs": wanted, "parameters": case.parameters}, raw)
    chunks, length = open_inference.encode(message, "inputs", raw)
    headers = {"Content-Type": _BINARY, open_inference.LENGTH_HEADER: str(length)}
    return f"/v2/models/{case.variant.name}/infer", headers, b"".join(chunks)


def _native(form: str) -> Callable[..., tuple[str, dict[str, str], bytes]]:
    codec: Any = safetensors if form == "safetensors" else json

    def write(
        case: Case, raw: dict[str, RawTensor], outputs: list[str]
    ) -> tuple[str, dict[str, str], bytes]:
        fields = {"outputs": outputs, "parameters": case.parameters}
        if codec is json:
            fields["dtype"] = str(case.dtype)[6:]
        encoding = FORMATS[form] if codec is json else None
        body = b"".join(codec.encode(Message(fields, raw, encoding=encoding), "inputs"))
        path = f"/v1/attention/{case.variant.name}"
        return path, {"Content-Type": codec.MEDIA_TYPE}, body

    return write


def _decode(form: str, body: bytes, headers: Mapping[str, str]) -> dict[str, RawTensor]:
    if form == "V2 binary":
        length = int(headers[open_inference.LENGTH_HEADER.lower()])
        return open_inference.decode(body, "outputs", length).tensors
    codec: Any = safetensors if form == "safetensors" else json
    found: dict[str, RawTensor] = codec.decode(body, "outputs").tensors
    return found
