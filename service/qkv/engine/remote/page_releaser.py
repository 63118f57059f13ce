"""Returns idle pages of a worker's shared memory to the system, a little at a time."""

from __future__ import annotations

import asyncio
from typing import Final

from qkv.engine.remote.shared_memory import WorkerRegion

__all__ = ["PageReleaser"]

_PERIOD_S: Final = 1.0
_PAUSE_S: Final = 0.02  # between steps of a millisecond, for requests


class PageReleaser:
    """A timer that returns the pages which no block has used for one to two seconds.

    Args:
        region: memory of the worker.
    """

    def __init__(self, region: WorkerRegion) -> None:
        self._region = region
        self._timer: asyncio.TimerHandle | None = None

    def on_allocated(self) -> None:
        """Starts a period if pages may become idle; call it on the event loop."""
        if self._timer is None and self._region.keeps_pages:
            self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._on_period)

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _on_period(self) -> None:
        self._region.begin_period()
        self._release()

    def _release(self) -> None:
        self._timer = None
        if self._region.release_idle_pages():
            self._timer = asyncio.get_running_loop().call_later(_PAUSE_S, self._release)
        else:
            self.on_allocated()
