"""One safetensors file of a checkpoint, read tensor by tensor.

The file is read, not mapped: a mapped file that another process shortens would end this process by
SIGBUS.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from qkv.errors import InvalidContent, QkvError
from qkv.tensors import RawTensor
from qkv.wire.safetensors import DTYPES
from qkv.wire.safetensors_header import LENGTH_BYTES, Header, header_length, read_header

MAX_HEADERS: Final = 32 << 20
"""Bytes of the headers of a checkpoint, of all files together; 100,000 tensors take less."""
_MAX_TENSORS: Final = 1 << 18  # of one file
_READ: Final = 16 << 20  # bytes of one call
# opening a pipe must not wait; on Windows, text would end at a certain byte
_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class TensorFile:
    """An open safetensors file. Only its header is read, until `read` reads a tensor.

    Args:
        path: of the file.
        max_header: bytes that its header may have.

    Attributes:
        path: as the argument.
        names: of its tensors.
        metadata: the entry `__metadata__` of the header.
        header_bytes: of the header.

    Raises:
        InvalidContent: it is no safetensors file.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, max_header: int = MAX_HEADERS) -> None:
        self.path = path
        self._descriptor = os.open(path, _FLAGS)
        try:
            self._stat = os.fstat(self._descriptor)
            if not stat.S_ISREG(self._stat.st_mode):
                raise self._error("it is no regular file")
            self._entries, self.metadata = self._read_header(max_header)
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
        self.read_into(name, 0, data)
        return RawTensor(dtype, entry.shape, data)

    def read_into(self, name: str, first: int, buffer: memoryview) -> None:
        """Reads bytes of a tensor, from byte `first` of it, until the buffer is full.

        Raises:
            InvalidContent: the file was shortened.
            OSError: the file cannot be read.
        """
        self._read_into(buffer, self._start + self._entries[name].first + first)

    def check_unchanged(self) -> None:
        """Checks that the file has the size and the times that it had when it was opened.

        Raises:
            InvalidContent: it has not.
        """
        now = os.fstat(self._descriptor)
        for field in ("st_size", "st_mtime_ns", "st_ctime_ns"):
            if getattr(now, field) != getattr(self._stat, field):
                raise InvalidContent(f"{self.path}: the file changed while it was read")

    def _read_header(self, max_bytes: int) -> Header:
        size = self._stat.st_size
        head = bytearray(min(LENGTH_BYTES, size))
        self._read_into(memoryview(head), 0)
        with self._named_errors():
            self.header_bytes = header_length(head, size)
        if self.header_bytes > max_bytes:
            raise self._error(
                f"the header is too long: expected at most {max_bytes} bytes of the {MAX_HEADERS} "
                "that the headers of a checkpoint may have"
            )
        text = bytearray(self.header_bytes)
        self._read_into(memoryview(text), LENGTH_BYTES)
        self._start = LENGTH_BYTES + self.header_bytes
        with self._named_errors():
            return read_header(bytes(text), size - self._start, _MAX_TENSORS, lambda _: None)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Names the file in errors."""
        try:
            yield
        except QkvError as error:
            raise self._error(error.detail) from None

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
