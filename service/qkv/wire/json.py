"""The JSON codec: a tensor is nested lists, or an object of dtype, shape and base64 data.

`decode` and `encode` handle messages, `load` and `dump` plain JSON.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import orjson
import pybase64

from qkv.errors import InvalidContent, MalformedRequest, format_value, pointer_to
from qkv.tensors import DTYPES, RawTensor, nbytes
from qkv.wire import json_arrays
from qkv.wire.json_arrays import LIST, MAX_AXES, OBJECT, NestedLists, format_node
from qkv.wire.json_document import Document, items
from qkv.wire.message import Message
from qkv.wire.plain_json import refuse_large_number

__all__ = [
    "MEDIA_TYPE",
    "PROBLEM_TYPE",
    "aligned_offset",
    "decode",
    "decode_fields",
    "dump",
    "encode",
    "load",
    "pop_encoding",
]

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
    tensors: dict[str, NestedLists | _Base64] = {}
    layer: dict[str, NestedLists | _Base64] = {}
    check: dict[str, NestedLists | _Base64] = {}
    for name, node in items(document.root, ""):
        if name == group:
            tensors = _tensors(document, node, f"/{group}")
        elif name == "layer" and isinstance(node, OBJECT):
            fields["layer"] = {}
            for key, inner in items(node, "/layer"):
                if key == "tensors":
                    layer = _tensors(document, inner, "/layer/tensors")
                else:
                    fields["layer"][key] = document.to_python(inner, f"/layer/{key}")
        elif name == "check" and group == "tensors" and isinstance(node, OBJECT):
            fields["check"] = {}
            for key, inner in items(node, "/check"):
                pointer = pointer_to("check", key)
                if isinstance(inner, LIST + OBJECT):
                    check[key] = _tensor(document, inner, f"check.{key}", pointer)
                else:  # a response has numbers there
                    fields["check"][key] = document.to_python(inner, pointer)
        else:
            fields[name] = document.to_python(node, f"/{name}")
    encoding = pop_encoding(fields)
    if encoding is None:
        first = next(iter(tensors.values()), None)
        encoding = "base64" if isinstance(first, _Base64) else "lists"
    unread = (*tensors.values(), *layer.values(), *check.values())
    has_visited_all = any(isinstance(t, NestedLists) for t in unread) and document.has_visited_all
    return Message(
        fields,
        {name: tensor.read(has_visited_all) for name, tensor in tensors.items()},
        {name: tensor.read(has_visited_all) for name, tensor in layer.items()},
        encoding,
        {name: tensor.read(has_visited_all) for name, tensor in check.items()},
    )


def encode(message: Message, group: str) -> list[bytes | memoryview]:
    """Encodes a message. Its tensors replace the field `group`, or follow the other fields.

    A response whose fields do not name the group, and that has no tensors, has no such field.
    """
    document = dict(message.fields)
    write = _write_base64 if message.encoding == "base64" else json_arrays.write
    if message.tensors or group in document or group == "inputs":
        document[group] = {n: orjson.Fragment(write(t)) for n, t in message.tensors.items()}
    if message.check:
        tensors = {n: orjson.Fragment(write(t)) for n, t in message.check.items()}
        document["check"] = document.get("check", {}) | tensors
    if message.layer:
        tensors = {n: orjson.Fragment(write(t)) for n, t in message.layer.items()}
        document["layer"] = document.get("layer", {}) | {"tensors": tensors}
    if message.encoding is not None and group == "inputs":
        document["encoding"] = message.encoding
    return [orjson.dumps(document)]


def decode_fields(text: bytes) -> dict[str, Any]:
    """Parses an object without tensors, under the limits of a message.

    Raises:
        MalformedRequest, InvalidContent, PayloadTooLarge: as in `decode`.
    """
    document = Document(text)
    return {
        name: document.to_python(node, pointer_to(name)) for name, node in items(document.root, "")
    }


def load(text: bytes | str) -> Any:
    """Parses plain JSON.

    Raises:
        MalformedRequest: the text is not JSON.
        InvalidContent: a number is too large for float64.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if "infinity" in error.msg:
            refuse_large_number(text.encode() if isinstance(text, str) else text)
        raise MalformedRequest(f"not JSON: {error}") from None


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
    """Encodes plain JSON, such as a problem document, and responses."""
    return msgspec.json.encode(document)


