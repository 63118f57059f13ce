"""The time that a client may take, measured so that a paused process blames no client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_LONGEST_PERIOD_S: Final = 1.0


class ClientTimer:
    """Ends a wait for a client that makes no progress.

    It counts checks, not seconds: a process that was stopped for an hour makes one more check.

    Args:
        wait: returns the seconds that the client may take for what is expected now, or None if
            nothing is; and a value that changes with each progress.
        end: called at each check after the client took too long.
        shortest_s: of the seconds that `wait` returns.
    """

    def __init__(
        self,
        wait: Callable[[], tuple[float | None, object]],
        end: Callable[[], None],
        shortest_s: float,
    ) -> None:
        self._wait, self._end = wait, end
        self._loop = asyncio.get_running_loop()
        self._period_s = min(_LONGEST_PERIOD_S, shortest_s / 4)
        self._progress: object = None
        self._checks_without_progress = 0
        self._handle = self._loop.call_later(self._period_s, self._check)

    def stop(self) -> None:
        """Checks no more."""
        self._handle.cancel()

    def _check(self) -> None:
        self._handle = self._loop.call_later(self._period_s, self._check)
        timeout_s, progress = self._wait()
        before, self._progress = self._progress, progress
        if timeout_s is None or progress != before:
            self._checks_without_progress = 0
            return
        self._checks_without_progress += 1
        if self._checks_without_progress * self._period_s >= timeout_s:
            self._end()
