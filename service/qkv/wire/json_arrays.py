"""Tensors as nested lists in JSON, without a Python object per number.

`json_document` finds the lists, `NestedLists` reads them, `write` encodes a tensor. simdjson parses
lists into one buffer, three times as fast as orjson and msgspec at 200,000 numbers; orjson encodes
them from one. The strings "NaN", "Infinity" and "-Infinity" are numbers, in both directions.
"""

from __future__ import annotations

import math
import re
from itertools import chain
from typing import Any, Final, Literal

import numpy as np
import orjson
import simdjson

from qkv.errors import InvalidContent, PayloadTooLarge, format_value
from qkv.tensors import RawTensor

__all__ = [
    "LIST",
    "MAX_AXES",
    "MAX_OBJECTS",
    "OBJECT",
    "NestedLists",
    "format_node",
    "walk",
    "write",
]

LIST: Final = (simdjson.Array, list)
OBJECT: Final = (simdjson.Object, dict)
"""The types of a document's lists and objects: simdjson's for long texts, Python's for others."""

MAX_AXES: Final = 8
MAX_OBJECTS: Final = 1 << 20  # lists, or values of mixed types: each costs a Python object
Array = np.ndarray[Any, Any]
_LISTS: Final = frozenset(LIST)
_NUMBERS: Final = frozenset((int, float))

_BUFFERS: Final[tuple[tuple[Literal["i", "d"], type], ...]] = (("i", np.int64), ("d", np.float64))
_LONGEST_LIST: Final = (1 << 24) - 1  # simdjson counts no further
_NON_FINITE: Final = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}
_WORDS: Final = {"nan": b'"NaN"', "inf": b'"Infinity"', "-inf": b'"-Infinity"'}


class NestedLists:
    """A tensor as nested lists in a document; `read` converts it.

    numpy reads Python's lists if they hold numbers alone. All others are walked, which finds their
    shape without reading a number, or what is wrong with them.

    Attributes:
        lists: the number of lists that were walked.

    Raises:
        InvalidContent: the lists are ragged, or nested too deeply.
        PayloadTooLarge: there are too many lists.
    """

    def __init__(self, name: str, pointer: str, node: Any) -> None:
        self.lists = 0
        self._name, self._pointer, self._node = name, pointer, node
        self._array = _numbers(node) if type(node) is list else None
        if self._array is not None:
            self.shape = self._array.shape
        elif type(node) in LIST:
            self.shape, self._leaves, self.lists = walk(node, name, pointer)
        else:  # a single number is a tensor without axes
            self.shape, self._leaves = (), [[node]]

    def read(self, has_visited_all: bool) -> RawTensor:
        """Returns the tensor.

        Args:
            has_visited_all: that of the document, after all its parts were converted.

        Raises:
            InvalidContent: the values are not all numbers, nor all booleans.
            PayloadTooLarge: the values are booleans or include strings, and are too many.
        """
        if self._array is not None:
            return RawTensor.from_numpy(self._array, is_untyped=True)
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
        if math.prod(self.shape) > MAX_OBJECTS:
            raise _too_large(
                self._name,
                self._pointer,
                f"more than {MAX_OBJECTS} values that are booleans or include strings",
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
            place = f" at {list(self._index(at))}" if self.shape else ""
            raise InvalidContent(
                f"{self._name} is invalid{place}: got {format_node(odd)}, expected nested lists "
                'of numbers (or "NaN", "Infinity", "-Infinity"), or of booleans',
                pointer=self._pointer,
            )
        whole = types == {int} and min(values) >= -(2**63) and max(values) < 2**63
        dtype = np.int64 if whole else np.float64
        return RawTensor.from_numpy(np.array(values, dtype).reshape(self.shape), is_untyped=True)

    def _index(self, at: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.unravel_index(at, self.shape))


def _numbers(node: list[Any]) -> Array | None:
    """Returns the array that nested lists of numbers are; None if they are anything else."""
    objects = np.array(node, object)
    types = set(map(type, objects.ravel().tolist()))
    if not types or objects.ndim > MAX_AXES or not types <= _NUMBERS:
        return None
    try:
        return objects.astype(np.float64 if float in types else np.int64)
    except OverflowError:
        return None


def format_node(value: Any) -> str:
    """Returns a value of a document for an error message, shortened."""
    if isinstance(value, OBJECT + LIST):
        return "an object" if isinstance(value, OBJECT) else "a list"
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


def walk(node: Any, name: str, pointer: str) -> tuple[tuple[int, ...], list[Any], int]:
    """Returns the shape of nested lists, their innermost rows, and the number of lists.

    Does not read the numbers.
    """
    shape: list[int] = []
    level, arrays = [node], 1
    while True:
        sizes = set(map(len, level))
        if len(sizes) > 1:
            raise InvalidContent(
                f"{name} is ragged: got lists of {min(sizes)} and {max(sizes)} elements on axis "
                f"{len(shape)}",
                pointer=pointer,
            )
        (size,) = sizes
        shape.append(size)
        if size >= _LONGEST_LIST:
            raise _too_large(name, pointer, f"a list of {_LONGEST_LIST} elements or more")
        if not size or type(level[0][0]) not in LIST:
            return tuple(shape), level, arrays
        if len(shape) == MAX_AXES:
            raise InvalidContent(f"{name} has more than {MAX_AXES} axes", pointer=pointer)
        if arrays + len(level) * size > MAX_OBJECTS:
            raise _too_large(name, pointer, f"more than {MAX_OBJECTS} lists")
        level = list(chain.from_iterable(level))
        if not _LISTS.issuperset(map(type, level)):
            raise InvalidContent(
                f"{name} is ragged: got lists and single values on axis {len(shape)}",
                pointer=pointer,
            )
        arrays += len(level)


def _too_large(name: str, pointer: str, what: str) -> PayloadTooLarge:
    return PayloadTooLarge(f"{name} has {what}; send it as base64", pointer=pointer)
