"""Reads JSON: plain values under limits, and nested lists without a Python object per number.

Lists are read into one buffer (simdjson: three times the speed of orjson and msgspec at 200,000
numbers), and written from one (orjson). The strings "NaN", "Infinity" and "-Infinity" stand for
what JSON lacks, both ways.
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
_MAX_DEPTH: Final = 32  # of what is not a tensor
_MAX_NAMES: Final = 256  # in one object: each is looked up by a scan
_LONGEST_NAME: Final = 1024  # it stands in the pointer to each value below it
Array = np.ndarray[Any, Any]

_BUFFERS: Final[tuple[tuple[Literal["i", "d"], type], ...]] = (("i", np.int64), ("d", np.float64))
_LONGEST_LIST: Final = (1 << 24) - 1  # where simdjson stops counting
_MAX_VALUES: Final = 10_000  # outside tensors
_MAX_OBJECTS: Final = 1 << 20  # lists, or values read the slow way: each costs a Python object
# A string, or a whole number that may be beyond 64 bits, with what stands around it in JSON;
# possessive, for there are strings of 64 MiB.
_WIDE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|(?<=[\[,:\s])-?[0-9]{19,}(?=[\],}\s])', re.DOTALL)
_LONGEST_EXPLAINED: Final = 1 << 20  # bytes
_CODE: Final = re.compile(r"^[A-Z0-9_]+: ")  # simdjson's name for an error
_NON_FINITE: Final = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}
_WORDS: Final = {"nan": b'"NaN"', "inf": b'"Infinity"', "-inf": b'"-Infinity"'}


class Document:
    """A JSON object, walked piece by piece; it counts every array it meets, and every value outside
    tensors.

    Args:
        text: UTF-8; bytes, because simdjson is much slower with anything else.

    Raises:
        MalformedRequest: it is not JSON, or not an object.
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
        """Whether every array has been met: one that has not hides among numbers, where simdjson
        would flatten it away."""
        brackets = np.frombuffer(self._text, np.uint8) == ord("[")  # faster than bytes.count
        return int(np.count_nonzero(brackets)) == self._arrays

    def to_python(self, node: Any, pointer: str, depth: int = 0) -> Any:
        """What is not a tensor, as Python has it.

        Raises:
            MalformedRequest: it is nested too deep.
            PayloadTooLarge: it is too many values.
        """
        if depth > _MAX_DEPTH:
            raise MalformedRequest(f"nested deeper than {_MAX_DEPTH}", pointer=pointer)
        self._values += 1
        if self._values > _MAX_VALUES:
            raise PayloadTooLarge(
                f"more than {_MAX_VALUES} values that belong to no tensor", pointer=pointer
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
        """What a list outside tensors holds."""
        self._arrays += 1
        yield from node

    def nested_lists(self, node: Any, name: str, pointer: str) -> NestedLists:
        """Nested lists, walked but not read; a number alone is a tensor without axes.

        Raises:
            InvalidContent: they are ragged, or nested too deep.
            PayloadTooLarge: they are too many.
        """
        if not isinstance(node, simdjson.Array):
            return NestedLists(name, pointer, [node], (), [[node]])
        shape, leaves, arrays = _walk(node, name, pointer)
        self._arrays += arrays
        return NestedLists(name, pointer, node, shape, leaves)


class NestedLists:
    """A tensor as nested lists in a document, not yet read."""

    def __init__(
        self, name: str, pointer: str, node: Any, shape: tuple[int, ...], leaves: list[Any]
    ) -> None:
        self.shape = shape
        self._name, self._pointer = name, pointer
        self._node, self._leaves = node, leaves

    def read(self, has_visited_all: bool) -> RawTensor:
        """The tensor.

        Args:
            is_walked: of the document, once every piece of it has been looked at.

        Raises:
            InvalidContent: it holds something else than numbers, or than booleans.
            PayloadTooLarge: it can only be read slowly, and is too large for that.
        """
        if 0 in self.shape:
            return RawTensor.from_numpy(np.zeros(self.shape), is_untyped=True)
        first = self._leaves[0][0]
        if has_visited_all and isinstance(self._node, simdjson.Array):
            for code, dtype in _BUFFERS[type(first) is float :]:
                try:
                    buffer = self._node.as_buffer(of_type=code)
                except (TypeError, ValueError):
                    continue  # of another type, or mixed
                array: Array = np.frombuffer(buffer, dtype).reshape(self.shape)
                return RawTensor.from_numpy(array, is_untyped=True)
        return self._read_objects()

    def _read_objects(self) -> RawTensor:
        """The slow way, for booleans, for strings among numbers, and for what is wrong."""
        if math.prod(self.shape) > _MAX_OBJECTS:
            raise _too_large(
                self._name,
                self._pointer,
                f"more than {_MAX_OBJECTS} values that are booleans, or among which are strings",
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
                f"{self._name} holds {format_node(odd)} at {list(self._index(at))}; it must be all "
                'numbers (or "NaN", "Infinity", "-Infinity"), or all booleans',
                pointer=self._pointer,
            )
        whole = types == {int} and min(values) >= -(2**63) and max(values) < 2**63
        dtype = np.int64 if whole else np.float64
        return RawTensor.from_numpy(np.array(values, dtype).reshape(self.shape), is_untyped=True)

    def _index(self, at: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.unravel_index(at, self.shape)) if self.shape else ()


def items(node: Any, pointer: str) -> Iterator[tuple[str, Any]]:
    """Names and values of an object, each name once.

    Not `node.items()`, which makes Python objects of all that is below.

    Raises:
        InvalidContent: a name comes twice, is none, is too long, or there are too many.
    """
    if len(node) > _MAX_NAMES:
        raise InvalidContent(f"more than {_MAX_NAMES} names in an object", pointer=pointer)
    seen = set()
    for name in node:
        if len(name) > _LONGEST_NAME:
            raise InvalidContent(
                f"a name has {len(name)} characters; at most {_LONGEST_NAME} are read",
                pointer=pointer,
            )
        inside = pointer + pointer_to(name)
        if name in seen:
            raise InvalidContent(f"{name!r:.60} comes twice", pointer=inside)
        seen.add(name)
        if "\0" in name:  # simdjson looks names up as C strings
            raise InvalidContent(f"{name!r:.60} is no name", pointer=inside)
        yield name, node[name]


def format_node(value: Any) -> str:
    """A value of a document, as far as a person needs it."""
    if isinstance(value, simdjson.Object | simdjson.Array):
        return "an object" if isinstance(value, simdjson.Object) else "a list"
    return format_value(value)


def write(tensor: RawTensor) -> bytes:
    """A tensor as nested lists."""
    array = tensor.numpy()
    if tensor.dtype == "bfloat16":
        array = array.astype(np.float32)
    if not array.ndim:
        array = array.reshape(1)
    text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        # orjson's word for what is not finite is null; here they are, in row-major order
        odd = iter(array[~np.isfinite(array)].tolist())
        text = re.sub(b"null", lambda _: _WORDS[str(next(odd))], text)
    return text if tensor.shape else text[1:-1]


def _parse(text: bytes) -> Any:
    """The root of a document. Whole numbers beyond 64 bits are read as the nearest float64, as
    JavaScript writes those below 1e21; among a bounded number of strings."""
    try:
        return simdjson.Parser().parse(text)
    except (ValueError, RuntimeError) as error:
        # by then every string has been found to have an end
        if not str(error).startswith(("BIGINT_ERROR", "NUMBER_ERROR")):
            raise
    return simdjson.Parser().parse(_WIDE.sub(_as_float, text, count=_MAX_OBJECTS))


def _parse_error_reason(text: bytes, error: Exception) -> str:
    """Why it is no JSON; where, in orjson's words, if it is short enough to be read once more."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if len(text) <= _LONGEST_EXPLAINED:
        try:
            orjson.loads(text.removeprefix(b"\xef\xbb\xbf"))  # a mark that is no JSON, but let in
        except orjson.JSONDecodeError as said:
            if "memory" not in said.msg:  # which is how it counts brackets that stay open
                return str(said)
    return _CODE.sub("", str(error)).removesuffix("  This is a fatal and unrecoverable error.")


def _as_float(found: re.Match[bytes]) -> bytes:
    """What was found, with an exponent where it is a number that no 64 bits hold."""
    text = found[0]
    if text.startswith(b'"') or (len(text) <= 20 and -(2**63) <= int(text) < 2**64):
        return text
    return text + b"e0"


def _walk(node: Any, name: str, pointer: str) -> tuple[tuple[int, ...], list[Any], int]:
    """The shape of nested lists, their innermost rows, and how many lists there are; the numbers
    themselves are not touched."""
    shape: list[int] = []
    level, arrays = [node], 1
    while True:
        sizes = {len(row) for row in level}
        if len(sizes) > 1:
            raise InvalidContent(
                f"{name} is ragged: on axis {len(shape)} there are {min(sizes)} and {max(sizes)} "
                "elements",
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
                f"{name} is ragged: on axis {len(shape)} there are lists beside single values",
                pointer=pointer,
            )
        arrays += len(level)


def _too_large(name: str, pointer: str, what: str) -> PayloadTooLarge:
    return PayloadTooLarge(f"{name} holds {what}; send it as base64", pointer=pointer)
