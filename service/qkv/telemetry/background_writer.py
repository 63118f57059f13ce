"""Lines for a file that may be read slowly, or by nobody: whoever has some written waits for none
of that."""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Final

__all__ = ["Lines"]

_ROOM: Final = 1 << 23  # bytes that wait to be written
_PIECE: Final = 4096  # PIPE_BUF: what several processes write to one pipe is not mixed up to here
_LAST_S: Final = 2.0  # for what is left


class Lines:
    """Writes lines from a thread of its own, many at a time. What finds no room, or cannot be
    written, is dropped, and counted.

    Args:
        file: the descriptor.
        on_drop: told how many more were dropped, by one thread at a time.
        every_s: seconds for which the thread waits for more of them.

    Attributes:
        dropped: how many were.
    """

    def __init__(
        self, file: int, on_drop: Callable[[int], None] | None = None, every_s: float = 0.0
    ) -> None:
        self._file, self._on_drop, self._every_s = file, on_drop, every_s
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._counting = threading.RLock()  # what adds one may be interrupted by what adds another
        self._room, self.dropped = _ROOM, 0
        self._is_within = False  # what is written ends inside a line
        self._thread = threading.Thread(target=self._work, name="qkv-lines", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add(self, line: bytes) -> bool:
        """Has a line written, soon; its end is part of it. Whether there is room for it."""
        with self._counting:
            if len(line) > self._room:
                self._drop(1)
                return False
            self._room -= len(line)
            self._waiting.put(line)
            return True

    def stop(self) -> None:
        """Writes what is left, if it is read within a moment."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(_LAST_S)

    def _drop(self, count: int) -> None:
        with self._counting:
            self.dropped += count
            if self._on_drop is not None:
                self._on_drop(count)

    def _work(self) -> None:
        goes_on = True
        while goes_on:
            came = [self._waiting.get()]
            time.sleep(self._every_s)
            came += [self._waiting.get() for _ in range(self._waiting.qsize())]
            goes_on = None not in came
            for piece in _pieces([line for line in came if line is not None]):
                self._write(piece)
                with self._counting:
                    self._room += sum(map(len, piece))

    def _write(self, lines: list[bytes]) -> None:
        """Writes them together. The first to follow one that broke off ends that one's line."""
        start = b"\n" if self._is_within else b""
        text = start + b"".join(lines)
        written = self._written(text)
        if written:
            self._is_within = text[written - 1] != ord("\n")
        ends = list(accumulate(map(len, lines), initial=len(start)))[1:]
        if lost := sum(end > written for end in ends):
            self._drop(lost)

    def _written(self, text: bytes) -> int:
        """How much of it could be written."""
        rest = text
        while rest:
            try:
                rest = rest[os.write(self._file, rest) :]
            except BlockingIOError:  # who shares the file has said that writing is not to wait
                select.select([], [self._file], [])
            except OSError:  # nobody reads any more, or a disk is full: that may pass
                break
        return len(text) - len(rest)


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
