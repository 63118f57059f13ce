"""Writes log lines from a background thread, so that a slow reader delays no event loop.

`BackgroundWriter` writes the request log; `StderrHandler` is the `logging` handler of each process.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Final

__all__ = ["BackgroundWriter", "StderrHandler"]

_MAX_QUEUED_BYTES: Final = 1 << 23
_CHUNK_BYTES: Final = 4096  # PIPE_BUF: writes of several processes to one pipe do not mix up to it
_STOP_TIMEOUT_S: Final = 2.0  # for what is queued at the end

# A terminal obeys some of them, and a line ends at others; messages may hold a client's text.
_CONTROLS: Final = {
    code: f"\\u{code:04x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)
}
_ESCAPES: Final = {code: text for code, text in _CONTROLS.items() if chr(code) not in "\t\n"}


class BackgroundWriter:
    """Writes lines from its own thread, many at a time. Lines that find no room in the queue, or
    cannot be written, are dropped and counted.

    Args:
        file: the descriptor.
        on_drop: called with how many more were dropped, by one thread at a time.
        interval_s: seconds for which the thread waits for more lines.

    Attributes:
        dropped_count: how many were dropped.
    """

    def __init__(
        self, file: int, on_drop: Callable[[int], None] | None = None, interval_s: float = 0.0
    ) -> None:
        self._file, self._on_drop, self._interval_s = file, on_drop, interval_s
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a thread that adds a line may be interrupted to add one
        self._free_bytes, self.dropped_count = _MAX_QUEUED_BYTES, 0
        self._is_mid_line = False  # what was written last ends inside a line
        self._thread = threading.Thread(target=self._run, name="qkv-lines", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add(self, line: bytes) -> bool:
        """Queues a line, its line end included; returns False if there is no room for it."""
        with self._lock:
            if len(line) > self._free_bytes:
                self._drop(1)
                return False
            self._free_bytes -= len(line)
            self._queue.put(line)
            return True

    def stop(self) -> None:
        """Writes what is queued, within two seconds."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(_STOP_TIMEOUT_S)

    def _drop(self, count: int) -> None:
        with self._lock:
            self.dropped_count += count
            if self._on_drop is not None:
                self._on_drop(count)

    def _run(self) -> None:
        is_stopping = False
        while not is_stopping:
            lines = [self._queue.get()]
            time.sleep(self._interval_s)
            lines += [self._queue.get() for _ in range(self._queue.qsize())]
            is_stopping = None in lines
            for chunk in _split_chunks([line for line in lines if line is not None]):
                self._write(chunk)
                with self._lock:
                    self._free_bytes += sum(map(len, chunk))

    def _write(self, lines: list[bytes]) -> None:
        """Writes lines together; ends the line before them first, if it broke off."""
        start = b"\n" if self._is_mid_line else b""
        text = start + b"".join(lines)
        written_bytes = self._write_all(text)
        if written_bytes:
            self._is_mid_line = text[written_bytes - 1] != ord("\n")
        ends = list(accumulate(map(len, lines), initial=len(start)))[1:]
        if lost := sum(end > written_bytes for end in ends):
            self._drop(lost)

    def _write_all(self, text: bytes) -> int:
        """Writes as much as it can; returns how many bytes that is."""
        rest = text
        while rest:
            try:
                rest = rest[os.write(self._file, rest) :]
            except BlockingIOError:  # another process that has the file made it non-blocking
                select.select([], [self._file], [])
            except OSError:  # nobody reads any more, or a disk is full: that may pass
                break
        return len(text) - len(rest)


class StderrHandler(logging.Handler):
    """Writes log records from WARNING on to standard error, through a `BackgroundWriter`. The next
    record says how many were dropped before it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._writer = BackgroundWriter(2)
        self._reported_count = 0  # of those that were dropped

    def start(self) -> None:
        """Handles the records of all loggers of the process, and what `warnings` warns of."""
        self._writer.start()
        logging.captureWarnings(True)
        logging.getLogger().addHandler(self)

    def stop(self) -> None:
        """Writes what is queued, within two seconds."""
        logging.getLogger().removeHandler(self)
        logging.captureWarnings(False)
        self._writer.stop()

    def emit(self, record: logging.LogRecord) -> None:
        """Called by a logger."""
        try:
            text = self.format(record).translate(_ESCAPES)
        except Exception:
            self.handleError(record)
            return
        dropped_count = self._writer.dropped_count
        if dropped_count > self._reported_count:
            unreported = dropped_count - self._reported_count
            text = f"({unreported} messages before this were dropped)\n{text}"
        if self._writer.add(f"{text}\n".encode(errors="backslashreplace")):
            self._reported_count = dropped_count


def _split_chunks(lines: list[bytes]) -> Iterator[list[bytes]]:
    """Groups whole lines into chunks that are written in one piece."""
    chunk: list[bytes] = []
    size = 0
    for line in lines:
        if chunk and size + len(line) > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(line)
        size += len(line)
    if chunk:
        yield chunk
