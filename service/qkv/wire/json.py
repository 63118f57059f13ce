"""JSON: tensors as nested lists, or as an object of dtype, shape and base64 data.

Lists are read into one buffer without a Python object per number (simdjson: three times the speed
of orjson and msgspec at 200,000 numbers), and written from one (orjson). The strings "NaN",
"Infinity" and "-Infinity" stand for what JSON lacks, both ways.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final, Literal

import numpy as np
import orjson
import pybase64
import simdjson

from qkv.errors import InvalidContent, TooLarge, Unparseable, pointer_to, shown
from qkv.message import Message
from qkv.tensors import DTYPES, RawTensor, nbytes

__all__ = [
    "MEDIA_TYPE",
    "PROBLEM_TYPE",
    "aligned_at",
    "asked_encoding",
    "decode",
    "dump",
    "encode",
    "load",
    "plain",
]

MEDIA_TYPE: Final = "application/json"
PROBLEM_TYPE: Final = "application/problem+json"

_MAX_AXES: Final = 8
_MAX_DEPTH: Final = 32  # of what is not a tensor
_MAX_NAMES: Final = 256  # in one object: each is looked up by a scan
Array = np.ndarray[Any, Any]

_ENCODINGS: Final = ("lists", "base64")
_TENSOR_KEYS: Final = {"dtype", "shape", "data"}
_BUFFERS: Final[tuple[tuple[Literal["i", "d"], type], ...]] = (("i", np.int64), ("d", np.float64))
_LONGEST_LIST: Final = (1 << 24) - 1  # where simdjson stops counting
_MOST_VALUES: Final = 10_000  # outside tensors
_MOST_OBJECTS: Final = 1 << 20  # lists, or values read the slow way: each costs a Python object
_NON_FINITE: Final = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}


def aligned_at(head: bytes) -> None:
    """Nowhere: nothing in it is used in place."""


def decode(body: bytes | memoryview, group: str) -> Message:
    """Reads a message whose tensors stand under `group`, and maybe under /layer/tensors.

    Args:
        body: UTF-8 JSON, an object.
        group: "inputs", "outputs" or "tensors".

    Raises:
        Unparseable: it is not JSON, not an object, or nested too deep.
        InvalidContent: a name comes twice, or a tensor is ragged, mistyped, or not as long as
            its shape says.
    """
    body = bytes(body)  # itself, where it is bytes; simdjson is much slower with anything else
    document = _object(body)
    reader = _Reader()
    fields: dict[str, Any] = {}
    tensors: dict[str, _Tensor] = {}
    layer: dict[str, _Tensor] = {}
    for name, node in _items(document, ""):
        if name == group:
            tensors = reader.tensors(node, f"/{group}")
        elif name == "layer" and isinstance(node, simdjson.Object):
            fields["layer"] = {}
            for key, inner in _items(node, "/layer"):
                if key == "tensors":
                    layer = reader.tensors(inner, "/layer/tensors")
                else:
                    fields["layer"][key] = reader.plain(inner, f"/layer/{key}")
        else:
            fields[name] = reader.plain(node, f"/{name}")
    # an array that no walk has met hides among numbers, where simdjson would flatten it away
    lists = any(isinstance(t, _Lists) for t in (*tensors.values(), *layer.values()))
    flat = lists and _count(body, "[") == reader.arrays
    encoding = asked_encoding(fields)
    if encoding is None:
        first = next(iter(tensors.values()), None)
        encoding = "base64" if isinstance(first, _Base64) else "lists"
    return Message(
        fields,
        {name: tensor.read(flat) for name, tensor in tensors.items()},
        {name: tensor.read(flat) for name, tensor in layer.items()},
        encoding,
    )


def encode(message: Message, group: str) -> list[bytes | memoryview]:
    """Writes a message; its tensors stand under `group`, in that field's place if there is one."""
    document = dict(message.fields)
    lists = message.encoding != "base64"
    document[group] = {
        name: orjson.Fragment(_as_lists(t) if lists else _as_base64(t))
        for name, t in message.tensors.items()
    }
    if message.layer:
        document["layer"] = document.get("layer", {}) | {
            "tensors": {
                name: orjson.Fragment(_as_lists(t) if lists else _as_base64(t))
                for name, t in message.layer.items()
            }
        }
    if message.encoding is not None and group == "inputs":
        document["encoding"] = message.encoding
    return [orjson.dumps(document)]


def plain(text: bytes) -> dict[str, Any]:
    """Reads an object without tensors, under the limits that hold for a message.

    Raises:
        Unparseable, InvalidContent, TooLarge: as in `decode`.
    """
    fields: dict[str, Any] = _Reader().plain(_object(text), "")
    return fields


def _object(text: bytes) -> simdjson.Object:
    try:
        document = simdjson.Parser().parse(text)
    except (ValueError, RuntimeError, MemoryError) as error:
        reason = str(error).removesuffix("  This is a fatal and unrecoverable error.")
        raise Unparseable(f"the body is not JSON: {reason}") from None
    if not isinstance(document, simdjson.Object):
        raise Unparseable("the body must be a JSON object")
    return document


