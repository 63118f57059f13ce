"""State shared by all processes of the service, in the table of counters.

Each process writes its own row and reads all rows. The supervisor reads all rows and sets the drain
flag. A single process has a shared state of one row.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from qkv.telemetry.counters import Counters, Recorder
from qkv.telemetry.families import BATCH_CELLS, FAMILIES, OUTCOMES, STAGES, UNKNOWN

_HEARTBEAT_S: Final = 0.25
# CLOCK_MONOTONIC is one clock for all processes of a machine
_now = time.monotonic


class SharedState:
    """The rows of all processes; create it before the fork.

    Args:
        workers: number of workers.
        stuck_s: seconds without a heartbeat after which an event loop counts as stuck.
        stuck_device_s: seconds of one batch after which a device counts as stuck.
        variants: their names.
        max_batch_size: limit of requests in a batch.
        devices: name of the device of each device process; they have the last rows. Empty: each
            worker runs its jobs itself.
        layers: names of the loaded layers.

    Attributes:
        counters: the table of all counts and states.
        variants: as the argument.
        devices: as the argument.
        models: the names of all models: variants and layers.
    """

    def __init__(
        self,
        workers: int,
        stuck_s: float = 30.0,
        stuck_device_s: float = 600.0,
        variants: Sequence[str] = (),
        max_batch_size: int = 1,
        devices: Sequence[str] = (),
        layers: Sequence[str] = (),
    ) -> None:
        self._creator_pid = os.getpid()  # of the supervisor, or of the only process
        self._stuck_s, self._stuck_device_s = stuck_s, stuck_device_s
        self._workers, self.variants, self.devices = workers, tuple(variants), tuple(devices)
        self.models = (*variants, *layers)
        labels = {
            "variant": (*variants, UNKNOWN),
            "outcome": OUTCOMES,
            "layer": layers,
            "model": self.models,
            "size": tuple(map(str, range(1, max_batch_size + 1))),
            "cell": BATCH_CELLS,
            "stage": STAGES,
            "device": devices,
        }
        self.counters = Counters(labels, workers + len(devices), 1 + len(self.models))
        self._rows = self.counters.rows
        self._flags = self.counters.flags  # the service drains; each model is unloaded
        self._flag_places = {name: place for place, name in enumerate(self.models, start=1)}
        # a sum of a memoryview takes less time than numpy's for a few processes
        self._in_flight = self._rows["requests_in_progress"].data
        work = self._rows["queued_work"][:workers]
        self._queued_work = [work[:, device].data for device in range(len(devices))]

    def __len__(self) -> int:
        """Returns the number of workers."""
        return self._workers

    @property
    def processes(self) -> range:
        """The indices of all processes, the device processes last."""
        return range(len(self._rows))

    def clear_row(self, index: int) -> None:
        """Clears the state of a process that has exited; its counts stay."""
        self.counters.clear_gauges(index)

    def worker(self, index: int) -> WorkerState:
        """Clears the row of a process that starts; returns its state."""
        self.clear_row(index)
        self._rows["starts"][index] += 1
        return WorkerState(self, index)

    @property
    def is_draining(self) -> bool:
        """True once the service stops: each connection may bring one more request."""
        return self._flags[0]

    def drain(self) -> None:
        """Starts the drain: the service is not ready, and closes connections after responses."""
        self._flags[0] = True

    def is_loaded(self, model: str) -> bool:
        """Returns True if the model exists and is loaded."""
        place = self._flag_places.get(model)
        return place is not None and not self._flags[place]

    def load(self, model: str, *, loaded: bool = True) -> None:
        """Loads or unloads the model in all workers."""
        self._flags[self._flag_places[model]] = not loaded

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
    def worker_rows(self) -> Any:
        """The rows of the workers: an array of float64 for each family, by its name."""
        return self._rows[: self._workers]

    @property
    def device_rows(self) -> Any:
        """The rows of the device processes."""
        return self._rows[self._workers :]

    @property
    def device_restarts(self) -> list[int]:
        """The number of restarts of each device process."""
        return [max(0, int(starts) - 1) for starts in self.device_rows["starts"]]

    @property
    def device_totals(self) -> list[tuple[int, float]]:
        """The number of inferences of each device process, and their seconds of computation, each
        batch counted once."""
        sizes = self.device_rows["batches"][:, : len(self.variants)].sum(1)
        counts, seconds = sizes[..., 0], sizes[..., BATCH_CELLS.index("compute_infer")].sum(1)
        inferences = counts @ np.arange(1, counts.shape[1] + 1)
        return list(zip(inferences.astype(int).tolist(), seconds.tolist(), strict=True))

    def set_queued_work(self, worker: int, device: int, work: float) -> None:
        """Sets the work of a worker that a device process has not done, in floating-point
        operations; only this worker may do so."""
        self._queued_work[device][worker] = work

    @property
    def queued_work(self) -> list[float]:
        """The work that all workers have submitted to each device process and is not done."""
        return list(map(sum, self._queued_work))

    @property
    def in_flight(self) -> int:
        """The number of requests that run a job, received at least in part, without a response."""
        return int(sum(self._in_flight))

    @property
    def device_memory_bytes(self) -> int:
        """The memory of all devices; processes on one device share its total."""
        names = [""] * self._workers + list(self.devices)
        totals = sorted(zip(names, self._rows["memory_total"].tolist(), strict=True))
        return int(sum(dict(totals).values()))  # 0 of a process that starts is not the last

    @property
    def pids(self) -> list[int]:
        """The ids of the supervisor and of all processes; that of a single process alone."""
        pids = {int(pid) for pid in self._rows["pid"]} - {0, self._creator_pid}
        return [self._creator_pid, *pids]

    @property
    def stuck_processes(self) -> list[int]:
        """The indices of the processes whose event loop or device is stuck."""
        # copies: the supervisor clears the row of a process that has ended, also between two looks
        heartbeat, busy = self._rows["heartbeat"].copy(), self._rows["busy_since"].copy()
        now = _now()
        is_stuck = (heartbeat > 0) & (now - heartbeat > self._stuck_s)
        is_stuck |= (busy > 0) & (now - busy > self._stuck_device_s)
        return [int(i) for i in np.flatnonzero(is_stuck)]


class WorkerState:
    """The row of one process.

    Attributes:
        shared_state: state of all processes.
        recorder: counts the requests and the jobs of this process.
    """

    def __init__(self, shared_state: SharedState, index: int) -> None:
        self.shared_state = shared_state
        self.recorder = Recorder(shared_state.counters, index)
        self._cells = {
            family.name: shared_state.counters.cells(index, family.name)
            for family in FAMILIES
            if family.kind == "gauge" and not family.labels
        }
        self._in_flight = self._cells["requests_in_progress"]

    async def run_heartbeat(self, memory: Callable[[], Iterable[int]] = tuple) -> None:
        """Records its process, heartbeats and the use of the device's memory, until it is
        cancelled."""
        self._cells["pid"][0] = os.getpid()
        while True:
            self.record_heartbeat()
            self.set_memory(memory())
            await asyncio.sleep(_HEARTBEAT_S)

    def record_heartbeat(self) -> None:
        """Records that the event loop runs."""
        self._cells["heartbeat"][0] = _now()

    def set_queue(self, load: tuple[int, int, int]) -> None:
        """Sets the size of the queue: jobs, bytes and operations."""
        self._cells["queue_depth"][0], self._cells["queue_bytes"][0], _ = load

    def set_memory(self, sizes: Iterable[int]) -> None:
        """Sets the bytes of the device's memory: allocated, reserved and in total."""
        for name, size in zip(("allocated", "reserved", "total"), sizes, strict=False):
            self._cells[f"memory_{name}"][0] = size

    def set_busy(self, is_busy: bool) -> None:
        """Records that the device starts or ends a batch."""
        self._cells["busy_since"][0] = _now() if is_busy else 0.0

    def idle_threads(self) -> int:
        """Returns the number of CPU threads that no other process needs now: the number of workers
        if at most one request is in flight, else 1."""
        return len(self.shared_state) if self.shared_state.in_flight <= 1 else 1

    def set_connection_count(self, count: int) -> None:
        """Sets the number of open connections."""
        self._cells["connections"][0] = count

    @property
    def has_less_loaded_peer(self) -> bool:
        """True if another worker that is ready has fewer connections."""
        rows, own = self.shared_state.worker_rows, self._cells["connections"][0]
        return bool(((rows["ready"] > 0) & (rows["connections"] < own)).any())

    def add_in_flight(self, count: int) -> None:
        """Adds to the number of requests in flight; a negative count subtracts."""
        self._in_flight[0] += count

    def set_ready(self, is_ready: bool) -> None:
        """Records whether this process accepts requests or jobs."""
        self._cells["ready"][0] = is_ready
        if is_ready:
            self._cells["was_ready"][0] = True
