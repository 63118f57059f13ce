"""The codec of the Open Inference Protocol, V2: JSON with a list of tensors, then their bytes.

Formats: the protocol's "Inference Request JSON Object" and "Inference Response JSON Object"
(github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md), and Triton's
binary tensor data extension (github.com/triton-inference-server/server,
docs/protocol/extension_binary_data.md). The tensors of a message are the list `inputs` or
`outputs`; the list of requested outputs is an ordinary field.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
from simdjson import Array, Object

from qkv.errors import (
    InvalidContent,
    MalformedRequest,
    PayloadTooLarge,
    format_value,
)
from qkv.tensors import DTYPES, RawTensor, are_booleans, nbytes
from qkv.wire import json_arrays
from qkv.wire.casting import cast_untyped
from qkv.wire.json_arrays import VALID_SHAPE, NestedLists, format_node, is_shape
from qkv.wire.json_document import MAX_SUBSTITUTED_BYTES, Document, members
from qkv.wire.message import Message
from qkv.wire.open_inference_responses import DATATYPES, BinarySize, InferTensor

__all__ = [
    "DATATYPES",
    "LENGTH_HEADER",
    "Head",
    "decode",
    "encode",
    "encode_tensors",
    "json_length",
    "split_head",
]

LENGTH_HEADER: Final = "Inference-Header-Content-Length"
"""The header with the length of the JSON in bytes, if bytes of tensors follow it."""

_DTYPES: Final = {datatype: dtype for dtype, datatype in DATATYPES.items()}
_KEYS: Final = dict.fromkeys(("name", "datatype", "shape", "parameters", "data"))
_MAX_KNOWN: Final = 1024  # entries of outputs that are kept
_MAX_HEAD_BYTES: Final = 2048
_ID: Final = re.compile(rb'"id"\s*:\s*"([ !#-\[\]-~]*+)"')
_OTHER_ID: Final = secrets.token_hex(8).encode()  # no client knows it
_SIZE: Final = "binary_data_size"
_MAX_TENSORS: Final = 256
_MAX_BARE: Final = 1 << 18
_BARE: Final = re.compile(rb"(?<=[\[,:\s])(NaN|-?Infinity)(?=[\],}\s])")


def json_length(header: str | None) -> int | None:
    """Returns the length in the header; None if there is no header, and the body is JSON.

    Raises:
        InvalidContent: the header is not an integer.
    """
    if header is None:
        return None
    if not (header.isascii() and header.isdigit() and len(header) <= 20):
        raise InvalidContent(f"{LENGTH_HEADER} is invalid: got {header!r:.60}, expected an integer")
    return int(header)


class Head(NamedTuple):
    """The JSON of a request before the bytes of its tensors.

    Attributes:
        id: its id; None if none was found.
        key: its JSON, in parts, without the id. If one request with a key `may_be_kept`, all others
            with that key differ from it in their ids and bytes only.
        data: the bytes of its tensors.
    """

    id: str | None
    key: tuple[bytes, ...]
    data: memoryview

    def may_be_kept(self, id: str | None) -> bool:
        """Returns True if `id` was found in its place, for a request that is valid.

        Another string in that place becomes the id of the request, and changes nothing else: an id
        that was found has no quotes, escapes or control characters.
        """
        if self.id is None or self.id != id:
            return self.id == id
        other = orjson.loads(_OTHER_ID.join(self.key))
        return bool(other.get("id") == _OTHER_ID.decode())


def split_head(body: bytes | memoryview, length: int | None) -> Head | None:
    """Returns the head of a request without parsing it; None if it is long, or there is only JSON.

    Args:
        body, length: as for `decode`.
    """
    if length is None or length > min(len(body), _MAX_HEAD_BYTES):
        return None
    view = memoryview(body)
    text, data = bytes(view[:length]), view[length:]
    if (match := _ID.search(text)) is None:
        return Head(None, (text,), data)
    first, end = match.span(1)
    return Head(match[1].decode(), (text[:first], text[end:]), data)


def decode(body: bytes | memoryview, group: str, length: int | None = None) -> Message:
    """Parses a message. Its tensors are the list `group`; binary tensors are views of the body.

    Args:
        body: JSON, optionally with the bytes of tensors after it.
        group: "inputs" or "outputs".
        length: bytes of the JSON; None: all.

    Raises:
        MalformedRequest: the lengths do not match the body, or the JSON is malformed.
        InvalidContent: a tensor does not match its shape and datatype, or is not supported.
        PayloadTooLarge: there are too many values that each cost a Python object.
    """
    view = memoryview(body)
    if length is not None and length > len(view):
        raise MalformedRequest(
            f"{LENGTH_HEADER} is too large: got {length}, expected at most {len(view)}"
        )
    document = _document(bytes(body if length is None else view[:length]))
    data = view[len(view) if length is None else length :]
    fields: dict[str, Any] = {}
    unread: Sequence[_Tensor] = ()
    for name, node in members(document.root).items():
        if name == group:
            unread = _tensors(document, node, group)
        else:
            fields[name] = document.to_python(node, name)
    tensors: dict[str, RawTensor] = {}
    end = 0
    for tensor in unread:
        if tensor.name in tensors:
            raise InvalidContent(f"{tensor.name!r:.60} is repeated", pointer=tensor.pointer)
        tensors[tensor.name] = tensor.read(data[end:])
        end += tensor.size
    if end != len(data):
        raise MalformedRequest(f"{len(data) - end} bytes after the JSON belong to no tensor")
    return Message(fields, tensors)


def _document(text: bytes) -> Document:
    """Parses JSON in which NaN and Infinity may lack quotes, as Triton's client writes them."""
    try:
        return Document(text)
    except MalformedRequest:
        bare = text.count(b"NaN") + text.count(b"Infinity")
        if not bare or len(text) > MAX_SUBSTITUTED_BYTES or not _BARE.search(text):
            raise
        if bare > _MAX_BARE:  # each costs a Python object
            raise PayloadTooLarge(
                f"the JSON has more than {_MAX_BARE} NaN and Infinity without quotes; send bytes"
            ) from None
    return Document(_BARE.sub(rb'"\1"', text))


