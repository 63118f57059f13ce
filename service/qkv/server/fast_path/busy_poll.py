"""A loop that stays awake for a moment after an answer, as Linux's busy polling has it of sockets.

A process that sleeps between two requests of one caller is woken late, and finds that its code and
data have left the CPU's caches: a small attention takes half as long again.
"""

from __future__ import annotations

import asyncio
import time

from qkv.telemetry.worker_state import WorkerState

__all__ = ["BusyPoll"]


class BusyPoll:
    """Keeps one worker's loop awake where the CPU is nobody else's: its caller is the only one of
    the whole service.

    Args:
        worker: says so.
        seconds: to stay awake for; 0: not at all.
    """

    def __init__(self, worker: WorkerState, seconds: float) -> None:
        self._worker, self._seconds = worker, seconds
        self._until = 0.0
        self._is_on = False

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """An answer is given, on the only connection of this worker."""
        if self._seconds and self._worker.is_only_active:
            self._until = time.perf_counter() + self._seconds
            if not self._is_on:
                self._turn_on(True)
                loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """As long as something is to be called, a loop looks at its sockets and does not wait."""
        if time.perf_counter() < self._until:
            loop.call_soon(self._turn, loop)
        else:
            self._turn_on(False)

    def _turn_on(self, is_on: bool) -> None:
        self._is_on = is_on
        self._worker.set_polling(is_on)
