"""The header of a safetensors file: the one verdict of the service and the commands on such a file.

What the safetensors library refuses is refused, so that no reader sees tensors that another one
does not. So are names that appear twice, which the format forbids although its library takes the
last one, and entries that it does not describe. `playground/data/safetensors.js` judges alike.
Format: github.com/huggingface/safetensors, README.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeGuard

from qkv.errors import InvalidContent, MalformedRequest
from qkv.wire.plain_json import load_names

LENGTH_BYTES: Final = 8
"""Bytes in front of the header, which are its length, little-endian."""
_METADATA: Final = "__metadata__"
_FIELDS: Final = {"dtype", "shape", "data_offsets"}
_BITS: Final = {
    code: bits
    for bits, codes in {
        4: "F4",
        6: "F6_E2M3 F6_E3M2",
        8: "BOOL U8 I8 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ F8_E8M0",
        16: "U16 I16 F16 BF16",
        32: "U32 I32 F32",
        64: "U64 I64 F64 C64",
    }.items()
    for code in codes.split()
}
_MAX_AXES: Final = 8
_MAX_NAME_LENGTH: Final = 1024  # characters
_LARGEST: Final = 1 << 53  # JavaScript has no exact integers beyond


class Entry(NamedTuple):
    """A tensor of a file: the code of its dtype, its shape, and the place of its bytes."""

    code: str
    shape: tuple[int, ...]
    first: int
    last: int


class Header(NamedTuple):
    """A valid header: the tensors by name, in the order of their bytes, and the metadata."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def header_length(head: bytes | bytearray | memoryview, size: int) -> int:
    """Returns the length of a header in bytes.

    The message has no number of the file: it may be any file, whose content is a secret.

    Args:
        head: the first `LENGTH_BYTES` bytes of the file.
        size: bytes of the file.

    Raises:
        MalformedRequest: the file is shorter.
    """
    if size < LENGTH_BYTES:
        raise MalformedRequest(f"it is too short: got {size} bytes, expected at least 8")
    length = int.from_bytes(head, "little")
    if length > size - LENGTH_BYTES:
        raise MalformedRequest(
            "the header has a wrong length: got more bytes than the "
            f"{size - LENGTH_BYTES} that follow, as in a file that is cut off or has another format"
        )
    return length


def read_header(
    text: bytes, size: int, max_tensors: int, pointer_of: Callable[[str], str | None]
) -> Header:
    """Parses a header, and checks that its tensors take the bytes behind it without gaps.

    Args:
        text: the header.
        size: bytes behind it.
        max_tensors: that it may have.
        pointer_of: returns the JSON pointer to a tensor, for errors.

    Raises:
        MalformedRequest: it is no header, or the tensors do not take these bytes.
        InvalidContent: the dtype or the shape of a tensor is invalid.
    """
    header = _parse(text)
    metadata = _check_metadata(header.pop(_METADATA, None))
    if len(header) > max_tensors:
        raise MalformedRequest(f"the header has more than {max_tensors} tensors")
    entries = {name: _entry(name, value, pointer_of) for name, value in header.items()}
    # an empty tensor comes before the one with the same first byte
    ordered = dict(sorted(entries.items(), key=lambda item: item[1][2:]))
    end = 0
    for name, (_, _, first, last) in ordered.items():
        if first != end or last > size:
            raise MalformedRequest(
                f"{name!r:.60} has invalid data_offsets: got {first} to {last} of {size} bytes, "
                f"expected a start at {end}, the end of the previous tensor"
            )
        end = last
    if end != size:
        raise MalformedRequest(f"{size - end} bytes belong to no tensor")
    return Header(ordered, metadata)


def _parse(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise MalformedRequest("the header must be a JSON object that begins with {")
    parse_int = _index if b"-0" in text else None  # Python reads -0, which is no index, as 0
    try:
        header: dict[str, Any] = load_names(text, parse_int)
    except ValueError as error:
        raise MalformedRequest(f"the header is not JSON: {error}") from None
    if (length := max(map(len, header), default=0)) > _MAX_NAME_LENGTH:
        raise MalformedRequest(
            f"a name is too long: got {length} characters, expected at most {_MAX_NAME_LENGTH}"
        )
    return header


def _index(digits: str) -> int:
    if digits.startswith("-"):
        raise ValueError("it has a negative number")
    return int(digits)


def _check_metadata(metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise MalformedRequest(f"{_METADATA} is invalid: expected an object of strings")
    try:
        "".join(metadata.values()).encode()
    except UnicodeEncodeError:
        raise MalformedRequest(f"{_METADATA} has half a surrogate pair") from None
    return metadata


def _entry(name: str, value: Any, pointer_of: Callable[[str], str | None]) -> Entry:
    """Returns the entry of a tensor, whose dtype and shape fit its number of bytes."""
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise MalformedRequest(
            f"{name!r:.60} has the wrong fields: expected dtype, shape and data_offsets only"
        )
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in _BITS:
        raise InvalidContent(
            f"{name!r:.60} has an unknown dtype: got {code!r:.60}, expected {', '.join(_BITS)}",
            pointer=pointer_of(name),
        )
    if (
        not _are_indices(shape)
        or len(shape) > _MAX_AXES
        or math.prod(filter(None, shape)) * _BITS[code] >= 8 * _LARGEST
    ):
        raise InvalidContent(
            f"{name!r:.60} has an invalid shape: got {shape!r:.100}, expected at most {_MAX_AXES} "
            "integers, 0 or more, for less than 2**53 bytes",
            pointer=pointer_of(name),
        )
    if not _are_indices(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise MalformedRequest(
            f"{name!r:.60} has invalid data_offsets: got {offsets!r:.100}, expected two integers, "
            "the first and the end of its bytes"
        )
    first, last = offsets
    bits = math.prod(shape) * _BITS[code]
    if bits != 8 * (last - first):
        raise InvalidContent(
            f"{name!r:.60} has the wrong number of bytes: got {last - first}, expected "
            f"{bits / 8:.17g} for {code} of shape {shape!r:.100}",
            pointer=pointer_of(name),
        )
    return Entry(code, tuple(shape), first, last)


def _are_indices(values: object) -> TypeGuard[list[int]]:
    if type(values) is not list:
        return False
    for value in values:  # faster than all(...)
        if type(value) is not int:  # True is one for isinstance
            return False
        if not 0 <= value < _LARGEST:
            return False
    return True