def encode(
    message: Message, group: str, binary: Collection[str]
) -> tuple[list[bytes | memoryview], int | None]:
    """Encodes a message as chunks: JSON, and the buffers of binary tensors.

    Args:
        message: fields and tensors.
        group: the field of the tensors, "inputs" or "outputs".
        binary: the names of tensors whose bytes follow the JSON. The others become flat lists.

    Returns:
        The chunks, and the length of the JSON for the header; None if there is only JSON.
    """
    entries, chunks = encode_tensors(message.tensors, binary)
    text = orjson.dumps(message.fields | {group: entries})
    return [text, *chunks], len(text) if chunks else None


def encode_tensors(
    tensors: Mapping[str, RawTensor], binary: Collection[str]
) -> tuple[list[orjson.Fragment], list[memoryview]]:
    """Returns the entries of tensors in JSON, and the buffers of those that are binary.

    Args:
        tensors: by name.
        binary: the names of tensors whose bytes follow the JSON. The others become flat lists.
    """
    entries: list[orjson.Fragment] = []
    chunks = []
    for name, tensor in tensors.items():
        datatype = DATATYPES[tensor.dtype]
        if name in binary:
            entries.append(_binary_entry(name, datatype, tensor.shape, tensor.nbytes))
            chunks.append(tensor.data)
        else:
            count = tensor.nbytes // DTYPES[tensor.dtype].itemsize
            flat = RawTensor(tensor.dtype, (count,), tensor.data)
            entry = InferTensor(name=name, datatype=datatype, shape=tensor.shape).to_json()
            data = json_arrays.write(flat)
            entries.append(orjson.Fragment(b'%b,"data":%b}' % (entry[:-1], data)))
    return entries, chunks


@lru_cache(_MAX_KNOWN)
def _binary_entry(name: str, datatype: str, shape: tuple[int, ...], size: int) -> orjson.Fragment:
    """Returns the entry of a binary tensor as JSON, which is the same for many responses."""
    parameters = BinarySize(binary_data_size=size)
    entry = InferTensor(name=name, datatype=datatype, shape=shape, parameters=parameters)
    return orjson.Fragment(entry.to_json())


