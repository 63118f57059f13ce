"""A JSON document that is converted in parts: plain values under limits, tensors as nested lists.

The codecs of JSON and of the Open Inference Protocol read their bodies with `Document`. simdjson
parses a text without a Python object for each value, so that a limit holds before memory is taken.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any, Final

import orjson
import simdjson
from simdjson import Array, Object

from qkv.errors import InvalidContent, MalformedRequest, PayloadTooLarge, pointer_to
from qkv.wire.long_numbers import check_long_numbers, too_large, widen_integers

MAX_SUBSTITUTED_BYTES: Final = 1 << 24
"""The longest text in which a regular expression replaces numbers. It takes 20 ms for each MiB, and
holds the GIL all the time."""
_CONTAINERS: Final = frozenset((Array, Object))
_MAX_DEPTH: Final = 32  # objects and lists within one another, outside tensors
_MAX_VALUES: Final = 10_000  # outside tensors
_MAX_NAMES: Final = 256  # of one object: each look-up of simdjson is a scan
_MAX_NAME_LENGTH: Final = 1024  # characters: the pointer to each value below contains the name
_LONGEST_EXPLAINED: Final = 1 << 20  # bytes
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"  # RFC 8259, section 8.1, permits to ignore it
_CODE: Final = re.compile(r"^[A-Z0-9_]+: ")  # simdjson's name for an error


class Document:
    """A JSON object that is converted in parts.

    Args:
        text: UTF-8. Bytes, because simdjson is much slower with any other type.

    Attributes:
        root: the object.
        lists: number of the lists that were visited.

    Raises:
        MalformedRequest: the text is not JSON, has a number too large for float64, or is not an
            object.
        PayloadTooLarge: it has too many long numbers.
    """

    def __init__(self, text: bytes) -> None:
        check_long_numbers(text)
        root = _parse(text)
        if not isinstance(root, Object):
            raise MalformedRequest("the body must be a JSON object")
        self.root = root
        self.lists = 0
        self._text = text
        self._values = 0

    @cached_property
    def has_visited_all(self) -> bool:
        """True if every list was visited, after all parts were.

        A list that was not is between numbers, where simdjson would flatten it.
        """
        return self._text.count(b"[") == self.lists

    def to_python(self, node: Any, *path: str | int) -> Any:
        """Returns a value outside tensors as Python objects.

        Args:
            node: the value.
            path: names and indices from the root to it.

        Raises:
            MalformedRequest: the value is nested too deeply.
            InvalidContent: as `members`.
            PayloadTooLarge: the document has too many values.
        """
        if type(node) not in _CONTAINERS:
            return node
        if len(path) > _MAX_DEPTH:
            raise MalformedRequest(
                f"the body is nested deeper than {_MAX_DEPTH}", pointer=pointer_to(*path)
            )
        inner = members(node, *path) if type(node) is Object else node
        self._values += len(inner)
        if self._values > _MAX_VALUES:
            raise PayloadTooLarge(
                f"the body has more than {_MAX_VALUES} values outside tensors",
                pointer=pointer_to(*path),
            )
        if isinstance(inner, dict):
            for name, value in inner.items():
                if type(value) in _CONTAINERS:  # a call for each value would take twice as long
                    inner[name] = self.to_python(value, *path, name)
            return inner
        self.lists += 1
        return [
            self.to_python(value, *path, i) if type(value) in _CONTAINERS else value
            for i, value in enumerate(inner)
        ]


def members(node: Object, *path: str | int) -> dict[str, Any]:
    """Returns the values of an object by name, without Python objects of the values below.

    Args:
        node: the object.
        path: names and indices from the root to it.

    Raises:
        InvalidContent: a name is repeated, invalid or too long, or there are too many names.
    """
    if len(node) > _MAX_NAMES:
        raise InvalidContent(
            f"an object has more than {_MAX_NAMES} names", pointer=pointer_to(*path)
        )
    found: dict[str, Any] = {}
    for name in node:
        # simdjson returns the first of two values, and looks names up as C strings
        if name in found or len(name) > _MAX_NAME_LENGTH or "\0" in name:
            raise _wrong_name(name, path, name in found)
        found[name] = node[name]
    return found


def _wrong_name(name: str, path: tuple[str | int, ...], is_repeated: bool) -> InvalidContent:
    if len(name) > _MAX_NAME_LENGTH:
        return InvalidContent(
            f"a name is too long: got {len(name)} characters, expected at most {_MAX_NAME_LENGTH}",
            pointer=pointer_to(*path),
        )
    problem = "is repeated" if is_repeated else "is not a valid name"
    return InvalidContent(f"{name!r:.60} {problem}", pointer=pointer_to(*path, name))


def _parse(text: bytes) -> Any:
    """Returns the root of a document.

    Integers beyond 64 bits become the nearest float64: JavaScript writes numbers below 1e21 as
    integers.
    """
    try:
        try:
            return simdjson.Parser().parse(text)
        except (ValueError, RuntimeError) as error:
            # simdjson reports these errors only if every string ends
            if not str(error).startswith(("BIGINT_ERROR", "NUMBER_ERROR")):
                raise
            if len(text) > MAX_SUBSTITUTED_BYTES:
                raise MalformedRequest(
                    "the body has a malformed number, or an integer beyond 64 bits: got it in "
                    f"{len(text)} bytes, where such an integer needs an exponent, "
                    f"expected at most {MAX_SUBSTITUTED_BYTES} bytes"
                ) from None
        return simdjson.Parser().parse(widen_integers(text))
    except (ValueError, RuntimeError, MemoryError) as error:
        raise MalformedRequest(_parse_problem(text, error)) from None


def _parse_problem(text: bytes, error: Exception) -> str:
    """Returns what is wrong with a text; if it is short, by orjson, which has the position."""
    if isinstance(error, UnicodeDecodeError):
        return "the body is not JSON: it is not UTF-8"
    if len(text) <= _LONGEST_EXPLAINED:
        try:
            orjson.loads(text.removeprefix(_BYTE_ORDER_MARK))
        except orjson.JSONDecodeError as decode_error:
            if (number := too_large(decode_error)) is not None:
                return number
            if "memory" not in decode_error.msg:  # orjson's message for brackets left open
                return f"the body is not JSON: {decode_error}"
    reason = _CODE.sub("", str(error)).removesuffix("  This is a fatal and unrecoverable error.")
    return f"the body is not JSON: {reason}"
