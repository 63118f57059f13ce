"""`Throughput`: the work done in a second, estimated from the last batches."""

from __future__ import annotations

import math
from typing import Final

from qkv.jobs.load import Load

_DECAY: Final = 0.9  # of the weight of a batch in the estimate, with each later batch
_MAX_RETRY_AFTER_S: Final = 60  # longer estimates are not reliable
_LONG_BATCH_S: Final = 0.01  # the time of a shorter one is mostly independent of its operations


class Throughput:
    """An estimate of the work done in a second, from the last batches."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all batches."""
        self._done, self._seconds = [0.0, 0.0, 0.0], 0.0
        self._long_flops, self._long_seconds = 0.0, 0.0

    def add(self, done: Load, seconds: float) -> None:
        """Adds the work and the seconds of a batch."""
        self._done = [_DECAY * was + more for was, more in zip(self._done, done, strict=True)]
        self._seconds = _DECAY * self._seconds + seconds
        if seconds >= _LONG_BATCH_S:
            # the event loop reads them meanwhile, so the divisor is first
            self._long_seconds = _DECAY * self._long_seconds + seconds
            self._long_flops = _DECAY * self._long_flops + done.flops

    @property
    def flops_per_s(self) -> float | None:
        """Operations in a second of the last batches of at least 10 ms; None: there was none."""
        return self._long_flops / self._long_seconds if self._long_flops else None

    def retry_after(self, queued: Load) -> int:
        """Estimates the whole seconds, from 1 to 60, until the queued load is done."""
        done, seconds = self._done, self._seconds
        each = (w * seconds / d for w, d in zip(queued, done, strict=True) if d)
        seconds = round(max(each, default=0.0), 3)  # so that a rounding error adds no second
        return max(1, min(math.ceil(seconds), _MAX_RETRY_AFTER_S))
