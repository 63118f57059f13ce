"""The safetensors codec: tensors as bytes, fields as JSON under `qkv` in the metadata.

Format: 8 bytes N, little-endian; N bytes of JSON header; the tensors' bytes, without gaps
(github.com/huggingface/safetensors, README). Beside inputs, the tensors of a layer are named
`layer.<name>`; beside the tensors of a conversion, those of its check are `check.x` and `check.y`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import orjson

from qkv.errors import InvalidContent, MalformedRequest, pointer_to
from qkv.tensors import RawTensor, nbytes
from qkv.wire.json import decode_fields, pop_encoding
from qkv.wire.message import Message
from qkv.wire.plain_json import MAX_NAME_LENGTH, load_names, load_object

__all__ = [
    "DTYPES",
    "LAYER",
    "MAX_NAMES",
    "MEDIA_TYPE",
    "aligned_offset",
    "decode",
    "decode_metadata",
    "encode",
]

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
_MAX_AXES: Final = 8
_ALIGNMENT: Final = 64


def aligned_offset(head: bytes) -> int:
    """Returns the index of the first byte of the first tensor, which then needs no copy later.

    Args:
        head: the first 8 bytes of the body.
    """
    return 8 + int.from_bytes(head[:8], "little") if len(head) >= 8 else 0


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
    if len(view) < 8:
        raise MalformedRequest(
            f"a safetensors file is too short: got {len(view)} bytes, expected at least 8"
        )
    length = int.from_bytes(view[:8], "little")
    if length > len(view) - 8:
        raise MalformedRequest(
            f"the header has a wrong length: got {length} bytes, expected at most the "
            f"{len(view) - 8} bytes after the length"
        )
    if length > _MAX_HEADER:
        raise MalformedRequest(
            f"the header is too long: got {length} bytes of names, shapes and fields, expected "
            f"at most {_MAX_HEADER}. Send numbers as tensors instead of lists in a field, and "
            "only the tensors of one layer"
        )
    header = _header(bytes(view[8 : 8 + length]))
    metadata = header.pop(_METADATA, {})
    data = view[8 + length :]
    tensors: dict[str, RawTensor] = {}
    layer: dict[str, RawTensor] = {}
    check: dict[str, RawTensor] = {}
    is_checkpoint = group == "tensors"
    end = 0
    for name, entry in sorted(header.items(), key=_byte_range):
        # elsewhere "layer." begins a tensor's own name, as in a BERT encoder's layer.0.attention
        if is_checkpoint and name in _CHECK:
            inner = _CHECK[name]
            check[inner], end = _tensor(name, entry, data, end, pointer_to("check", inner))
        elif group == "inputs" and name.startswith(LAYER):
            inner = name.removeprefix(LAYER)
            pointer = pointer_to("layer", "tensors", inner)
            layer[inner], end = _tensor(name, entry, data, end, pointer)
        else:
            tensors[name], end = _tensor(name, entry, data, end, pointer_to(group, name))
    if end != len(data):
        raise MalformedRequest(f"{len(data) - end} bytes belong to no tensor")
    fields = decode_metadata(metadata)
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


def _header(text: bytes) -> dict[str, Any]:
    header = load_object(text)
    if header is None:
        try:
            header = load_names(text)
        except ValueError as error:
            raise MalformedRequest(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise MalformedRequest("the header must be a JSON object")
    if len(header) > MAX_NAMES:
        raise MalformedRequest(f"the header has more than {MAX_NAMES} tensors")
    if (length := max(map(len, header), default=0)) > MAX_NAME_LENGTH:
        raise MalformedRequest(
            f"a name is too long: got {length} characters, expected at most {MAX_NAME_LENGTH}"
        )
    return header


def _byte_range(entry: tuple[str, Any]) -> list[int]:
    """Returns the offsets of a tensor's bytes, as a sort key; [] if they are invalid.

    An empty tensor comes before the tensor with the same first offset.
    """
    offsets = entry[1].get("data_offsets") if isinstance(entry[1], dict) else None
    return offsets if isinstance(offsets, list) and all(map(_is_count, offsets)) else []


def _tensor(
    name: str, entry: Any, data: memoryview, end: int, pointer: str
) -> tuple[RawTensor, int]:
    """Returns a tensor and the offset of its end.

    Args:
        name: its name in the header.
        entry: its entry in the header.
        data: the bytes of all tensors.
        end: the offset of the end of the previous tensor.
        pointer: JSON pointer to the tensor.
    """
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise MalformedRequest(
            f"{name!r:.60} has the wrong fields: expected dtype, shape and data_offsets only"
        )
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise InvalidContent(
            f"{name!r:.60} has an unknown dtype: got {code!r:.60}, expected {', '.join(DTYPES)}",
            pointer=pointer,
        )
    dtype = DTYPES[code]
    if (
        not isinstance(shape, list)
        or len(shape) > _MAX_AXES
        or not all(map(_is_count, shape))
        or nbytes(dtype, [size or 1 for size in shape]) >= 1 << 63
    ):
        raise InvalidContent(
            f"{name!r:.60} has an invalid shape: got {shape!r:.100}, expected at most {_MAX_AXES} "
            "integers, 0 or more, for less than 2**63 bytes",
            pointer=pointer,
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise MalformedRequest(
            f"{name!r:.60} has invalid data_offsets: got {offsets!r:.100}, expected two integers"
        )
    first, last = offsets
    if first != end or not first <= last <= len(data):
        raise MalformedRequest(
            f"{name!r:.60} has invalid data_offsets: got {first} to {last} of {len(data)} bytes, "
            f"expected a start at {end}, the end of the previous tensor"
        )
    if nbytes(dtype, shape) != last - first:
        raise InvalidContent(
            f"{name!r:.60} has the wrong number of bytes: got {last - first}, expected "
            f"{nbytes(dtype, shape)} for {code} of shape {shape}",
            pointer=pointer,
        )
    buffer = data[first:last]
    if dtype == "bool" and last > first and np.frombuffer(buffer, np.uint8).max() > 1:
        raise InvalidContent(
            f"{name!r:.60} is BOOL and has bytes other than 0 and 1", pointer=pointer
        )
    return RawTensor(dtype, tuple(shape), buffer), last


def decode_metadata(metadata: Any) -> dict[str, Any]:
    """Returns the fields under `qkv`; ignores other metadata.

    Raises:
        MalformedRequest: the metadata are no object, or `qkv` is not a JSON object.
        InvalidContent: `qkv` is not a string.
    """
    if not isinstance(metadata, dict):
        raise MalformedRequest(f"{_METADATA} must be an object")
    text = metadata.get("qkv", "{}")
    if not isinstance(text, str):
        raise InvalidContent("qkv in the metadata must be a string of JSON", pointer="")
    try:
        return decode_fields(text.encode())
    except UnicodeEncodeError as error:
        raise MalformedRequest(f"qkv in the metadata is not UTF-8: {error}") from None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
