"""Lines for a file that may be read slowly, or by nobody: whoever has some written waits for none
of that."""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

__all__ = ["Lines"]

_MOST: Final = 10_000  # lines that wait to be written, a few megabytes
_PIECE: Final = 4096  # PIPE_BUF: what several processes write to one pipe is not mixed up to here
_LAST_S: Final = 2.0  # for what is left


class Lines:
    """Writes lines from a thread of its own, many at a time. What finds no room, or cannot be
    written, is dropped, and counted.

    Args:
        file: the descriptor.
        on_drop: told of each line that is dropped, by one thread at a time.
        every_s: seconds for which the thread waits for more of them.
    """

    def __init__(self, file: int, on_drop: Callable[[], None], every_s: float = 0.0) -> None:
        self._file, self._on_drop, self._every_s = file, on_drop, every_s
        self._dropping = threading.Lock()
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="qkv-lines", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add(self, line: bytes) -> None:
        """Has a line written, soon; its end is part of it."""
        if self._waiting.qsize() < _MOST:
            self._waiting.put(line)
        else:
            self._drop(1)

    def stop(self) -> None:
        """Writes what is left, if it is read within a moment."""
        self._waiting.put(None)
        self._thread.join(_LAST_S)

    def _drop(self, count: int) -> None:
        with self._dropping:
            for _ in range(count):
                self._on_drop()

    def _work(self) -> None:
        goes_on = True
        while goes_on:
            came = [self._waiting.get()]
            time.sleep(self._every_s)
            came += [self._waiting.get() for _ in range(self._waiting.qsize())]
            goes_on = None not in came
            for piece in _pieces([line for line in came if line is not None]):
                try:
                    self._write(b"".join(piece))
                except OSError:  # nobody reads any more, or a disk is full: that may pass
                    self._drop(len(piece))

    def _write(self, piece: bytes) -> None:
        while piece:
            try:
                piece = piece[os.write(self._file, piece) :]
            except BlockingIOError:  # who shares the file has said that writing is not to wait
                select.select([], [self._file], [])


def _pieces(lines: list[bytes]) -> Iterator[list[bytes]]:
    """Whole lines, as many as surely stay together."""
    piece: list[bytes] = []
    size = 0
    for line in lines:
        if piece and size + len(line) > _PIECE:
            yield piece
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    if piece:
        yield piece
