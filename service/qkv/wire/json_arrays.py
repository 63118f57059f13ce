"""Tensors as nested lists in JSON, without a Python object per number.

`NestedLists` reads the lists of a document, `write` encodes a tensor. simdjson parses lists into
one buffer, twice as fast as orjson at a million numbers; orjson encodes them from one. The strings
"NaN", "Infinity" and "-Infinity" are numbers, in both directions.
"""

from __future__ import annotations

import math
import re
from itertools import chain
from typing import Any, Final, Literal, TypeGuard

import numpy as np
import orjson
from simdjson import Array, Object

from qkv.errors import InvalidContent, PayloadTooLarge, format_value, pointer_to
from qkv.tensors import DTYPES, RawTensor
from qkv.wire.json_document import Document

_MAX_AXES: Final = 8
VALID_SHAPE: Final = f"at most {_MAX_AXES} integers, 0 or more, for less than 2**63 bytes"
_MAX_OBJECTS: Final = 1 << 20  # lists, or values of mixed types: each costs a Python object

_BUFFERS: Final[tuple[tuple[Literal["i", "d"], str], ...]] = (("i", "int64"), ("d", "float64"))
_LONGEST_LIST: Final = (1 << 24) - 1  # simdjson counts no further
_NON_FINITE: Final = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}
_WORDS: Final = {"nan": b'"NaN"', "inf": b'"Infinity"', "-inf": b'"-Infinity"'}


class NestedLists:
    """A tensor as nested lists in a document, whose shape is known; `read` has its numbers.

    Args:
        document: the document.
        node: the lists, or a single value, which is a tensor without axes.
        name: the name of the tensor in error messages.
        path: names and indices from the root to it.

    Attributes:
        shape: sizes of the axes.

    Raises:
        InvalidContent: the lists are ragged, or nested too deeply.
        PayloadTooLarge: there are too many lists.
    """

    def __init__(self, document: Document, node: Any, name: str, *path: str | int) -> None:
        self._document, self._node, self._name, self._path = document, node, name, path
        self.shape: tuple[int, ...] = ()
        self._rows: list[Any] = [[node]]
        if isinstance(node, Array):
            self.shape, self._rows = self._walk([node])

    def _walk(self, level: list[Any]) -> tuple[tuple[int, ...], list[Any]]:
        """Returns the shape of nested lists, and their innermost rows, without their numbers."""
        shape: list[int] = []
        lists = 0
        while True:
            try:
                sizes = set(map(Array.__len__, level))
            except TypeError:
                raise self._wrong(
                    f"is ragged: got lists and single values on axis {len(shape)}"
                ) from None
            if len(sizes) > 1:
                raise self._wrong(
                    f"is ragged: got lists of {min(sizes)} and {max(sizes)} elements on axis "
                    f"{len(shape)}"
                )
            (size,) = sizes
            shape.append(size)
            lists += len(level)
            if size >= _LONGEST_LIST:
                raise self._too_large(f"a list of {_LONGEST_LIST} elements or more")
            if not size or not isinstance(level[0][0], Array):
                self._document.lists += lists
                return tuple(shape), level
            if len(shape) == _MAX_AXES:
                raise self._wrong(f"has more than {_MAX_AXES} axes")
            if lists + len(level) * size > _MAX_OBJECTS:
                raise self._too_large(f"more than {_MAX_OBJECTS} lists")
            level = list(chain.from_iterable(level))

    def read(self) -> RawTensor:
        """Returns the tensor, after all parts of the document were visited.

        Raises:
            InvalidContent: the values are not all numbers, nor all booleans.
            PayloadTooLarge: the values are booleans or include strings, and are too many.
        """
        if 0 in self.shape:
            return RawTensor.from_numpy(np.zeros(self.shape), is_untyped=True)
        first = self._rows[0][0]
        if self.shape and self._document.has_visited_all:
            for code, dtype in _BUFFERS[type(first) is float :]:
                try:
                    buffer = self._node.as_buffer(of_type=code)
                except (TypeError, ValueError):
                    continue  # another type, or mixed types
                return RawTensor(dtype, self.shape, memoryview(buffer), is_untyped=True)
        return self._read_objects()

    def _read_objects(self) -> RawTensor:
        """Returns the tensor of Python objects: booleans, strings among numbers, invalid values."""
        if math.prod(self.shape) > _MAX_OBJECTS:
            raise self._too_large(
                f"more than {_MAX_OBJECTS} values that are booleans or include strings"
            )
        values = list(chain.from_iterable(self._rows))
        types = set(map(type, values))
        if types == {bool}:
            return RawTensor.from_numpy(np.array(values).reshape(self.shape), is_untyped=True)
        if str in types:
            values = [_NON_FINITE.get(v, v) if isinstance(v, str) else v for v in values]
            types = set(map(type, values))
        if not types <= {int, float}:
            at, odd = next((i, v) for i, v in enumerate(values) if type(v) not in (int, float))
            index = [int(i) for i in np.unravel_index(at, self.shape)]
            raise self._wrong(
                f"is invalid{f' at {index}' if index else ''}: got {format_node(odd)}, expected "
                'nested lists of numbers (or "NaN", "Infinity", "-Infinity"), or of booleans'
            )
        whole = types == {int} and min(values) >= -(2**63) and max(values) < 2**63
        dtype = np.int64 if whole else np.float64
        return RawTensor.from_numpy(np.array(values, dtype).reshape(self.shape), is_untyped=True)

    def _wrong(self, what: str) -> InvalidContent:
        return InvalidContent(f"{self._name} {what}", pointer=pointer_to(*self._path))

    def _too_large(self, what: str) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"{self._name} has {what}; send it as base64", pointer=pointer_to(*self._path)
        )


def is_shape(shape: object, dtype: str) -> TypeGuard[list[int]]:
    """Returns True if a value from a request is the shape of a tensor: `VALID_SHAPE`."""
    if type(shape) is not list or len(shape) > _MAX_AXES:
        return False
    largest = DTYPES[dtype].itemsize
    for size in shape:  # faster than all(...)
        if type(size) is not int or size < 0:
            return False
        largest *= size or 1
    return largest < 1 << 63


def format_node(value: Any) -> str:
    """Returns a value of a document for an error message, shortened."""
    if isinstance(value, (Object, Array)):
        return "an object" if isinstance(value, Object) else "a list"
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
