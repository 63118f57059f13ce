"""The Open Inference Protocol, V2: JSON that lists tensors, and their bytes behind it.

Formats: the protocol's "Inference Request JSON Object" and "Inference Response JSON Object"
(github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md), and Triton's
binary tensor data extension (github.com/triton-inference-server/server,
docs/protocol/extension_binary_data.md). A message's tensors stand in the list `inputs` or
`outputs`; the list of the outputs that a request asks for is a field like any other.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Final

import numpy as np
import orjson
import simdjson

from qkv.errors import InvalidContent, MalformedRequest, PayloadTooLarge, format_value
from qkv.tensors import DTYPES, RawTensor, nbytes
from qkv.wire import json_arrays
from qkv.wire.casting import cast_untyped
from qkv.wire.json_arrays import MAX_AXES, Document, NestedLists, format_node, items
from qkv.wire.message import Message

__all__ = ["DATATYPES", "LENGTH_HEADER", "decode", "encode", "json_length"]

LENGTH_HEADER: Final = "Inference-Header-Content-Length"
"""The header that says how many bytes of a body are its JSON, where tensors follow it."""

DATATYPES: Final = {
    "float64": "FP64",
    "float32": "FP32",
    "float16": "FP16",
    "bfloat16": "BF16",
    "int64": "INT64",
    "bool": "BOOL",
}
"""What the protocol calls each dtype."""

_DTYPES: Final = {datatype: dtype for dtype, datatype in DATATYPES.items()}
_KEYS: Final = ("name", "datatype", "shape", "parameters", "data")
_SIZE: Final = "binary_data_size"
_MAX_TENSORS: Final = 256
_MAX_BARE: Final = 1 << 18
_BARE: Final = re.compile(rb"(?<=[\[,:\s])(NaN|-?Infinity)(?=[\],}\s])")


def json_length(header: str | None) -> int | None:
    """What the length header says; None where there is no header, and the whole body is JSON.

    Raises:
        InvalidContent: it is no whole number.
    """
    if header is None:
        return None
    if not (header.isascii() and header.isdigit() and len(header) <= 20):
        raise InvalidContent(f"{LENGTH_HEADER} is {header!r:.60}; it must be a whole number")
    return int(header)


def decode(body: bytes | memoryview, group: str, length: int | None = None) -> Message:
    """Reads a message whose tensors stand in the list `group`; those that came as bytes are views
    of the body.

    Args:
        body: JSON, and maybe the bytes of tensors behind it.
        group: "inputs" or "outputs".
        length: bytes of the JSON; None: all.

    Raises:
        MalformedRequest: the lengths do not add up, or the JSON is none.
        InvalidContent: a tensor is not as its shape and datatype say, or none that is served.
        PayloadTooLarge: what costs a Python object each is too many.
    """
    view = memoryview(body)
    if length is not None and length > len(view):
        raise MalformedRequest(f"{LENGTH_HEADER} is {length}; the body has {len(view)} bytes")
    document = _document(bytes(body if length is None else view[:length]))
    data = view[len(view) if length is None else length :]
    fields: dict[str, Any] = {}
    found: list[_Tensor] = []
    for name, node in items(document.root, ""):
        if name == group:
            found = _tensors(document, node, group)
        else:
            fields[name] = document.to_python(node, f"/{name}")
    has_visited_all = any(t.nested_lists for t in found) and document.has_visited_all
    tensors: dict[str, RawTensor] = {}
    end = 0
    for tensor in found:
        if tensor.name in tensors:
            raise InvalidContent(f"{tensor.name!r:.60} comes twice", pointer=tensor.pointer)
        if tensor.nested_lists is None:
            tensors[tensor.name] = tensor.view(data[end:])
            end += tensor.size
        else:
            tensors[tensor.name] = tensor.read(tensor.nested_lists, has_visited_all)
    if end != len(data):
        raise MalformedRequest(f"{len(data) - end} bytes behind the JSON belong to no tensor")
    return Message(fields, tensors)


def _document(text: bytes) -> Document:
    """The JSON; Triton's client writes NaN and Infinity without quotes, which is none."""
    try:
        return Document(text)
    except MalformedRequest:
        bare = text.count(b"NaN") + text.count(b"Infinity")
        if not bare or not _BARE.search(text):
            raise
        if bare > _MAX_BARE:  # each costs a Python object
            raise PayloadTooLarge(
                f"more than {_MAX_BARE} NaN and Infinity without quotes; send bytes"
            ) from None
    return Document(_BARE.sub(rb'"\1"', text))


def encode(
    message: Message, group: str, binary: Collection[str]
) -> tuple[list[bytes | memoryview], int | None]:
    """Writes a message as chunks: JSON, and the buffers of some tensors.

    Args:
        message: fields, and tensors.
        group: where the tensors stand, "inputs" or "outputs".
        binary: names of the tensors that go as bytes; the others go as flat lists.

    Returns:
        The chunks, and the JSON's length for the header; None where all is JSON.
    """
    entries, chunks = [], []
    for name, tensor in message.tensors.items():
        entry: dict[str, Any] = {
            "name": name,
            "datatype": DATATYPES[tensor.dtype],
            "shape": tensor.shape,
        }
        if name in binary:
            entry["parameters"] = {_SIZE: tensor.nbytes}
            chunks.append(tensor.data)
        else:
            size = tensor.nbytes // DTYPES[tensor.dtype].itemsize
            flat = RawTensor(tensor.dtype, (size,), tensor.data)
            entry["data"] = orjson.Fragment(json_arrays.write(flat))
        entries.append(entry)
    text = orjson.dumps(message.fields | {group: entries})
    return [text, *chunks], len(text) if chunks else None


