"""The queued work on each device, by worker, in shared memory: it shows which device has least."""

from __future__ import annotations

import mmap

import numpy as np

from qkv.telemetry.metrics import float64_view

__all__ = ["QueuedWork"]


class QueuedWork:
    """Work that workers have submitted and that is not done; create it before the fork.

    Each worker writes its own cells, one for each device process, and reads the sum of all. No
    lock is needed: a cell has one writer, and a store of eight bytes is never seen in part.

    Args:
        workers: number of workers.
        devices: number of device processes.
    """

    def __init__(self, workers: int, devices: int) -> None:
        block = mmap.mmap(-1, 8 * max(1, workers * devices))
        cells = np.frombuffer(block, "f8")[: workers * devices].reshape(devices, workers)
        # for a few workers, Python's sum of a memoryview takes less time than numpy's
        self._devices = [float64_view(row) for row in cells]

    def set(self, worker: int, device: int, work: float) -> None:
        """Sets the work of a worker on a device, in floating-point operations; only this worker
        may do so."""
        self._devices[device][worker] = work

    def clear(self, worker: int) -> None:
        """Clears the cells of a worker that has exited."""
        for workers in self._devices:
            workers[worker] = 0.0

    def totals(self) -> list[float]:
        """Returns the work on each device, of all workers."""
        return list(map(sum, self._devices))
