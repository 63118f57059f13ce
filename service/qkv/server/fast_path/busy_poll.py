"""Busy polling: the event loop polls for a moment after a response instead of sleeping.

A process that sleeps between two requests of one caller is woken late, and finds that its code and
data have left the CPU's caches: a small attention takes half as long again.
"""

from __future__ import annotations

import asyncio
import time

from qkv.telemetry.worker_state import WorkerState

__all__ = ["BusyPoll"]


class BusyPoll:
    """Keeps one worker's event loop awake while its client is the only one of the service.

    Args:
        worker: says so.
        seconds: to stay awake for; 0: not at all.
    """

    def __init__(self, worker: WorkerState, seconds: float) -> None:
        self._worker, self._seconds = worker, seconds
        self._until = 0.0
        self._is_on = False

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins to poll after a response on the only connection of this worker."""
        if self._seconds and self._worker.is_only_active:
            self._until = time.perf_counter() + self._seconds
            if not self._is_on:
                self._turn_on(True)
                loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Schedules itself again: with a due callback, the event loop polls without waiting."""
        if time.perf_counter() < self._until:
            loop.call_soon(self._turn, loop)
        else:
            self._turn_on(False)

    def _turn_on(self, is_on: bool) -> None:
        self._is_on = is_on
        self._worker.set_polling(is_on)
