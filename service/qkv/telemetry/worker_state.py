"""State shared by all processes of the service, in shared memory.

Each process writes its own row and reads all rows. The supervisor reads all rows and sets the drain
flag. A single process has a shared state of one row.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from qkv.telemetry.metrics import MetricsRecorder, SharedMetrics, Usage
from qkv.telemetry.model_stats import ModelStats, ModelStatsRecorder
from qkv.telemetry.process_usage import ProcessUsage, read_usage
from qkv.telemetry.queued_work import QueuedWork

__all__ = ["SharedState", "WorkerState"]

_ROW: Final = np.dtype(
    [
        ("heartbeat", "f8"),  # last time its event loop ran; 0: not started
        ("busy_since", "f8"),  # start of the batch that its device runs; 0: idle
        ("in_flight", "i8"),  # requests that run a job and have no response yet
        ("connections", "i8"),  # open connections
        ("pid", "i8"),  # id of the process; 0: not started
        ("ready", "?"),  # accepts requests or jobs
        ("was_ready", "?"),  # has accepted some since it started
        ("usage", [(name, "i8") for name in Usage._fields]),
    ],
    align=True,
)
_HEARTBEAT_S: Final = 0.25
# CLOCK_MONOTONIC is one clock for all processes of a machine
_now = time.monotonic


class SharedState:
    """The rows of all processes; create it before the fork.

    Args:
        workers: number of workers.
        stuck_s: seconds without a heartbeat after which an event loop counts as stuck.
        stuck_device_s: seconds of one batch after which a device counts as stuck.
        models: names of the variants.
        max_batch_size: limit of requests in a batch.
        devices: name of the device of each device process; they have the last rows. Empty: each
            worker runs its jobs itself.
        layers: names of the loaded layers.

    Attributes:
        devices: as the argument.
        models: loaded flags and statistics of the variants and the layers.
        metrics: request counts of all processes.
        queued_work: work on each device.
    """

    def __init__(
        self,
        workers: int,
        stuck_s: float = 30.0,
        stuck_device_s: float = 600.0,
        models: Sequence[str] = (),
        max_batch_size: int = 1,
        devices: Sequence[str] = (),
        layers: Sequence[str] = (),
    ) -> None:
        self._creator_pid = os.getpid()  # of the supervisor, or of the only process
        self._stuck_s, self._stuck_device_s = stuck_s, stuck_device_s
        self.devices = tuple(devices)
        self._workers, rows = workers, workers + len(devices)
        self.models = ModelStats(models, rows, max_batch_size, layers)
        self.metrics = SharedMetrics(models, rows, layers)
        self.queued_work = QueuedWork(workers, len(devices))
        block = mmap.mmap(-1, (_ROW.itemsize + 8) * rows + 1)  # anonymous, shared with forks
        self._rows = np.frombuffer(block, _ROW, rows)
        self._starts = np.frombuffer(block, "i8", rows, self._rows.nbytes)
        # read for each request: a memoryview is faster than an array
        self._draining = memoryview(block)[self._rows.nbytes + self._starts.nbytes :].cast("?")

    def __len__(self) -> int:
        """Returns the number of workers."""
        return self._workers

    @property
    def processes(self) -> range:
        """The indices of all processes, the device processes last."""
        return range(len(self._rows))

    def clear_row(self, index: int) -> None:
        """Clears the row of a process that has exited, and its queued work if it is a worker."""
        self._rows[index] = np.zeros((), _ROW)
        if index < self._workers:
            self.queued_work.clear(index)

    def worker(self, index: int) -> WorkerState:
        """Clears the row of a process that starts; returns its state."""
        self.clear_row(index)
        self._starts[index] += 1
        row, metrics_recorder = self._rows[index : index + 1], self.metrics.recorder(index)
        return WorkerState(self, row, self.models.recorder(index), metrics_recorder)

    @property
    def is_draining(self) -> bool:
        """True once the service stops: each connection may bring one more request."""
        return self._draining[0]

    def drain(self) -> None:
        """Starts the drain: the service is not ready, and closes connections after responses."""
        self._draining[0] = True

    @property
    def is_ready(self) -> bool:
        """True while all workers accept requests, and a device process accepts jobs."""
        devices = self.device_rows["ready"]
        has_device = bool(devices.any()) or not len(devices)
        return has_device and bool(self.worker_rows["ready"].all()) and not self.is_draining

    @property
    def is_complete(self) -> bool:
        """True while every process accepts requests or jobs."""
        return bool(self._rows["ready"].all())

    @property
    def engine_count(self) -> int:
        """The number of processes that run jobs."""
        return len(self.devices) or self._workers

    @property
    def worker_rows(self) -> np.ndarray:
        """The rows of the workers."""
        return self._rows[: self._workers]

    @property
    def device_rows(self) -> np.ndarray:
        """The rows of the device processes."""
        return self._rows[self._workers :]

    @property
    def device_restarts(self) -> list[int]:
        """The number of restarts of each device process."""
        return [max(0, int(starts) - 1) for starts in self._starts[self._workers :]]

    @property
    def in_flight(self) -> int:
        """The number of requests that run a job, received at least in part, without a response."""
        return int(self._rows["in_flight"].sum())

    @property
    def usage(self) -> Usage:
        """The queues of all processes, and their use of device memory. Processes on one device
        share its total."""
        usages = self._rows["usage"]
        totals = [int(usages[name].sum()) for name in Usage._fields]
        names = [""] * self._workers + list(self.devices)
        sizes: dict[str, int] = {}
        for name, size in zip(names, usages["total_bytes"].tolist(), strict=True):
            sizes[name] = max(size, sizes.get(name, 0))
        return Usage(*totals)._replace(total_bytes=sum(sizes.values()))

    @property
    def process_usage(self) -> ProcessUsage | None:
        """CPU time, memory and files of the supervisor and all processes; None without /proc."""
        pids = {int(pid) for pid in self._rows["pid"]} - {0, self._creator_pid}
        return read_usage(self._creator_pid, pids)

    @property
    def stuck_processes(self) -> list[int]:
        """The indices of the processes whose event loop or device is stuck."""
        now, heartbeat, busy = _now(), self._rows["heartbeat"], self._rows["busy_since"]
        is_stuck = (heartbeat > 0) & (now - heartbeat > self._stuck_s)
        is_stuck |= (busy > 0) & (now - busy > self._stuck_device_s)
        return [int(i) for i in np.flatnonzero(is_stuck)]


class WorkerState:
    """The row of one process.

    Attributes:
        shared_state: state of all processes.
        stats_recorder: records this process's jobs per model.
        metrics_recorder: counts this process's requests.
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
        # views, which are fast to assign
        self._busy_since, self._in_flight = row["busy_since"], row["in_flight"].data
        usage = row["usage"]
        self._queue = usage["queued_count"].data, usage["queued_bytes"].data
        self._memory = [usage[name].data for name in Usage._fields[2:]]

    async def run_heartbeat(self, memory: Callable[[], Iterable[int]] = tuple) -> None:
        """Records its process, heartbeats and the use of the device's memory, until it is
        cancelled."""
        self._row["pid"] = os.getpid()
        while True:
            self.record_heartbeat()
            self.set_memory(memory())
            await asyncio.sleep(_HEARTBEAT_S)

    def record_heartbeat(self) -> None:
        """Records that the event loop runs."""
        self._row["heartbeat"] = _now()

    def set_queue(self, load: tuple[int, int, int]) -> None:
        """Sets the size of the queue: jobs, bytes and operations."""
        self._queue[0][0], self._queue[1][0], _ = load

    def set_memory(self, sizes: Iterable[int]) -> None:
        """Sets the bytes of the device's memory: allocated, reserved and in total."""
        for cell, size in zip(self._memory, sizes, strict=False):
            cell[0] = size

    def set_busy(self, is_busy: bool) -> None:
        """Records that the device starts or ends a batch."""
        self._busy_since[0] = _now() if is_busy else 0.0

    def idle_threads(self) -> int:
        """Returns the number of CPU threads that no other process needs now: the number of workers
        if at most one request is in flight, else 1."""
        return len(self.shared_state) if self.shared_state.in_flight <= 1 else 1

    def set_connection_count(self, count: int) -> None:
        """Sets the number of open connections."""
        self._row["connections"] = count

    @property
    def has_less_loaded_peer(self) -> bool:
        """True if another worker that is ready has fewer connections."""
        rows = self.shared_state.worker_rows
        return bool((rows["ready"] & (rows["connections"] < self._row["connections"])).any())

    def add_in_flight(self, count: int) -> None:
        """Adds to the number of requests in flight; a negative count subtracts."""
        self._in_flight[0] += count

    def set_ready(self, is_ready: bool) -> None:
        """Records whether this process accepts requests or jobs."""
        self._row["ready"] = is_ready
        if is_ready:
            self._row["was_ready"] = True
