"""The safetensors codec: tensors as bytes, fields as JSON under `qkv` in the metadata.

Beside inputs, the tensors of a layer are named `layer.<name>`; beside the tensors of a conversion,
those of its check are `check.x` and `check.y`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from qkv.errors import InvalidContent, MalformedRequest, pointer_to
from qkv.tensors import RawTensor, are_booleans
from qkv.wire.json import decode_fields, pop_encoding
from qkv.wire.message import Message
from qkv.wire.safetensors_header import LENGTH_BYTES, Entry, header_length, read_header

MEDIA_TYPE: Final = "application/vnd.safetensors"
LAYER: Final = "layer."
"""Begins the names of a layer's tensors in a request that has inputs too."""
MAX_NAMES: Final = 4096
"""The most tensors of a message."""

DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "BOOL": "bool",
}
"""The dtypes of messages, by their code in the format."""
_CODES: Final = {dtype: code for code, dtype in DTYPES.items()}
_CHECK: Final = {"check.x": "x", "check.y": "y"}
_METADATA: Final = "__metadata__"
_MAX_HEADER: Final = 1 << 20
_ALIGNMENT: Final = 64


def aligned_offset(head: bytes) -> int:
    """Returns the index of the first byte of the first tensor, which then needs no copy later.

    Args:
        head: the first 8 bytes of the body.
    """
    is_whole = len(head) >= LENGTH_BYTES
    return LENGTH_BYTES + int.from_bytes(head[:LENGTH_BYTES], "little") if is_whole else 0


def decode(body: bytes | memoryview, group: str) -> Message:
    """Parses a message; its tensors are views of the body.

    Args:
        body: the file.
        group: the field of the tensors, for pointers in errors.

    Raises:
        MalformedRequest: lengths, header or offsets are not those of a safetensors file.
        InvalidContent: a dtype or shape is not supported, or `qkv` is not JSON.
    """
    view = memoryview(body)
    length = header_length(view[:LENGTH_BYTES], len(view))
    if length > _MAX_HEADER:
        raise MalformedRequest(
            f"the header is too long: got {length} bytes of names, shapes and fields, expected "
            f"at most {_MAX_HEADER}. Send numbers as tensors instead of lists in a field, and "
            "only the tensors of one layer"
        )
    start = LENGTH_BYTES + length
    data = view[start:]
    header = read_header(
        bytes(view[LENGTH_BYTES:start]), len(data), MAX_NAMES, lambda name: _pointer(name, group)
    )
    tensors: dict[str, RawTensor] = {}
    layer: dict[str, RawTensor] = {}
    check: dict[str, RawTensor] = {}
    parts = {"layer": layer, "check": check}
    for name, entry in header.entries.items():
        part, inner = _place(name, group)
        parts.get(part, tensors)[inner] = _tensor(name, entry, data, group)
    fields = decode_metadata(header.metadata)
    if layer:  # as in JSON, where the field contains its tensors
        fields.setdefault("layer", {})
    if check:
        fields["check"] = {}
    return Message(fields, tensors, layer, pop_encoding(fields), check)


def encode(message: Message, group: str) -> list[bytes | memoryview]:
    """Encodes a message as chunks: a header, and the buffer of each tensor.

    The header is padded, so that the first tensor is aligned if the file is.
    """
    fields = {name: value for name, value in message.fields.items() if name != group}
    header: dict[str, Any] = {_METADATA: {"qkv": orjson.dumps(fields).decode()}}
    named = message.tensors | {LAYER + name: t for name, t in message.layer.items()}
    if message.check:
        named |= {f"check.{name}": t for name, t in message.check.items()}
    end = 0
    for name, tensor in named.items():
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = orjson.dumps(header)
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return [len(text).to_bytes(8, "little") + text, *(t.data for t in named.values())]


def _place(name: str, group: str) -> tuple[str, str]:
    """Returns the part of a message that a tensor belongs to, and its name there.

    Elsewhere "layer." begins a tensor's own name, as in a BERT encoder's layer.0.attention.
    """
    if group == "tensors" and name in _CHECK:
        return "check", _CHECK[name]
    if group == "inputs" and name.startswith(LAYER):
        return "layer", name.removeprefix(LAYER)
    return group, name


def _pointer(name: str, group: str) -> str:
    part, inner = _place(name, group)
    return pointer_to("layer", "tensors", inner) if part == "layer" else pointer_to(part, inner)


def _tensor(name: str, entry: Entry, data: memoryview, group: str) -> RawTensor:
    """Returns a tensor of the header.

    Raises:
        InvalidContent: requests do not support its dtype, or a boolean is neither 0 nor 1.
    """
    code, shape, first, last = entry
    if code not in DTYPES:
        raise InvalidContent(
            f"{name!r:.60} has an unknown dtype: got {code!r}, expected {', '.join(DTYPES)}",
            pointer=_pointer(name, group),
        )
    buffer = data[first:last]
    if code == "BOOL" and not are_booleans(buffer):
        raise InvalidContent(
            f"{name!r:.60} is BOOL and has bytes other than 0 and 1", pointer=_pointer(name, group)
        )
    return RawTensor(DTYPES[code], shape, buffer)


def decode_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields under `qkv`; ignores other metadata.

    Raises:
        MalformedRequest: `qkv` is not a JSON object.
    """
    return decode_fields(metadata.get("qkv", "{}").encode())