def load(text: bytes | str) -> Any:
    """Reads plain JSON.

    Raises:
        Unparseable: it is not JSON.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Unparseable(f"not JSON: {error}") from None


def asked_encoding(fields: dict[str, Any]) -> str | None:
    """Takes `encoding` out of a message's fields.

    Raises:
        InvalidContent: it is no encoding.
    """
    encoding = fields.pop("encoding", None)
    if encoding is not None and encoding not in _ENCODINGS:
        raise InvalidContent(
            f"encoding came as {shown(encoding)}; it must be {' or '.join(_ENCODINGS)}",
            pointer="/encoding",
        )
    return None if encoding is None else str(encoding)


def dump(document: Any) -> bytes:
    """Writes plain JSON, such as a problem document."""
    return orjson.dumps(document)


class _Reader:
    """Walks a document, counting every array it meets, and every value outside tensors."""

    def __init__(self) -> None:
        self.arrays = 0
        self.values = 0

    def tensors(self, node: Any, pointer: str) -> dict[str, _Tensor]:
        """The tensors of a group, walked but not read."""
        if not isinstance(node, simdjson.Object):
            raise InvalidContent(
                f"{pointer[1:]} must be an object, tensors by name; {_shown(node)} came",
                pointer=pointer,
            )
        return {
            name: self._tensor(inner, name, pointer + pointer_to(name))
            for name, inner in _items(node, pointer)
        }

    def plain(self, node: Any, pointer: str, depth: int = 0) -> Any:
        """What is not a tensor, as Python has it."""
        if depth > _MAX_DEPTH:
            raise Unparseable(f"nested deeper than {_MAX_DEPTH}", pointer=pointer)
        self.values += 1
        if self.values > _MOST_VALUES:
            raise TooLarge(
                f"more than {_MOST_VALUES} values that belong to no tensor", pointer=pointer
            )
        if isinstance(node, simdjson.Object):
            return {
                name: self.plain(inner, pointer + pointer_to(name), depth + 1)
                for name, inner in _items(node, pointer)
            }
        if isinstance(node, simdjson.Array):
            self.arrays += 1
            return [self.plain(inner, f"{pointer}/{i}", depth + 1) for i, inner in enumerate(node)]
        return node

    def _tensor(self, node: Any, name: str, pointer: str) -> _Tensor:
        if isinstance(node, simdjson.Object):
            fields = {
                key: self.plain(inner, f"{pointer}/{key}") for key, inner in _items(node, pointer)
            }
            if fields.keys() != _TENSOR_KEYS:
                raise InvalidContent(
                    f"{name} as an object has dtype, shape and data; "
                    f"{', '.join(fields) or 'nothing'} came",
                    pointer=pointer,
                )
            return _Base64(name, pointer, **fields)
        if isinstance(node, simdjson.Array):
            shape, leaves, arrays = _walk(node, name, pointer)
            self.arrays += arrays
            return _Lists(name, pointer, node, shape, leaves)
        return _Lists(name, pointer, [node], (), [[node]])


class _Tensor:
    """A tensor in a document, not yet read."""

    def __init__(self, name: str, pointer: str) -> None:
        self.name = name
        self.pointer = pointer

    def read(self, flat: bool) -> RawTensor:
        raise NotImplementedError


class _Base64(_Tensor):
    def __init__(self, name: str, pointer: str, dtype: Any, shape: Any, data: Any) -> None:
        super().__init__(name, pointer)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise InvalidContent(
                f"{name} has dtype {shown(dtype)}; known are {', '.join(DTYPES)}",
                pointer=f"{pointer}/dtype",
            )
        if (
            not isinstance(shape, list)
            or len(shape) > _MAX_AXES
            or not all(type(size) is int and size >= 0 for size in shape)
            or nbytes(dtype, [size or 1 for size in shape]) >= 1 << 63
        ):
            raise InvalidContent(
                f"{name} has shape {shown(shape)}; it must be at most {_MAX_AXES} whole numbers, "
                "none negative, of less than 2**63 bytes together",
                pointer=f"{pointer}/shape",
            )
        if not isinstance(data, str):
            raise InvalidContent(
                f"{name} has data {shown(data)}; it must be a string of base64",
                pointer=f"{pointer}/data",
            )
        self._dtype, self._shape, self._data = dtype, tuple(shape), data

    def read(self, flat: bool) -> RawTensor:
        needed = nbytes(self._dtype, self._shape)
        if len(self._data) != 4 * -(-needed // 3):
            raise InvalidContent(
                f"{self.name} is {self._dtype} of shape {list(self._shape)}, {needed} bytes or "
                f"{4 * -(-needed // 3)} characters of base64; {len(self._data)} characters came",
                pointer=f"{self.pointer}/data",
            )
        try:
            data = pybase64.b64decode_as_bytearray(self._data, validate=True)
        except ValueError as error:  # not base64, or not ASCII
            raise InvalidContent(
                f"{self.name} has data that is not base64: {error}", pointer=f"{self.pointer}/data"
            ) from None
        if len(data) != needed:
            raise InvalidContent(
                f"{self.name} needs {needed} bytes; {len(data)} came",
                pointer=f"{self.pointer}/data",
            )
        if self._dtype == "bool" and max(data, default=0) > 1:
            raise InvalidContent(
                f"{self.name} is bool and holds bytes other than 0 and 1",
                pointer=f"{self.pointer}/data",
            )
        return RawTensor(self._dtype, self._shape, memoryview(data))


class _Lists(_Tensor):
    def __init__(
        self, name: str, pointer: str, node: Any, shape: tuple[int, ...], leaves: list[Any]
    ) -> None:
        super().__init__(name, pointer)
        self._node, self._shape, self._leaves = node, shape, leaves

    def read(self, flat: bool) -> RawTensor:
        if 0 in self._shape:
            return RawTensor.from_numpy(np.zeros(self._shape), literal=True)
        first = self._leaves[0][0]
        if flat and isinstance(self._node, simdjson.Array):
            for code, dtype in _BUFFERS[type(first) is float :]:
                try:
                    buffer = self._node.as_buffer(of_type=code)
                except (TypeError, ValueError):
                    continue  # of another type, or mixed
                array: Array = np.frombuffer(buffer, dtype).reshape(self._shape)
                return RawTensor.from_numpy(array, literal=True)
        return self._read_objects()

    def _read_objects(self) -> RawTensor:
        """The slow way, for booleans, for strings among numbers, and for what is wrong."""
        if math.prod(self._shape) > _MOST_OBJECTS:
            raise _too_large(
                self.name,
                self.pointer,
                f"more than {_MOST_OBJECTS} values that are booleans, or among which are strings",
            )
        values = list(chain.from_iterable(self._leaves))
        types = set(map(type, values))
        if types == {bool}:
            return RawTensor.from_numpy(np.array(values).reshape(self._shape), literal=True)
        if str in types:
            values = [_NON_FINITE.get(v, v) if isinstance(v, str) else v for v in values]
            types = set(map(type, values))
        if not types <= {int, float}:
            at, odd = next((i, v) for i, v in enumerate(values) if type(v) not in (int, float))
            raise InvalidContent(
                f"{self.name} holds {_shown(odd)} at {list(self._index(at))}; it must be all "
                'numbers (or "NaN", "Infinity", "-Infinity"), or all booleans',
                pointer=self.pointer,
            )
        whole = types == {int} and min(values) >= -(2**63) and max(values) < 2**63
        dtype = np.int64 if whole else np.float64
        return RawTensor.from_numpy(np.array(values, dtype).reshape(self._shape), literal=True)

    def _index(self, at: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.unravel_index(at, self._shape)) if self._shape else ()


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
        if len(shape) == _MAX_AXES:
            raise InvalidContent(f"{name} has more than {_MAX_AXES} axes", pointer=pointer)
        if arrays + len(level) * shape[-1] > _MOST_OBJECTS:
            raise _too_large(name, pointer, f"more than {_MOST_OBJECTS} lists")
        level = list(chain.from_iterable(level))
        if not all(isinstance(row, simdjson.Array) for row in level):
            raise InvalidContent(
                f"{name} is ragged: on axis {len(shape)} there are lists beside single values",
                pointer=pointer,
            )
        arrays += len(level)


def _too_large(name: str, pointer: str, what: str) -> TooLarge:
    return TooLarge(f"{name} holds {what}; send it as base64", pointer=pointer)


def _count(body: bytes, character: str) -> int:
    """How often an ASCII character occurs; several times as fast as `bytes.count`."""
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == ord(character)))


def _items(node: Any, pointer: str) -> Iterator[tuple[str, Any]]:
    """Names and values of an object, each name once.

    Not `node.items()`, which makes Python objects of all that is below.
    """
    if len(node) > _MAX_NAMES:
        raise InvalidContent(f"more than {_MAX_NAMES} names in an object", pointer=pointer)
    seen = set()
    for name in node:
        inside = pointer + pointer_to(name)
        if name in seen:
            raise InvalidContent(f"{name!r:.60} comes twice", pointer=inside)
        seen.add(name)
        if "\0" in name:  # simdjson looks names up as C strings
            raise InvalidContent(f"{name!r:.60} is no name", pointer=inside)
        yield name, node[name]


def _as_lists(tensor: RawTensor) -> bytes:
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


_WORDS: Final = {"nan": b'"NaN"', "inf": b'"Infinity"', "-inf": b'"-Infinity"'}


def _as_base64(tensor: RawTensor) -> bytes:
    head = orjson.dumps({"dtype": tensor.dtype, "shape": tensor.shape})[:-1]
    return b"".join((head, b',"data":"', pybase64.b64encode(tensor.data), b'"}'))


def _shown(value: Any) -> str:
    if isinstance(value, simdjson.Object | simdjson.Array):
        return "an object" if isinstance(value, simdjson.Object) else "a list"
    return shown(value)
