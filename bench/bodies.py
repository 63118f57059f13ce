"""Requests in every format, with the bytes of the correct response."""

from __future__ import annotations

import dataclasses
import http.client
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from load import NO_ID, BenchRequest
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

_TIMEOUT_S: Final = 300
_OTHER_VARIANTS: Final = 64  # times the roundings of exact attention
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


def build_request(
    address: tuple[str, int],
    wire_format: str,
    tensors: Mapping[str, Tensor],
    weights: bool = False,
    body_bytes: int = 0,
    variant: str = "softmax",
    has_new_ids: bool = False,
) -> BenchRequest:
    """Returns a request and its expected response, after one request that checks it.

    Args:
        address: host and port of the service that receives this request.
        wire_format: a key of `FORMATS`.
        tensors: query, key and value.
        weights: True to request the weights beside the output.
        body_bytes: size of the body, padded with spaces; V2 only. 0: without padding.
        variant: the variant that it runs.
        has_new_ids: True if it has another id each time it is sent; V2 only.

    Raises:
        AssertionError: the error of the response exceeds the roundings of float32.
    """
    names = ["output", "weights"] if weights else ["output"]
    if wire_format == "V2 binary":
        request = _build_v2(variant, tensors, names, body_bytes, has_new_ids)
    else:
        request = _build_native(variant, wire_format, tensors, weights)
    connection = http.client.HTTPConnection(*address, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", request.path, request.body, dict(request.headers))
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    assert response.status == 200, body[:600]
    length = response.headers.get(open_inference.LENGTH_HEADER)
    outputs = _decode(wire_format, body, int(length) if length else None)
    assert list(outputs) == names
    check_outputs(tensors, outputs, variant)
    if FORMATS[wire_format] == "bytes":
        size = sum(tensor.nbytes for tensor in outputs.values())
        return dataclasses.replace(request, expected_bytes=body[-size:], is_at_end=True)
    return dataclasses.replace(request, expected_bytes=body[: body.index(b'"timing"')])


def _build_v2(
    variant: str,
    tensors: Mapping[str, Tensor],
    names: list[str],
    body_bytes: int,
    has_new_ids: bool,
) -> BenchRequest:
    outputs = [{"name": name, "parameters": {"binary_data": True}} for name in names]
    fields = {"id": NO_ID} if has_new_ids else {}
    message = Message({**fields, "outputs": outputs}, _to_raw(tensors))
    (head, *chunks), _ = open_inference.encode(message, "inputs", message.tensors)
    if body_bytes:
        head = bytes(head).ljust(body_bytes - sum(map(len, chunks)))  # JSON may end in spaces
    body = b"".join((head, *chunks))
    assert body_bytes in (0, len(body))
    headers = {"Content-Type": _BINARY, open_inference.LENGTH_HEADER: str(len(head))}
    id_offset = body.index(NO_ID.encode()) if has_new_ids else -1
    return BenchRequest(f"/v2/models/{variant}/infer", headers, body, id_offset=id_offset)


def _build_native(
    variant: str, wire_format: str, tensors: Mapping[str, Tensor], weights: bool
) -> BenchRequest:
    codec: Any = safetensors if wire_format == "safetensors" else json
    fields = {"weights": "full" if weights else "none"}
    encoding = None if codec is safetensors else FORMATS[wire_format]
    body = b"".join(codec.encode(Message(fields, _to_raw(tensors), encoding=encoding), "inputs"))
    return BenchRequest(f"/v1/attention/{variant}", {"Content-Type": codec.MEDIA_TYPE}, body)


def _to_raw(tensors: Mapping[str, Tensor]) -> dict[str, RawTensor]:
    return {name: RawTensor.from_numpy(tensor.numpy()) for name, tensor in tensors.items()}


def _decode(wire_format: str, body: bytes, length: int | None) -> dict[str, RawTensor]:
    if wire_format == "V2 binary":
        return open_inference.decode(body, "outputs", length).tensors
    codec: Any = safetensors if wire_format == "safetensors" else json
    outputs: dict[str, RawTensor] = codec.decode(body, "outputs").tensors
    return outputs


def check_outputs(
    tensors: Mapping[str, Tensor], outputs: Mapping[str, RawTensor], variant: str = "softmax"
) -> None:
    """Asserts that every output equals the reference, up to the roundings of float32."""
    found = find(variant)
    arguments = [i.argument for i in found.inputs.values()]
    reference = found.reference(**dict(zip(arguments, tensors.values(), strict=False)))
    *_, S, D = tensors["value"].shape
    for name, tensor in outputs.items():
        expected = getattr(reference, name).numpy()
        bound = (8 + 2 * D + S) * np.finfo(np.float32).eps * np.abs(expected).max()
        bound *= 1 if variant == "softmax" else _OTHER_VARIANTS
        error = np.abs(tensor.numpy() - expected).max()
        assert error <= bound, f"{name} is wrong: got error {error:.3g}, expected <= {bound:.3g}"
