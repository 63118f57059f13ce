"""Reads JSON: plain values under limits, and nested lists without a Python object per number.

The codecs of JSON and of the Open Inference Protocol use `Document` and `write`. simdjson parses
lists into one buffer, three times as fast as orjson and msgspec at 200,000 numbers; orjson encodes
them from one. The strings "NaN", "Infinity" and "-Infinity" are numbers, in both directions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final, Literal

import numpy as np
import orjson
import simdjson

from qkv.errors import InvalidContent, MalformedRequest, PayloadTooLarge, format_value, pointer_to
from qkv.tensors import RawTensor

__all__ = ["MAX_AXES", "Document", "NestedLists", "format_node", "items", "write"]

MAX_AXES: Final = 8
_MAX_DEPTH: Final = 32  # outside tensors
_MAX_NAMES: Final = 256  # in one object: each look-up is a scan
_LONGEST_NAME: Final = 1024  # the pointer to each value below contains it
Array = np.ndarray[Any, Any]

_BUFFERS: Final[tuple[tuple[Literal["i", "d"], type], ...]] = (("i", np.int64), ("d", np.float64))
_LONGEST_LIST: Final = (1 << 24) - 1  # simdjson counts no further
_MAX_VALUES: Final = 10_000  # outside tensors
_MAX_OBJECTS: Final = 1 << 20  # lists, or values of mixed types: each costs a Python object
# A string, or an integer that may exceed 64 bits, between its neighbours in JSON. The quantifiers
# are possessive, because there are strings of 64 MiB.
_WIDE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|(?<=[\[,:\s])-?[0-9]{19,}(?=[\],}\s])', re.DOTALL)
_LONGEST_EXPLAINED: Final = 1 << 20  # bytes
_CODE: Final = re.compile(r"^[A-Z0-9_]+: ")  # simdjson's name for an error
_NON_FINITE: Final = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}
_WORDS: Final = {"nan": b'"NaN"', "inf": b'"Infinity"', "-inf": b'"-Infinity"'}


class Document:
    """A JSON object that is converted in parts. Counts the visited arrays, and the values outside
    tensors.

    Args:
        text: UTF-8. Bytes, because simdjson is much slower with any other type.

    Raises:
        MalformedRequest: the text is not JSON, or not an object.
    """

    def __init__(self, text: bytes) -> None:
        try:
            root = _parse(text)
        except (ValueError, RuntimeError, MemoryError) as error:
            raise MalformedRequest(
                f"the body is not JSON: {_parse_error_reason(text, error)}"
            ) from None
        if not isinstance(root, simdjson.Object):
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
        brackets = np.frombuffer(self._text, np.uint8) == ord("[")  # faster than bytes.count
        return int(np.count_nonzero(brackets)) == self._arrays

    def to_python(self, node: Any, pointer: str, depth: int = 0) -> Any:
        """Returns a value outside tensors as Python objects.

        Raises:
            MalformedRequest: the value is nested too deeply.
            PayloadTooLarge: the document has too many values.
        """
        if depth > _MAX_DEPTH:
            raise MalformedRequest(f"the body is nested deeper than {_MAX_DEPTH}", pointer=pointer)
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

    def elements(self, node: simdjson.Array) -> Iterator[Any]:
        """Yields the elements of a list outside tensors."""
        self._arrays += 1
        yield from node

    def nested_lists(self, node: Any, name: str, pointer: str) -> NestedLists:
        """Returns nested lists with their shape, without reading numbers.

        A single number is a tensor without axes.

        Raises:
            InvalidContent: the lists are ragged, or nested too deeply.
            PayloadTooLarge: there are too many lists.
        """
        if not isinstance(node, simdjson.Array):
            return NestedLists(name, pointer, [node], (), [[node]])
        shape, leaves, arrays = _walk(node, name, pointer)
        self._arrays += arrays
        return NestedLists(name, pointer, node, shape, leaves)


class NestedLists:
    """A tensor as nested lists in a document; `read` converts it."""

    def __init__(
        self, name: str, pointer: str, node: Any, shape: tuple[int, ...], leaves: list[Any]
    ) -> None:
        self.shape = shape
        self._name, self._pointer = name, pointer
        self._node, self._leaves = node, leaves

    def read(self, has_visited_all: bool) -> RawTensor:
        """Returns the tensor.

        Args:
            has_visited_all: that of the document, after all its parts were converted.

        Raises:
            InvalidContent: the values are not all numbers, nor all booleans.
            PayloadTooLarge: the values are booleans or include strings, and are too many.
        """
        if 0 in self.shape:
            return RawTensor.from_numpy(np.zeros(self.shape), is_untyped=True)
        first = self._leaves[0][0]
        if has_visited_all and isinstance(self._node, simdjson.Array):
            for code, dtype in _BUFFERS[type(first) is float :]:
                try:
                    buffer = self._node.as_buffer(of_type=code)
                except (TypeError, ValueError):
                    continue  # another type, or mixed types
                array: Array = np.frombuffer(buffer, dtype).reshape(self.shape)
                return RawTensor.from_numpy(array, is_untyped=True)
        return self._read_objects()

    def _read_objects(self) -> RawTensor:
        """Returns the tensor of Python objects: booleans, strings among numbers, invalid values."""
        if math.prod(self.shape) > _MAX_OBJECTS:
            raise _too_large(
                self._name,
                self._pointer,
                f"more than {_MAX_OBJECTS} values that are booleans or include strings",
            )
        values = list(chain.from_iterable(self._leaves))
        types = set(map(type, values))
        if types == {bool}:
            return RawTensor.from_numpy(np.array(values).reshape(self.shape), is_untyped=True)
        if str in types:
            values = [_NON_FINITE.get(v, v) if isinstance(v, str) else v for v in values]
            types = set(map(type, values))
        if not types <= {int, float}:
            at, odd = next((i, v) for i, v in enumerate(values) if type(v) not in (int, float))
            raise InvalidContent(
                f"{self._name} is invalid at {list(self._index(at))}: got {format_node(odd)}, "
                'expected all numbers (or "NaN", "Infinity", "-Infinity"), or all booleans',
                pointer=self._pointer,
            )
        whole = types == {int} and min(values) >= -(2**63) and max(values) < 2**63
        dtype = np.int64 if whole else np.float64
        return RawTensor.from_numpy(np.array(values, dtype).reshape(self.shape), is_untyped=True)

    def _index(self, at: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.unravel_index(at, self.shape)) if self.shape else ()


def items(node: Any, pointer: str) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of an object.

    `node.items()` would create Python objects of all values below.

    Raises:
        InvalidContent: a name is repeated, invalid or too long, or there are too many names.
    """
    if len(node) > _MAX_NAMES:
        raise InvalidContent(f"an object has more than {_MAX_NAMES} names", pointer=pointer)
    seen = set()
    for name in node:
        if len(name) > _LONGEST_NAME:
            raise InvalidContent(
                f"a name is too long: got {len(name)} characters, expected at most {_LONGEST_NAME}",
                pointer=pointer,
            )
        inside = pointer + pointer_to(name)
        if name in seen:
            raise InvalidContent(f"{name!r:.60} is repeated", pointer=inside)
        seen.add(name)
        if "\0" in name:  # simdjson looks names up as C strings
            raise InvalidContent(f"{name!r:.60} is not a valid name", pointer=inside)
        yield name, node[name]