def _tensors(document: Document, node: Any, pointer: str) -> dict[str, NestedLists | _Base64]:
    """Returns the tensors of a group, with their shapes but without their numbers."""
    if not isinstance(node, OBJECT):
        raise InvalidContent(
            f"{pointer[1:]} must be an object of tensors by name: got {format_node(node)}",
            pointer=pointer,
        )
    return {
        name: _tensor(document, inner, name, pointer + pointer_to(name))
        for name, inner in items(node, pointer)
    }


def _tensor(document: Document, node: Any, name: str, pointer: str) -> NestedLists | _Base64:
    if not isinstance(node, OBJECT):
        return document.nested_lists(node, name, pointer)
    fields = {k: document.to_python(inner, f"{pointer}/{k}") for k, inner in items(node, pointer)}
    if fields.keys() != _TENSOR_KEYS:
        raise InvalidContent(
            f"{name} has the wrong fields: got {', '.join(fields) or 'none'}, expected dtype, "
            "shape and data",
            pointer=pointer,
        )
    return _Base64(name, pointer, **fields)


class _Base64:
    """A tensor as base64 in a document; `read` decodes it."""

    def __init__(self, name: str, pointer: str, dtype: Any, shape: Any, data: Any) -> None:
        self.name, self.pointer = name, pointer
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise InvalidContent(
                f"{name} has an unknown dtype: got {format_value(dtype)}, "
                f"expected {', '.join(DTYPES)}",
                pointer=f"{pointer}/dtype",
            )
        if (
            not isinstance(shape, list)
            or len(shape) > MAX_AXES
            or not all(type(size) is int and size >= 0 for size in shape)
            or nbytes(dtype, [size or 1 for size in shape]) >= 1 << 63
        ):
            raise InvalidContent(
                f"{name} has an invalid shape: got {format_value(shape)}, expected at most "
                f"{MAX_AXES} integers, 0 or more, for less than 2**63 bytes",
                pointer=f"{pointer}/shape",
            )
        if not isinstance(data, str):
            raise InvalidContent(
                f"{name} has invalid data: got {format_value(data)}, expected a string of base64",
                pointer=f"{pointer}/data",
            )
        self._dtype, self._shape, self._data = dtype, tuple(shape), data

    def read(self, _: bool) -> RawTensor:
        """Returns the decoded tensor."""
        needed = nbytes(self._dtype, self._shape)
        if len(self._data) != 4 * -(-needed // 3):
            raise InvalidContent(
                f"{self.name} has data of the wrong length: got {len(self._data)} characters of "
                f"base64, expected {4 * -(-needed // 3)} for {self._dtype} of shape "
                f"{list(self._shape)}",
                pointer=f"{self.pointer}/data",
            )
        try:
            data = pybase64.b64decode_as_bytearray(self._data, validate=True)
        except ValueError as error:  # not base64, or not ASCII
            raise InvalidContent(
                f"{self.name} has data that is not base64: {error}", pointer=f"{self.pointer}/data"
            ) from None
        if len(data) != needed:
            raise InvalidContent(
                f"{self.name} has data of the wrong length: got {len(data)} bytes, "
                f"expected {needed}",
                pointer=f"{self.pointer}/data",
            )
        if self._dtype == "bool" and max(data, default=0) > 1:
            raise InvalidContent(
                f"{self.name} is bool and has bytes other than 0 and 1",
                pointer=f"{self.pointer}/data",
            )
        return RawTensor(self._dtype, self._shape, memoryview(data))


def _write_base64(tensor: RawTensor) -> bytes:
    head = orjson.dumps({"dtype": tensor.dtype, "shape": tensor.shape})[:-1]
    return b"".join((head, b',"data":"', pybase64.b64encode(tensor.data), b'"}'))
