"""Writes log lines from a background thread, so that a slow reader delays no event loop.

`BackgroundWriter` writes the request log; `StderrHandler` is the `logging` handler of each process.
`QueueHandler` and `QueueListener` would make a `LogRecord` for each request, write each line alone,
and neither bound the queue in bytes nor count the lines that a failed write loses.
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

_MAX_QUEUED_BYTES: Final = 1 << 23
_CHUNK_BYTES: Final = 4096  # PIPE_BUF: smaller writes of several processes to one pipe do not mix
_STOP_TIMEOUT_S: Final = 2.0  # to write the queue at the end

# Messages may contain a client's text. Terminals obey some of these characters; others end a line.
_CONTROLS: Final = {
    code: f"\\u{code:04x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)
}
_ESCAPES: Final = {code: text for code, text in _CONTROLS.items() if chr(code) not in "\t\n"}


class BackgroundWriter:
    """A writer of lines from a thread of its own, many at a time.

    Drops and counts lines when the queue is full or writing fails.

    Args:
        file: file descriptor.
        on_drop: called with the number of newly dropped lines, by one thread at a time.
        interval_s: seconds for which the thread waits for more lines.

    Attributes:
        dropped_count: number of dropped lines.
    """

    def __init__(
        self, file: int, on_drop: Callable[[int], None] | None = None, interval_s: float = 0.0
    ) -> None:
        self._file, self._on_drop, self._interval_s = file, on_drop, interval_s
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = (
            threading.RLock()
        )  # reentrant: a signal handler may log while its thread adds a line
        self._free_bytes, self.dropped_count = _MAX_QUEUED_BYTES, 0
        self._is_mid_line = False  # the last write ended inside a line
        self._thread = threading.Thread(target=self._run, name="qkv-lines", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add(self, line: bytes) -> bool:
        """Queues a line with its line end; returns False if the queue is full."""
        with self._lock:
            if len(line) > self._free_bytes:
                self._drop(1)
                return False
            self._free_bytes -= len(line)
            self._queue.put(line)
            return True

    def stop(self) -> None:
        """Writes the queued lines within two seconds, then stops the thread."""
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
        """Writes lines in one piece; first ends the previous line if it is incomplete."""
        start = b"\n" if self._is_mid_line else b""
        text = start + b"".join(lines)
        written_bytes = self._write_all(text)
        if written_bytes:
            self._is_mid_line = text[written_bytes - 1] != ord("\n")
        ends = list(accumulate(map(len, lines), initial=len(start)))[1:]
        if lost := sum(end > written_bytes for end in ends):
            self._drop(lost)

    def _write_all(self, text: bytes) -> int:
        """Writes as many bytes as possible; returns their number."""
        rest = text
        while rest:
            try:
                rest = rest[os.write(self._file, rest) :]
            except BlockingIOError:  # another process has made the file non-blocking
                select.select([], [self._file], [])
            except OSError:  # no reader, or a full disk: either may be temporary
                break
        return len(text) - len(rest)


class StderrHandler(logging.Handler):
    """A handler that writes log records of WARNING and above to standard error in the background.

    The first record after a loss begins with the number of dropped messages.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._writer = BackgroundWriter(2)
        self._reported_count = 0  # dropped messages reported so far

    def start(self) -> None:
        """Starts to handle the records of all loggers of the process, and Python warnings."""
        self._writer.start()
        logging.captureWarnings(True)
        logging.getLogger().addHandler(self)

    def stop(self) -> None:
        """Stops handling records; writes the queued ones within two seconds."""
        logging.getLogger().removeHandler(self)
        logging.captureWarnings(False)
        self._writer.stop()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a record; loggers call it."""
        try:
            text = self.format(record).translate(_ESCAPES)
        except Exception:
            self.handleError(record)
            return
        dropped_count = self._writer.dropped_count
        if dropped_count > self._reported_count:
            unreported = dropped_count - self._reported_count
            text = f"({unreported} earlier messages were dropped)\n{text}"
        if self._writer.add(f"{text}\n".encode(errors="backslashreplace")):
            self._reported_count = dropped_count


def _split_chunks(lines: list[bytes]) -> Iterator[list[bytes]]:
    """Groups whole lines into chunks; each chunk is written in one piece."""
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