def format_node(value: Any) -> str:
    """Returns a value of a document for an error message, shortened."""
    if isinstance(value, simdjson.Object | simdjson.Array):
        return "an object" if isinstance(value, simdjson.Object) else "a list"
    return format_value(value)


def write(tensor: RawTensor) -> bytes:
    """Encodes a tensor as nested lists."""
    array = tensor.numpy()
    if tensor.dtype == "bfloat16":
        array = array.astype(np.float32)
    if not array.ndim:
        array = array.reshape(1)
    text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        # orjson writes null for these numbers, in row-major order
        odd = iter(array[~np.isfinite(array)].tolist())
        text = re.sub(b"null", lambda _: _WORDS[str(next(odd))], text)
    return text if tensor.shape else text[1:-1]


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
    return simdjson.Parser().parse(_WIDE.sub(_as_float, text, count=_MAX_OBJECTS))


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


def _walk(node: Any, name: str, pointer: str) -> tuple[tuple[int, ...], list[Any], int]:
    """Returns the shape of nested lists, their innermost rows, and the number of lists.

    Does not read the numbers.
    """
    shape: list[int] = []
    level, arrays = [node], 1
    while True:
        sizes = {len(row) for row in level}
        if len(sizes) > 1:
            raise InvalidContent(
                f"{name} is ragged: got lists of {min(sizes)} and {max(sizes)} elements on axis "
                f"{len(shape)}",
                pointer=pointer,
            )
        shape.append(sizes.pop())
        if shape[-1] >= _LONGEST_LIST:
            raise _too_large(name, pointer, f"a list of {_LONGEST_LIST} elements or more")
        if not shape[-1] or not isinstance(level[0][0], simdjson.Array):
            return tuple(shape), level, arrays
        if len(shape) == MAX_AXES:
            raise InvalidContent(f"{name} has more than {MAX_AXES} axes", pointer=pointer)
        if arrays + len(level) * shape[-1] > _MAX_OBJECTS:
            raise _too_large(name, pointer, f"more than {_MAX_OBJECTS} lists")
        level = list(chain.from_iterable(level))
        if not all(isinstance(row, simdjson.Array) for row in level):
            raise InvalidContent(
                f"{name} is ragged: got lists and single values on axis {len(shape)}",
                pointer=pointer,
            )
        arrays += len(level)


def _too_large(name: str, pointer: str, what: str) -> PayloadTooLarge:
    return PayloadTooLarge(f"{name} has {what}; send it as base64", pointer=pointer)
