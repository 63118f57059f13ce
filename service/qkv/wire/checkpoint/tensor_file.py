"""One safetensors file of a checkpoint, read tensor by tensor.

Format: github.com/huggingface/safetensors, README. The file is read, not mapped: a mapped file that
another process shortens would end this process by SIGBUS.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

from qkv.errors import InvalidContent
from qkv.tensors import RawTensor, nbytes
from qkv.wire.plain_json import load_names
from qkv.wire.safetensors import DTYPES

__all__ = ["TensorFile"]

_MAX_HEADER: Final = 32 << 20  # 100,000 tensors take less
_MAX_AXES: Final = 8
_MAX_NAME: Final = 1024  # characters
_READ: Final = 16 << 20  # bytes of one call
_METADATA: Final = "__metadata__"
# opening a pipe must not wait; on Windows, text would end at a certain byte
_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class _Entry(NamedTuple):
    """A tensor of the file: the code of its dtype, its shape, and the place of its bytes."""

    code: str
    shape: tuple[int, ...]
    first: int
    last: int


class TensorFile:
    """An open safetensors file. Only its header is read, until `read` reads a tensor.

    Args:
        path: of the file.

    Attributes:
        path: as the argument.
        names: of its tensors.
        metadata: the entry `__metadata__` of the header.

    Raises:
        InvalidContent: it is no safetensors file.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, _FLAGS)
        try:
            self._stat = os.fstat(self._descriptor)
            if not stat.S_ISREG(self._stat.st_mode):
                raise self._error("it is no regular file")
            header, self._start = self._read_header()
            self.metadata = header.pop(_METADATA, {})
            self._entries = {name: self._entry(name, value) for name, value in header.items()}
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        """The names of its tensors."""
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):  # `open` succeeded
            self.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """Returns the dtype of a tensor; its code, such as U8, if requests have no such dtype."""
        code = self._entries[name].code
        return DTYPES.get(code, code)

    def read(self, name: str) -> RawTensor:
        """Reads a tensor into memory of its own.

        Raises:
            InvalidContent: requests do not support its dtype, or the file was shortened.
            OSError: the file cannot be read.
        """
        entry, dtype = self._entries[name], self.dtype(name)
        if entry.code not in DTYPES:
            raise InvalidContent(
                f"{self.path}: {name} has an unknown dtype: got {dtype}, expected "
                f"{', '.join(DTYPES)}"
            )
        data = memoryview(bytearray(entry.last - entry.first))
        self._read_into(data, self._start + entry.first)
        return RawTensor(dtype, entry.shape, data)

    def check_unchanged(self) -> None:
        """Checks that the file has the size and the times that it had when it was opened.

        Raises:
            InvalidContent: it has not.
        """
        now = os.fstat(self._descriptor)
        for field in ("st_size", "st_mtime_ns", "st_ctime_ns"):
            if getattr(now, field) != getattr(self._stat, field):
                raise InvalidContent(f"{self.path}: the file changed while it was read")

    def _read_header(self) -> tuple[dict[str, Any], int]:
        """Returns the header, and the offset of the first tensor."""
        size = self._stat.st_size
        if size < 8:
            raise self._error(f"it is too short: got {size} bytes, expected at least 8")
        head = bytearray(8)
        self._read_into(memoryview(head), 0)
        length = int.from_bytes(head, "little")
        if length > min(_MAX_HEADER, size - 8):
            raise self._error(
                f"its header has a wrong length: got {length} bytes, expected at most "
                f"{min(_MAX_HEADER, size - 8)}"
            )
        text = bytearray(length)
        self._read_into(memoryview(text), 8)
        try:
            header = load_names(bytes(text))
        except ValueError as error:
            raise self._error(f"its header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise self._error("its header is no JSON object")
        return header, 8 + length

    def _entry(self, name: str, value: Any) -> _Entry:
        """Returns the entry of a tensor in the header, whose bytes are in the file."""
        if len(name) > _MAX_NAME:
            raise self._error(
                f"the name {name!r:.60} is too long: got {len(name)} characters, expected at most "
                f"{_MAX_NAME}"
            )
        size = self._stat.st_size - self._start
        entry = value if isinstance(value, dict) else {}
        code, shape, place = (entry.get(n) for n in ("dtype", "shape", "data_offsets"))
        if not isinstance(code, str) or not _are_counts(shape) or not _are_counts(place):
            raise self._error(f"the entry of {name!r:.60} is wrong")
        if len(shape) > _MAX_AXES or len(place) != 2 or not place[0] <= place[1] <= size:
            raise self._error(
                f"the entry of {name!r:.60} is wrong: got shape {shape!r:.60} and bytes "
                f"{place!r:.60} of {size}"
            )
        first, last = place
        if code in DTYPES and nbytes(DTYPES[code], shape) != last - first:
            raise self._error(
                f"{name!r:.60} has the wrong number of bytes: got {last - first}, expected "
                f"{nbytes(DTYPES[code], shape)} for {code} of shape {shape}"
            )
        return _Entry(code, tuple(shape), first, last)

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        os.lseek(self._descriptor, offset, os.SEEK_SET)
        while buffer:
            data = os.read(self._descriptor, min(len(buffer), _READ))
            if not data:
                raise self._error("it ends before its last tensor")
            buffer[: len(data)] = data
            buffer = buffer[len(data) :]

    def _error(self, problem: str) -> InvalidContent:
        return InvalidContent(f"{self.path}: not a safetensors file: {problem}")


def _are_counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 48 for value in values
    )
