"""The request log: one line of JSON for each request, on standard output."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

__all__ = ["RequestLog"]

_EVERY_S: Final = 0.1
_MOST: Final = 10_000  # lines that wait to be written, a few megabytes
_PIECE: Final = 4096  # PIPE_BUF: what several processes write to one pipe is not mixed up to here
_LAST_S: Final = 2.0  # for what is left, when the service ends


class RequestLog:
    """Writes lines from a thread of its own, many at a time: whoever reads them slowly, or not at
    all, keeps no request waiting. What finds no room is dropped, and counted.

    Args:
        file: the descriptor.
        on_drop: told of each line that is dropped.
    """

    def __init__(self, file: int, on_drop: Callable[[], None]) -> None:
        self._file, self._on_drop = file, on_drop
        self._lines: list[bytes] = []
        self._batches: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._is_writing = False
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._work, name="qkv-log", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add(self, fields: Mapping[str, Any]) -> None:
        """Has a line written, soon; to be called on the event loop."""
        if len(self._lines) >= _MOST:
            self._on_drop()
            return
        self._lines.append(orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self._hand_over)

    async def stop(self) -> None:
        """Writes what is left, if it is read within a moment."""
        if self._timer is not None:
            self._timer.cancel()
        self._batches.put(self._lines)
        self._batches.put([])
        await asyncio.to_thread(self._thread.join, _LAST_S)

    def _hand_over(self) -> None:
        self._timer = None
        if self._is_writing:  # the last ones have not been read yet
            self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self._hand_over)
            return
        self._is_writing = True
        self._batches.put(self._lines)
        self._lines = []

    def _work(self) -> None:
        while batch := self._batches.get():
            try:
                self._write(batch)
            except OSError:  # nobody reads any more: requests go on
                return
            self._is_writing = False

    def _write(self, lines: list[bytes]) -> None:
        """Writes whole lines at once, as many as surely stay together."""
        piece: list[bytes] = []
        size = 0
        for line in lines:
            if piece and size + len(line) > _PIECE:
                self._write_all(b"".join(piece))
                piece, size = [], 0
            piece.append(line)
            size += len(line)
        self._write_all(b"".join(piece))

    def _write_all(self, piece: bytes) -> None:
        while piece:
            piece = piece[os.write(self._file, piece) :]