class _Tensor:
    """An entry of the list, with all but its bytes or numbers.

    Attributes:
        label: its name, as far as a person needs it.
        nested_lists: its numbers, where they stand in the JSON.
        size: how many bytes it has behind the JSON.
    """

    def __init__(self, document: Document, node: Any, pointer: str) -> None:
        if not isinstance(node, simdjson.Object):
            raise InvalidContent(
                f"{pointer[1:]} must be an object; {format_node(node)} came", pointer=pointer
            )
        plain: dict[str, Any] = {}
        data: Any = None
        for key, inner in items(node, pointer):
            if key == "data":
                data = inner
            else:
                plain[key] = document.to_python(inner, f"{pointer}/{key}")
        self.pointer = pointer
        self.name = _read_name(plain, pointer)
        self.label = f"{self.name:.60}"
        self.dtype, self.shape = self._form(plain)
        self.size = self._binary_size(plain.get("parameters"), data is not None)
        self.nested_lists = None
        if data is not None:
            self.nested_lists = document.nested_lists(data, self.label, f"{pointer}/data")

    def view(self, data: memoryview) -> RawTensor:
        """The tensor whose bytes these are the first of."""
        if len(data) < self.size:
            raise MalformedRequest(
                f"{self.label} has {_SIZE} {self.size}; {len(data)} bytes are left behind the JSON",
                pointer=self.pointer,
            )
        own = data[: self.size]
        if self.dtype == "bool" and self.size and np.frombuffer(own, np.uint8).max() > 1:
            raise self._wrong("is BOOL and holds bytes other than 0 and 1")
        return RawTensor(self.dtype, self.shape, own)

    def read(self, numbers: NestedLists, has_visited_all: bool) -> RawTensor:
        """The tensor whose numbers these are, nested as its shape says, or flat."""
        count = nbytes(self.dtype, self.shape) // DTYPES[self.dtype].itemsize
        # an empty axis hides those within it
        nested = self.shape[: self.shape.index(0) + 1] if 0 in self.shape else self.shape
        if numbers.shape not in (nested, (count,)):
            raise self._wrong(
                f"has shape {list(self.shape)}, {count} elements; its data came as "
                f"{list(numbers.shape)}"
            )
        raw = numbers.read(has_visited_all)
        if self.dtype != "bool":
            raw = cast_untyped(raw, self.label, [self.dtype], self.dtype, f"{self.pointer}/data")
            return RawTensor(self.dtype, self.shape, raw.data)
        array = raw.numpy()
        if not ((array == 0) | (array == 1)).all():
            raise self._wrong("is BOOL and holds other than true and false")
        return RawTensor.from_numpy(array.astype(np.bool_).reshape(self.shape))

    def _form(self, plain: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
        """dtype and shape."""
        for key in plain:
            if key not in _KEYS:
                raise self._wrong(f"has {key!r:.60}; known are {', '.join(_KEYS)}")
        datatype, shape = plain.get("datatype"), plain.get("shape")
        if not isinstance(datatype, str) or datatype not in _DTYPES:
            raise self._wrong(
                f"has datatype {format_value(datatype)}; served are {', '.join(_DTYPES)}"
            )
        dtype = _DTYPES[datatype]
        if (
            not isinstance(shape, list)
            or len(shape) > MAX_AXES
            or not all(type(size) is int and size >= 0 for size in shape)
            or nbytes(dtype, [size or 1 for size in shape]) >= 1 << 63
        ):
            raise self._wrong(
                f"has shape {format_value(shape)}; it must be at most {MAX_AXES} whole "
                "numbers, none negative, of less than 2**63 bytes together"
            )
        return dtype, tuple(shape)

    def _binary_size(self, parameters: Any, has_data: bool) -> int:
        if parameters is not None and not isinstance(parameters, dict):
            raise self._wrong(f"has parameters {format_value(parameters)}; they must be an object")
        for key in parameters or {}:
            if key.startswith("shared_memory"):
                raise self._wrong("lies in shared memory, which is not read here; send its bytes")
            if key != _SIZE:
                raise self._wrong(f"has the parameter {key!r:.60}; known is {_SIZE}")
        size = (parameters or {}).get(_SIZE)
        if (size is not None) == has_data:
            both = "both data and" if has_data else "neither data nor"
            raise self._wrong(f"has {both} {_SIZE}; it must have one of them")
        needed = nbytes(self.dtype, self.shape)
        if size is not None and (type(size) is not int or size != needed):
            raise self._wrong(
                f"has {_SIZE} {format_value(size)}; {DATATYPES[self.dtype]} of shape "
                f"{list(self.shape)} takes {needed}"
            )
        return 0 if has_data else needed

    def _wrong(self, what: str) -> InvalidContent:
        return InvalidContent(f"{self.label} {what}", pointer=self.pointer)


def _tensors(document: Document, node: Any, group: str) -> list[_Tensor]:
    if not isinstance(node, simdjson.Array):
        raise InvalidContent(
            f"{group} must be a list of tensors; {format_node(node)} came", pointer=f"/{group}"
        )
    if len(node) > _MAX_TENSORS:
        raise InvalidContent(f"{group} holds more than {_MAX_TENSORS}", pointer=f"/{group}")
    entries = enumerate(document.elements(node))
    return [_Tensor(document, entry, f"/{group}/{i}") for i, entry in entries]


def _read_name(plain: dict[str, Any], pointer: str) -> str:
    name = plain.get("name")
    if not isinstance(name, str):
        raise InvalidContent(
            f"{pointer[1:]} has name {format_value(name)}; it must be a string",
            pointer=f"{pointer}/name",
        )
    return name
