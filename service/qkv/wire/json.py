"""The JSON codec: a tensor is nested lists, or an object of dtype, shape and base64 data.

`decode` and `encode` handle messages, `load` and `dump` plain JSON.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
import pybase64
from simdjson import Array, Object

from qkv.errors import InvalidContent, MalformedRequest, format_value, pointer_to
from qkv.tensors import DTYPES, RawTensor, are_booleans, nbytes
from qkv.wire import json_arrays
from qkv.wire.json_arrays import VALID_SHAPE, NestedLists, format_node, is_shape
from qkv.wire.json_document import Document, members
from qkv.wire.long_numbers import too_large
from qkv.wire.message import Message

MEDIA_TYPE: Final = "application/json"
PROBLEM_TYPE: Final = "application/problem+json"

_ENCODINGS: Final = ("lists", "base64")
_TENSOR_KEYS: Final = {"dtype", "shape", "data"}


def aligned_offset(head: bytes) -> None:
    """Returns None: no bytes of a JSON body are used in place."""


def decode(body: bytes | memoryview, group: str) -> Message:
    """Parses a message with tensors in the field `group`, and optionally in others.

    These are `layer.tensors` beside inputs, and `check` beside the tensors of a conversion.

    Args:
        body: UTF-8 JSON, an object.
        group: "inputs", "outputs" or "tensors".

    Raises:
        MalformedRequest: the body is not JSON, not an object, or nested too deeply.
        InvalidContent: a name is repeated, or a tensor is ragged, has a wrong type, or does not
            match its shape.
    """
    document = Document(bytes(body))  # no copy if it is bytes
    fields: dict[str, Any] = {}
    tensors: dict[str, NestedLists | RawTensor] = {}
    layer: dict[str, NestedLists | RawTensor] = {}
    check: dict[str, NestedLists | RawTensor] = {}
    for name, node in members(document.root).items():
        if name == group:
            tensors = _tensors(document, node, group)
        elif name == "layer" and isinstance(node, Object):
            fields["layer"] = {}
            for key, inner in members(node, "layer").items():
                if key == "tensors":
                    layer = _tensors(document, inner, "layer", key)
                else:
                    fields["layer"][key] = document.to_python(inner, "layer", key)
        elif name == "check" and group == "tensors" and isinstance(node, Object):
            fields["check"] = {}
            for key, inner in members(node, "check").items():
                if isinstance(inner, (Array, Object)):
                    check[key] = _tensor(document, inner, f"check.{key}", "check", key)
                else:  # a response has numbers there
                    fields["check"][key] = inner
        else:
            fields[name] = document.to_python(node, name)
    encoding = pop_encoding(fields)
    if encoding is None:
        first = next(iter(tensors.values()), None)
        encoding = "base64" if isinstance(first, RawTensor) else "lists"
    return Message(fields, _read(tensors), _read(layer), encoding, _read(check))


def encode(message: Message, group: str) -> list[bytes | memoryview]:
    """Encodes a message. Its tensors replace the field `group`, or follow the other fields.

    A response whose fields do not name the group, and that has no tensors, has no such field.
    """
    document = dict(message.fields)
    write = _write_base64 if message.encoding == "base64" else json_arrays.write
    tensors, layer, check = (
        {name: orjson.Fragment(write(tensor)) for name, tensor in part.items()}
        for part in (message.tensors, message.layer, message.check)
    )
    if tensors or group in document or group == "inputs":
        document[group] = tensors
    if check:
        document["check"] = document.get("check", {}) | check
    if layer:
        document["layer"] = document.get("layer", {}) | {"tensors": layer}
    if message.encoding is not None and group == "inputs":
        document["encoding"] = message.encoding
    return [orjson.dumps(document)]


def decode_fields(text: bytes) -> dict[str, Any]:
    """Parses an object without tensors, under the limits of a message.

    Raises:
        MalformedRequest, InvalidContent, PayloadTooLarge: as in `decode`.
    """
    document = Document(text)
    fields: dict[str, Any] = document.to_python(document.root)
    return fields


def load(text: bytes | str) -> Any:
    """Parses plain JSON.

    Raises:
        MalformedRequest: the text is not JSON.
        InvalidContent: a number is too large for float64.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise MalformedRequest(too_large(error) or f"not JSON: {error}") from None