class _Tensor:
    """An entry of the list, without its bytes or numbers.

    Attributes:
        label: its name, shortened for error messages.
        size: the number of its bytes after the JSON; 0 if its numbers are in the JSON.
    """

    def __init__(self, document: Document, node: Any, group: str, index: int) -> None:
        self.pointer = f"/{group}/{index}"
        if not isinstance(node, Object):
            raise InvalidContent(
                f"{self.pointer[1:]} must be an object: got {format_node(node)}",
                pointer=self.pointer,
            )
        inner = members(node, group, index)
        data = inner.pop("data", None)
        plain = {k: document.to_python(value, group, index, k) for k, value in inner.items()}
        self.name = _read_name(plain, self.pointer)
        self.label = f"{self.name:.60}"
        self.dtype, self.shape = self._form(plain)
        self.size = self._binary_size(plain.get("parameters"), data is not None)
        self._numbers = None
        if data is not None:
            self._numbers = NestedLists(document, data, self.label, group, index, "data")

    def read(self, data: memoryview) -> RawTensor:
        """Returns the tensor: its numbers, or a view of the first bytes of `data`."""
        return self._view(data) if self._numbers is None else self._read(self._numbers)

    def _view(self, data: memoryview) -> RawTensor:
        if len(data) < self.size:
            raise MalformedRequest(
                f"{self.label} has too few bytes after the JSON: got {len(data)}, expected "
                f"{_SIZE} {self.size}",
                pointer=self.pointer,
            )
        part = data[: self.size]
        if self.dtype == "bool" and not are_booleans(part):
            raise self._wrong("is BOOL and has bytes other than 0 and 1")
        return RawTensor(self.dtype, self.shape, part)

    def _read(self, numbers: NestedLists) -> RawTensor:
        """Returns the tensor of numbers that are nested as in its shape, or flat."""
        count = nbytes(self.dtype, self.shape) // DTYPES[self.dtype].itemsize
        # lists have no sizes within an empty axis
        nested = self.shape[: self.shape.index(0) + 1] if 0 in self.shape else self.shape
        if numbers.shape not in (nested, (count,)):
            raise self._wrong(
                f"has data of the wrong shape: got {list(numbers.shape)}, expected "
                f"{list(self.shape)} or [{count}]"
            )
        raw = numbers.read()
        if self.dtype != "bool":
            raw = cast_untyped(raw, self.label, [self.dtype], self.dtype, f"{self.pointer}/data")
            return RawTensor(self.dtype, self.shape, raw.data)
        array = raw.numpy()
        if not ((array == 0) | (array == 1)).all():
            raise self._wrong("is BOOL and has values other than true and false")
        return RawTensor.from_numpy(array.astype(np.bool_).reshape(self.shape))

    def _form(self, plain: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
        """Returns dtype and shape."""
        if not plain.keys() <= _KEYS.keys():
            unknown = next(key for key in plain if key not in _KEYS)
            raise self._wrong(
                f"has an unknown field: got {unknown!r:.60}, expected {', '.join(_KEYS)}"
            )
        datatype, shape = plain.get("datatype"), plain.get("shape")
        if not isinstance(datatype, str) or datatype not in _DTYPES:
            raise self._wrong(
                f"has an unsupported datatype: got {format_value(datatype)}, "
                f"expected {', '.join(_DTYPES)}"
            )
        dtype = _DTYPES[datatype]
        if not is_shape(shape, dtype):
            raise self._wrong(
                f"has an invalid shape: got {format_value(shape)}, expected {VALID_SHAPE}"
            )
        return dtype, tuple(shape)

    def _binary_size(self, parameters: Any, has_data: bool) -> int:
        if parameters is not None and not isinstance(parameters, dict):
            raise self._wrong(
                f"has invalid parameters: got {format_value(parameters)}, expected an object"
            )
        for key in parameters or {}:
            if key.startswith("shared_memory"):
                raise self._wrong("is in shared memory, which is not supported; send its bytes")
            if key != _SIZE:
                raise self._wrong(f"has an unknown parameter: got {key!r:.60}, expected {_SIZE}")
        size = (parameters or {}).get(_SIZE)
        if (size is not None) == has_data:
            both = "both data and" if has_data else "neither data nor"
            raise self._wrong(f"has {both} {_SIZE}: expected one of them")
        needed = nbytes(self.dtype, self.shape)
        if size is not None and (type(size) is not int or size != needed):
            raise self._wrong(
                f"has a wrong {_SIZE}: got {format_value(size)}, expected {needed} for "
                f"{DATATYPES[self.dtype]} of shape {list(self.shape)}"
            )
        return 0 if has_data else needed

    def _wrong(self, what: str) -> InvalidContent:
        return InvalidContent(f"{self.label} {what}", pointer=self.pointer)


def _tensors(document: Document, node: Any, group: str) -> Sequence[_Tensor]:
    if not isinstance(node, Array):
        raise InvalidContent(
            f"{group} must be a list of tensors: got {format_node(node)}", pointer=f"/{group}"
        )
    if len(node) > _MAX_TENSORS:
        raise InvalidContent(f"{group} has more than {_MAX_TENSORS} tensors", pointer=f"/{group}")
    document.lists += 1
    return [_Tensor(document, entry, group, i) for i, entry in enumerate(node)]


def _read_name(plain: dict[str, Any], pointer: str) -> str:
    name = plain.get("name")
    if not isinstance(name, str):
        raise InvalidContent(
            f"{pointer[1:]} has an invalid name: got {format_value(name)}, expected a string",
            pointer=f"{pointer}/name",
        )
    return name
