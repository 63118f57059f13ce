"""A JSON document that is converted in parts: plain values under limits, tensors as nested lists.

The codecs of JSON and of the Open Inference Protocol read their bodies with `Document`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import orjson
import simdjson

from qkv.errors import InvalidContent, MalformedRequest, PayloadTooLarge, pointer_to
from qkv.wire.json_arrays import MAX_OBJECTS, OBJECT, NestedLists
from qkv.wire.long_numbers import check_long_numbers
from qkv.wire.plain_json import (
    MAX_DEPTH,
    MAX_NAME_LENGTH,
    MAX_NAMES,
    load_object,
    refuse_large_number,
)

__all__ = ["MAX_SUBSTITUTED_BYTES", "Document", "items"]

MAX_SUBSTITUTED_BYTES: Final = 1 << 24
"""The longest text in which a regular expression replaces numbers. It takes 20 ms for each MiB, and
holds the GIL all the time."""
_MAX_VALUES: Final = 10_000  # outside tensors
# A string, or an integer that may exceed 64 bits, between its neighbours in JSON. The quantifiers
# are possessive, because there are strings of 64 MiB.
_WIDE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|(?<=[\[,:\s])-?[0-9]{19,}(?=[\],}\s])', re.DOTALL)
_LONGEST_EXPLAINED: Final = 1 << 20  # bytes
_CODE: Final = re.compile(r"^[A-Z0-9_]+: ")  # simdjson's name for an error


class Document:
    """A JSON object that is converted in parts. Counts the visited arrays, and the values outside
    tensors.

    Args:
        text: UTF-8. Bytes, because simdjson is much slower with any other type.

    Attributes:
        root: the object.
        is_plain: it consists of Python objects, which need no conversion.

    Raises:
        MalformedRequest: the text is not JSON, has a number too large for float64, or is not an
            object.
        PayloadTooLarge: it has too many long numbers.
    """

    def __init__(self, text: bytes) -> None:
        plain = load_object(text)
        self.is_plain = plain is not None
        if not self.is_plain:
            check_long_numbers(text)
        try:
            root = plain if self.is_plain else _parse(text)
        except (ValueError, RuntimeError, MemoryError) as error:
            if str(error).startswith("NUMBER_ERROR"):  # simdjson reports it if every string ends
                refuse_large_number(text)
            raise MalformedRequest(
                f"the body is not JSON: {_parse_error_reason(text, error)}"
            ) from None
        if not isinstance(root, OBJECT):
            raise MalformedRequest("the body must be a JSON object")
        self.root = root
        self._text = text
        self._arrays = 0
        self._values = 0

    @property
    def has_visited_all(self) -> bool:
        """True if every array was visited.

        An array that was not is between numbers, where simdjson would flatten it.
        """
        if self.is_plain:
            return True
        brackets = np.frombuffer(self._text, np.uint8) == ord("[")  # faster than bytes.count
        return int(np.count_nonzero(brackets)) == self._arrays

    def to_python(self, node: Any, pointer: str, depth: int = 0) -> Any:
        """Returns a value outside tensors as Python objects.

        Raises:
            MalformedRequest: the value is nested too deeply.
            PayloadTooLarge: the document has too many values.
        """
        if self.is_plain:
            return node
        if depth > MAX_DEPTH:
            raise MalformedRequest(f"the body is nested deeper than {MAX_DEPTH}", pointer=pointer)
        self._values += 1
        if self._values > _MAX_VALUES:
            raise PayloadTooLarge(
                f"the body has more than {_MAX_VALUES} values outside tensors", pointer=pointer
            )
        if isinstance(node, simdjson.Object):
            return {
                name: self.to_python(inner, pointer + pointer_to(name), depth + 1)
                for name, inner in items(node, pointer)
            }
        if isinstance(node, simdjson.Array):
            return [
                self.to_python(inner, f"{pointer}/{i}", depth + 1)
                for i, inner in enumerate(self.elements(node))
            ]
        return node

    def elements(self, node: Any) -> Iterable[Any]:
        """Returns the elements of a list outside tensors."""
        self._arrays += 1
        elements: Iterable[Any] = node
        return elements

    def nested_lists(self, node: Any, name: str, pointer: str) -> NestedLists:
        """Returns nested lists with their shape.

        Raises:
            InvalidContent, PayloadTooLarge: as `NestedLists`.
        """
        lists = NestedLists(name, pointer, node)
        self._arrays += lists.lists
        return lists


def items(node: Any, pointer: str) -> Iterable[tuple[str, Any]]:
    """Returns the names and values of an object.

    Raises:
        InvalidContent: a name is repeated, invalid or too long, or there are too many names.
    """
    return node.items() if type(node) is dict else _items(node, pointer)


def _items(node: simdjson.Object, pointer: str) -> Iterator[tuple[str, Any]]:
    """Yields names and values; `node.items()` would create Python objects of all values below."""
    if len(node) > MAX_NAMES:
        raise InvalidContent(f"an object has more than {MAX_NAMES} names", pointer=pointer)
    seen = set()
    for name in node:
        if len(name) > MAX_NAME_LENGTH:
            raise InvalidContent(
                f"a name is too long: got {len(name)} characters, "
                f"expected at most {MAX_NAME_LENGTH}",
                pointer=pointer,
            )
        inside = pointer + pointer_to(name)
        if name in seen:
            raise InvalidContent(f"{name!r:.60} is repeated", pointer=inside)
        seen.add(name)
        if "\0" in name:  # simdjson looks names up as C strings
            raise InvalidContent(f"{name!r:.60} is not a valid name", pointer=inside)
        yield name, node[name]


def _parse(text: bytes) -> Any:
    """Returns the root of a document.

    Integers beyond 64 bits become the nearest float64: JavaScript writes numbers below 1e21 as
    integers. The number of replaced strings and integers is bounded.
    """
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
    return simdjson.Parser().parse(_WIDE.sub(_as_float, text, count=MAX_OBJECTS))


def _parse_error_reason(text: bytes, error: Exception) -> str:
    """Returns why a text is not JSON; if it is short, orjson's message, which has the position."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if len(text) <= _LONGEST_EXPLAINED:
        try:
            orjson.loads(
                text.removeprefix(b"\xef\xbb\xbf")
            )  # a byte order mark: RFC 8259 permits to ignore it
        except orjson.JSONDecodeError as decode_error:
            if "memory" not in decode_error.msg:  # orjson's message for brackets left open
                return str(decode_error)
    return _CODE.sub("", str(error)).removesuffix("  This is a fatal and unrecoverable error.")


def _as_float(match: re.Match[bytes]) -> bytes:
    """Returns a matched integer with an exponent if it exceeds 64 bits; else the match."""
    text = match[0]
    if text.startswith(b'"') or (len(text) <= 20 and -(2**63) <= int(text) < 2**64):
        return text
    return text + b"e0"
