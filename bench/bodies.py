"""Requests for exact attention in every format, with the bytes of the correct response."""

from __future__ import annotations

import dataclasses
import http.client
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from load import Asked
from torch import Tensor

from qkv.attention.catalogue import find
from qkv.tensors import RawTensor
from qkv.wire import json, open_inference, safetensors
from qkv.wire.message import Message

SHAPES: Final = {"S": (1, 1, 64, 64), "M": (1, 8, 128, 64), "L": (1, 8, 1024, 64)}
FORMATS: Final = {
    "V2 binary": "bytes",
    "safetensors": "bytes",
    "JSON, base64": "base64",
    "JSON, lists": "lists",
}
"""Encoding of tensors by format; the keys are the names in tables."""

_PATIENCE_S: Final = 300
_V2: Final = "/v2/models/softmax/infer"
_NATIVE: Final = "/v1/attention/softmax"
_BINARY: Final = "application/octet-stream"


def tensors_of(shape: tuple[int, ...], keys: int | None = None) -> dict[str, Tensor]:
    """Returns query, key and value of a shape (B, H, L, D), with `keys` keys, by default L."""
    B, H, L, D = shape
    generator = torch.Generator().manual_seed(0)
    lengths = {"query": L, "key": keys or L, "value": keys or L}
    return {
        name: torch.randn((B, H, length, D), generator=generator)
        for name, length in lengths.items()
    }


def asked(
    address: tuple[str, int],
    form: str,
    tensors: Mapping[str, Tensor],
    weights: bool = False,
    size: int = 0,
) -> Asked:
    """Returns a request and its correct response, after one request that checks it.

    Args:
        address: host and port of the service that receives this request.
        form: a key of `FORMATS`.
        tensors: query, key and value.
        weights: True to request the weights beside the output.
        size: bytes of the body, padded with spaces; V2 only. 0: without padding.

    Raises:
        AssertionError: the error of the response exceeds the roundings of float32.
    """
    outputs = ["output", "weights"] if weights else ["output"]
    made = _v2(tensors, outputs, size) if form == "V2 binary" else _native(form, tensors, weights)
    connection = http.client.HTTPConnection(*address, timeout=_PATIENCE_S)
    try:
        connection.request("POST", made.path, made.body, dict(made.headers))
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    assert answer.status == 200, body[:600]
    length = answer.headers.get(open_inference.LENGTH_HEADER)
    found = _decode(form, body, int(length) if length else None)
    assert list(found) == outputs
    _check(tensors, found)
    if FORMATS[form] == "bytes":
        end = sum(tensor.nbytes for tensor in found.values())
        return dataclasses.replace(made, right=body[-end:], at_end=True)
    return dataclasses.replace(made, right=body[: body.index(b'"timing"')])


def _v2(tensors: Mapping[str, Tensor], outputs: list[str], size: int) -> Asked:
    wanted = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    message = Message({"outputs": wanted}, _raw(tensors))
    (head, *data), _ = open_inference.encode(message, "inputs", message.tensors)
    if size:
        head = bytes(head).ljust(size - sum(map(len, data)))  # JSON may end in spaces
    body = b"".join((head, *data))
    assert size in (0, len(body))
    return Asked(_V2, {"Content-Type": _BINARY, open_inference.LENGTH_HEADER: str(len(head))}, body)


def _native(form: str, tensors: Mapping[str, Tensor], weights: bool) -> Asked:
    codec: Any = safetensors if form == "safetensors" else json
    fields = {"weights": "full" if weights else "none"}
    encoding = None if codec is safetensors else FORMATS[form]
    body = b"".join(codec.encode(Message(fields, _raw(tensors), encoding=encoding), "inputs"))
    return Asked(_NATIVE, {"Content-Type": codec.MEDIA_TYPE}, body)


def _raw(tensors: Mapping[str, Tensor]) -> dict[str, RawTensor]:
    return {name: RawTensor.from_numpy(tensor.numpy()) for name, tensor in tensors.items()}


def _decode(form: str, body: bytes, length: int | None) -> dict[str, RawTensor]:
    if form == "V2 binary":
        return open_inference.decode(body, "outputs", length).tensors
    codec: Any = safetensors if form == "safetensors" else json
    found: dict[str, RawTensor] = codec.decode(body, "outputs").tensors
    return found


def _check(tensors: Mapping[str, Tensor], found: Mapping[str, RawTensor]) -> None:
    """Asserts that every output equals the reference, up to the roundings of float32."""
    right = find("softmax").module.reference(*tensors.values())
    *_, S, D = tensors["key"].shape
    for name, tensor in found.items():
        truth = getattr(right, name).numpy()
        bound = (8 + 2 * D + S) * np.finfo(np.float32).eps * np.abs(truth).max()
        off = np.abs(tensor.numpy() - truth).max()
        assert off <= bound, f"{name} is off by {off:.3g}"
