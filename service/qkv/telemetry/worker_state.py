"""State shared by all processes of the service, in shared memory.

Each process writes its own row and reads all rows. The supervisor reads all and says when to drain.
A single process has a shared state of one row.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from qkv.telemetry.metrics import MetricsRecorder, SharedMetrics, Usage
from qkv.telemetry.model_stats import ModelStats, ModelStatsRecorder

__all__ = ["SharedState", "WorkerState"]

_ROW: Final = np.dtype(
    [
        ("heartbeat", "f8"),  # when its event loop last ran; 0: not started
        ("busy_since", "f8"),  # when its device started the batch that it runs; 0: idle
        ("in_flight", "i8"),  # requests to run something without a response yet
        ("connections", "i8"),  # open ones
        ("ready", "?"),  # whether it takes requests
        ("is_polling", "?"),  # whether it busy-polls for its only client
        ("usage", [(name, "i8") for name in Usage._fields]),  # as of its last heartbeat
    ],
    align=True,
)
_HEARTBEAT_S: Final = 0.25
# CLOCK_MONOTONIC is one clock for every process of a machine
_now = time.monotonic


class SharedState:
    """The rows of all processes, made before they are forked.

    Args:
        workers: how many.
        stuck_s: seconds after which a silent event loop counts as stuck.
        stuck_device_s: seconds after which a device that runs one batch counts as stuck.
        models: the names of the variants.
        most_together: the most requests that may run as one batch.
        device_process: True if one process more runs the workers' jobs. It has the last row.

    Attributes:
        models: which variants are loaded, and their statistics.
        metrics: the counts of all processes.
    """

    def __init__(
        self,
        workers: int,
        stuck_s: float = 30.0,
        stuck_device_s: float = 600.0,
        models: Sequence[str] = (),
        max_batch_size: int = 1,
        device_process: bool = False,
    ) -> None:
        self._stuck_s, self._stuck_device_s = stuck_s, stuck_device_s
        self._workers, rows = workers, workers + device_process
        self.models = ModelStats(models, rows, max_batch_size)
        self.metrics = SharedMetrics(models, rows)
        block = mmap.mmap(-1, _ROW.itemsize * rows + 1)  # anonymous, shared with forks
        self._rows = np.frombuffer(block, _ROW, rows)
        # read with each request: quicker to read than an array
        self._draining = memoryview(block)[_ROW.itemsize * rows :].cast("?")

    def __len__(self) -> int:
        """How many workers there are."""
        return self._workers

    @property
    def processes(self) -> range:
        """The indices of all that have a row, the device process last."""
        return range(len(self._rows))

    def clear_row(self, index: int) -> None:
        """Clears the row of a process that has ended."""
        self._rows[index] = np.zeros((), _ROW)

    def worker(self, index: int) -> WorkerState:
        """Returns a process's own row, cleared."""
        self.clear_row(index)
        row, metrics_recorder = self._rows[index : index + 1], self.metrics.recorder(index)
        return WorkerState(self, row, self.models.recorder(index), metrics_recorder)

    @property
    def is_draining(self) -> bool:
        """True once new work is rejected, because the service ends."""
        return self._draining[0]

    def drain(self) -> None:
        """Rejects new work from now on."""
        self._draining[0] = True

    @property
    def is_ready(self) -> bool:
        """True while every worker takes requests, and the device process jobs."""
        return bool(self._rows["ready"].all()) and not self.is_draining

    @property
    def worker_rows(self) -> np.ndarray:
        """The rows of the workers."""
        return self._rows[: self._workers]

    @property
    def in_flight(self) -> int:
        """Requests to run something without a response yet, those being received included."""
        return int(self._rows["in_flight"].sum())

    @property
    def usage(self) -> Usage:
        """What is queued for devices, and what all processes have of their memory."""
        usages = self._rows["usage"]
        totals = [int(usages[name].sum()) for name in Usage._fields]
        return Usage(*totals)._replace(total_bytes=int(usages["total_bytes"].max()))

    @property
    def stuck_processes(self) -> list[int]:
        """The processes whose event loop or device has not responded for too long."""
        now, heartbeat, busy = _now(), self._rows["heartbeat"], self._rows["busy_since"]
        is_stuck = (heartbeat > 0) & (now - heartbeat > self._stuck_s)
        is_stuck |= (busy > 0) & (now - busy > self._stuck_device_s)
        return [int(i) for i in np.flatnonzero(is_stuck)]


class WorkerState:
    """The row of one process.

    Attributes:
        shared_state: all rows.
        stats_recorder: counts the jobs of this process per model.
        metrics_recorder: counts its requests.
    """

    def __init__(
        self,
        shared_state: SharedState,
        row: np.ndarray,
        stats_recorder: ModelStatsRecorder,
        metrics_recorder: MetricsRecorder,
    ) -> None:
        self.shared_state = shared_state
        self.stats_recorder, self.metrics_recorder = stats_recorder, metrics_recorder
        self._row = row
        self._busy_since, self._in_flight = (
            row["busy_since"],
            row["in_flight"].data,
        )  # views, quick to assign

    async def run_heartbeat(self, usage: Callable[[], Usage] = Usage) -> None:
        """Records heartbeats and the device's usage, until it is cancelled."""
        while True:
            self.record_heartbeat()
            self.set_usage(usage())
            await asyncio.sleep(_HEARTBEAT_S)

    def record_heartbeat(self) -> None:
        """Records that the event loop runs."""
        self._row["heartbeat"] = _now()

    def set_usage(self, usage: Usage) -> None:
        """Sets what is queued and the device's memory."""
        self._row["usage"] = usage

    def set_busy(self, is_busy: bool) -> None:
        """Records that the device starts a batch, or has ended it."""
        self._busy_since[0] = _now() if is_busy else 0.0

    def idle_threads(self) -> int:
        """Returns how many CPU threads no other process wants now: as many as there are workers if
        at most one request is in flight, else 1."""
        return len(self.shared_state) if self.shared_state.in_flight <= 1 else 1

    def set_connection_count(self, count: int) -> None:
        """Sets how many connections are open."""
        self._row["connections"] = count

    @property
    def has_less_loaded_peer(self) -> bool:
        """True if another worker that is ready has fewer connections."""
        rows = self.shared_state.worker_rows
        return bool((rows["ready"] & (rows["connections"] < self._row["connections"])).any())

    def add_in_flight(self, count: int) -> None:
        """Adds to the number of requests in flight; a negative count subtracts."""
        self._in_flight[0] += count

    def set_polling(self, is_polling: bool) -> None:
        """Records whether it busy-polls."""
        self._row["is_polling"] = is_polling

    @property
    def is_only_active(self) -> bool:
        """True if no other worker has requests in flight, or busy-polls."""
        rows = self.shared_state.worker_rows
        others = int(rows["in_flight"].sum()) - self._in_flight[0] + int(rows["is_polling"].sum())
        return others == int(self._row["is_polling"][0])

    def set_ready(self, is_ready: bool) -> None:
        """Records whether requests are taken."""
        self._row["ready"] = is_ready
