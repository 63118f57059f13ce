"""JSON: tensors as nested lists, or as an object of dtype, shape and base64 data."""

from __future__ import annotations

from typing import Any, Final

import orjson
import pybase64
import simdjson

from qkv.errors import InvalidContent, MalformedRequest, format_value, pointer_to
from qkv.tensors import DTYPES, RawTensor, nbytes
from qkv.wire import json_arrays
from qkv.wire.json_arrays import MAX_AXES, Document, NestedLists, format_node, items
from qkv.wire.message import Message

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
    """Nowhere: nothing in it is used in place."""


def decode(body: bytes | memoryview, group: str) -> Message:
    """Reads a message whose tensors stand under `group`, and maybe under /layer/tensors.

    Args:
        body: UTF-8 JSON, an object.
        group: "inputs", "outputs" or "tensors".

    Raises:
        MalformedRequest: it is not JSON, not an object, or nested too deep.
        InvalidContent: a name comes twice, or a tensor is ragged, mistyped, or not as long as
            its shape says.
    """
    document = Document(bytes(body))  # itself, where it is bytes
    fields: dict[str, Any] = {}
    tensors: dict[str, NestedLists | _Base64] = {}
    layer: dict[str, NestedLists | _Base64] = {}
    for name, node in items(document.root, ""):
        if name == group:
            tensors = _tensors(document, node, f"/{group}")
        elif name == "layer" and isinstance(node, simdjson.Object):
            fields["layer"] = {}
            for key, inner in items(node, "/layer"):
                if key == "tensors":
                    layer = _tensors(document, inner, "/layer/tensors")
                else:
                    fields["layer"][key] = document.to_python(inner, f"/layer/{key}")
        else:
            fields[name] = document.to_python(node, f"/{name}")
    encoding = pop_encoding(fields)
    if encoding is None:
        first = next(iter(tensors.values()), None)
        encoding = "base64" if isinstance(first, _Base64) else "lists"
    found = (*tensors.values(), *layer.values())
    has_visited_all = any(isinstance(t, NestedLists) for t in found) and document.has_visited_all
    return Message(
        fields,
        {name: tensor.read(has_visited_all) for name, tensor in tensors.items()},
        {name: tensor.read(has_visited_all) for name, tensor in layer.items()},
        encoding,
    )


def encode(message: Message, group: str) -> list[bytes | memoryview]:
    """Writes a message; its tensors stand under `group`, in that field's place if there is one."""
    document = dict(message.fields)
    write = _write_base64 if message.encoding == "base64" else json_arrays.write
    document[group] = {n: orjson.Fragment(write(t)) for n, t in message.tensors.items()}
    if message.layer:
        tensors = {n: orjson.Fragment(write(t)) for n, t in message.layer.items()}
        document["layer"] = document.get("layer", {}) | {"tensors": tensors}
    if message.encoding is not None and group == "inputs":
        document["encoding"] = message.encoding
    return [orjson.dumps(document)]


def decode_fields(text: bytes) -> dict[str, Any]:
    """Reads an object without tensors, under the limits that hold for a message.

    Raises:
        MalformedRequest, InvalidContent, PayloadTooLarge: as in `decode`.
    """
    document = Document(text)
    fields: dict[str, Any] = document.to_python(document.root, "")
    return fields


def load(text: bytes | str) -> Any:
    """Reads plain JSON.

    Raises:
        MalformedRequest: it is not JSON.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise MalformedRequest(f"not JSON: {error}") from None


def pop_encoding(fields: dict[str, Any]) -> str | None:
    """Takes `encoding` out of a message's fields.

    Raises:
        InvalidContent: it is no encoding.
    """
    encoding = fields.pop("encoding", None)
    if encoding is not None and encoding not in _ENCODINGS:
        raise InvalidContent(
            f"encoding came as {format_value(encoding)}; it must be {' or '.join(_ENCODINGS)}",
            pointer="/encoding",
        )
    return None if encoding is None else str(encoding)


def dump(document: Any) -> bytes:
    """Writes plain JSON, such as a problem document."""
    return orjson.dumps(document)


def _tensors(document: Document, node: Any, pointer: str) -> dict[str, NestedLists | _Base64]:
    """The tensors of a group, walked but not read."""
    if not isinstance(node, simdjson.Object):
        raise InvalidContent(
            f"{pointer[1:]} must be an object, tensors by name; {format_node(node)} came",
            pointer=pointer,
        )
    return {
        name: _tensor(document, inner, name, pointer + pointer_to(name))
        for name, inner in items(node, pointer)
    }


def _tensor(document: Document, node: Any, name: str, pointer: str) -> NestedLists | _Base64:
    if not isinstance(node, simdjson.Object):
        return document.nested_lists(node, name, pointer)
    fields = {k: document.to_python(inner, f"{pointer}/{k}") for k, inner in items(node, pointer)}
    if fields.keys() != _TENSOR_KEYS:
        raise InvalidContent(
            f"{name} as an object has dtype, shape and data; {', '.join(fields) or 'nothing'} came",
            pointer=pointer,
        )
    return _Base64(name, pointer, **fields)


class _Base64:
    """A tensor as base64 in a document, not yet read."""

    def __init__(self, name: str, pointer: str, dtype: Any, shape: Any, data: Any) -> None:
        self.name, self.pointer = name, pointer
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise InvalidContent(
                f"{name} has dtype {format_value(dtype)}; known are {', '.join(DTYPES)}",
                pointer=f"{pointer}/dtype",
            )
        if (
            not isinstance(shape, list)
            or len(shape) > MAX_AXES
            or not all(type(size) is int and size >= 0 for size in shape)
            or nbytes(dtype, [size or 1 for size in shape]) >= 1 << 63
        ):
            raise InvalidContent(
                f"{name} has shape {format_value(shape)}; it must be at most {MAX_AXES} whole "
                "numbers, none negative, of less than 2**63 bytes together",
                pointer=f"{pointer}/shape",
            )
        if not isinstance(data, str):
            raise InvalidContent(
                f"{name} has data {format_value(data)}; it must be a string of base64",
                pointer=f"{pointer}/data",
            )
        self._dtype, self._shape, self._data = dtype, tuple(shape), data

    def read(self, _: bool) -> RawTensor:
        """The tensor."""
        needed = nbytes(self._dtype, self._shape)
        if len(self._data) != 4 * -(-needed // 3):
            raise InvalidContent(
                f"{self.name} is {self._dtype} of shape {list(self._shape)}, {needed} bytes or "
                f"{4 * -(-needed // 3)} characters of base64; {len(self._data)} characters came",
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
                f"{self.name} needs {needed} bytes; {len(data)} came",
                pointer=f"{self.pointer}/data",
            )
        if self._dtype == "bool" and max(data, default=0) > 1:
            raise InvalidContent(
                f"{self.name} is bool and holds bytes other than 0 and 1",
                pointer=f"{self.pointer}/data",
            )
        return RawTensor(self._dtype, self._shape, memoryview(data))


def _write_base64(tensor: RawTensor) -> bytes:
    head = orjson.dumps({"dtype": tensor.dtype, "shape": tensor.shape})[:-1]
    return b"".join((head, b',"data":"', pybase64.b64encode(tensor.data), b'"}'))