def pop_encoding(fields: dict[str, Any]) -> str | None:
    """Removes `encoding` from the fields of a message, and returns it; None if it is absent.

    Raises:
        InvalidContent: the encoding is unknown.
    """
    encoding = fields.pop("encoding", None)
    if encoding is not None and encoding not in _ENCODINGS:
        raise InvalidContent(
            f"encoding is unknown: got {format_value(encoding)}, "
            f"expected {' or '.join(_ENCODINGS)}",
            pointer="/encoding",
        )
    return None if encoding is None else str(encoding)


def dump(document: Any) -> bytes:
    """Encodes plain JSON, such as a problem document."""
    return orjson.dumps(document)


def _tensors(document: Document, node: Any, *path: str) -> dict[str, NestedLists | RawTensor]:
    """Returns the tensors of a group; those of lists have their shapes, but not their numbers."""
    if not isinstance(node, Object):
        raise InvalidContent(
            f"{'/'.join(path)} must be an object of tensors by name: got {format_node(node)}",
            pointer=pointer_to(*path),
        )
    found = members(node, *path)
    return {name: _tensor(document, inner, name, *path, name) for name, inner in found.items()}


def _tensor(document: Document, node: Any, name: str, *path: str) -> NestedLists | RawTensor:
    if not isinstance(node, Object):
        return NestedLists(document, node, name, *path)
    fields = document.to_python(node, *path)
    if fields.keys() != _TENSOR_KEYS:
        raise InvalidContent(
            f"{name} has the wrong fields: got {', '.join(fields) or 'none'}, expected dtype, "
            "shape and data",
            pointer=pointer_to(*path),
        )
    return _read_base64(name, pointer_to(*path), **fields)


def _read(tensors: dict[str, NestedLists | RawTensor]) -> dict[str, RawTensor]:
    return {name: t if isinstance(t, RawTensor) else t.read() for name, t in tensors.items()}


def _read_base64(name: str, pointer: str, dtype: Any, shape: Any, data: Any) -> RawTensor:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InvalidContent(
            f"{name} has an unknown dtype: got {format_value(dtype)}, expected {', '.join(DTYPES)}",
            pointer=f"{pointer}/dtype",
        )
    if not is_shape(shape, dtype):
        raise InvalidContent(
            f"{name} has an invalid shape: got {format_value(shape)}, expected {VALID_SHAPE}",
            pointer=f"{pointer}/shape",
        )
    if not isinstance(data, str):
        raise InvalidContent(
            f"{name} has invalid data: got {format_value(data)}, expected a string of base64",
            pointer=f"{pointer}/data",
        )
    pointer += "/data"
    needed = nbytes(dtype, shape)
    if len(data) != 4 * -(-needed // 3):
        raise InvalidContent(
            f"{name} has data of the wrong length: got {len(data)} characters of base64, expected "
            f"{4 * -(-needed // 3)} for {dtype} of shape {shape}",
            pointer=pointer,
        )
    try:
        decoded = pybase64.b64decode_as_bytearray(data, validate=True)
    except ValueError as error:  # not base64, or not ASCII
        raise InvalidContent(
            f"{name} has data that is not base64: {error}", pointer=pointer
        ) from None
    if len(decoded) != needed:
        raise InvalidContent(
            f"{name} has data of the wrong length: got {len(decoded)} bytes, expected {needed}",
            pointer=pointer,
        )
    if dtype == "bool" and not are_booleans(decoded):
        raise InvalidContent(f"{name} is bool and has bytes other than 0 and 1", pointer=pointer)
    return RawTensor(dtype, tuple(shape), memoryview(decoded))


def _write_base64(tensor: RawTensor) -> bytes:
    head = orjson.dumps({"dtype": tensor.dtype, "shape": tensor.shape})[:-1]
    return b"".join((head, b',"data":"', pybase64.b64encode(tensor.data), b'"}'))
