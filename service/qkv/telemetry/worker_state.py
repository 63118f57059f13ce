"""What is one over all processes of the service: a small block of memory that they share.

Each process writes its own row and reads all; the parent reads all and says when to drain. A single
process is a fleet of one.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from qkv.telemetry.metrics import Meter, Metrics, Usage
from qkv.telemetry.model_stats import Models, Recorder

__all__ = ["Fleet", "Worker"]

_ROW: Final = np.dtype(
    [
        ("beat", "f8"),  # when its event loop last turned; 0: not started
        ("busy", "f8"),  # since when its device runs one batch; 0: idle
        ("asked", "i8"),  # requests to run something that are not answered yet
        ("connections", "i8"),  # that it has accepted and that are open
        ("ready", "?"),  # whether it takes requests
        ("polls", "?"),  # whether it stays awake for its only caller
        ("load", [(name, "i8") for name in Usage._fields]),  # as last said, with each beat
    ],
    align=True,
)
_PULSE_S: Final = 0.25
# CLOCK_MONOTONIC is one clock for every process of a machine
_now = time.monotonic


class Fleet:
    """The shared block of so many workers, made before they are forked.

    Args:
        workers: how many.
        stuck_s: seconds after which a silent event loop counts as stuck.
        stuck_device_s: seconds after which a device that runs one batch counts as stuck.
        models: the names of what they all serve.
        most_together: the most requests that may run as one batch.
        device_process: whether one process more runs what the workers are asked for. It has the
            last row.

    Attributes:
        models: what is known of each of them.
        metrics: what all processes have counted.
    """

    def __init__(
        self,
        workers: int,
        stuck_s: float = 30.0,
        stuck_device_s: float = 600.0,
        models: Sequence[str] = (),
        most_together: int = 1,
        device_process: bool = False,
    ) -> None:
        self._stuck_s, self._stuck_device_s = stuck_s, stuck_device_s
        self._workers, rows = workers, workers + device_process
        self.models = Models(models, rows, most_together)
        self.metrics = Metrics(models, rows)
        block = mmap.mmap(-1, _ROW.itemsize * rows + 1)  # anonymous, shared with forks
        self._rows = np.frombuffer(block, _ROW, rows)
        # asked for with each request, as the counts of `Worker` are: quicker to read than an array
        self._draining = memoryview(block)[_ROW.itemsize * rows :].cast("?")

    def __len__(self) -> int:
        """How many workers there are."""
        return self._workers

    @property
    def processes(self) -> range:
        """The indices of all that have a row, the device process last."""
        return range(len(self._rows))

    def has_ended(self, index: int) -> None:
        """Forgets what a process that is no more has said of itself."""
        self._rows[index] = np.zeros((), _ROW)

    def worker(self, index: int) -> Worker:
        """A process's own row, as fresh as when nothing ran in it."""
        self.has_ended(index)
        row, meter = self._rows[index : index + 1], self.metrics.meter(index)
        return Worker(self, row, self.models.recorder(index), meter)

    @property
    def draining(self) -> bool:
        """Whether new work is refused, because the service ends."""
        return self._draining[0]

    def drain(self) -> None:
        """Refuses new work from now on."""
        self._draining[0] = True

    @property
    def ready(self) -> bool:
        """Whether every worker takes requests, and the device process jobs."""
        return bool(self._rows["ready"].all()) and not self.draining

    @property
    def rows(self) -> np.ndarray:
        """What each worker says of itself."""
        return self._rows[: self._workers]

    @property
    def asked(self) -> int:
        """Requests to run something that are not answered yet, be it that their bodies come in."""
        return int(self._rows["asked"].sum())

    @property
    def usage(self) -> Usage:
        """What waits for devices, and what all processes have of their memory."""
        loads = self._rows["load"]
        totals = [int(loads[name].sum()) for name in Usage._fields]
        return Usage(*totals)._replace(memory=int(loads["memory"].max()))

    @property
    def stuck(self) -> list[int]:
        """The processes whose event loop or device has been silent for too long."""
        now, beat, busy = _now(), self._rows["beat"], self._rows["busy"]
        silent = (beat > 0) & (now - beat > self._stuck_s)
        silent |= (busy > 0) & (now - busy > self._stuck_device_s)
        return [int(i) for i in np.flatnonzero(silent)]


class Worker:
    """One worker's row in its fleet.

    Attributes:
        fleet: all of them.
        recorder: counts what becomes of this worker's jobs.
        meter: counts its requests.
    """

    def __init__(self, fleet: Fleet, row: np.ndarray, recorder: Recorder, meter: Meter) -> None:
        self.fleet = fleet
        self.recorder, self.meter = recorder, meter
        self._row = row
        self._busy, self._asked = row["busy"], row["asked"].data  # views, quick to assign

    async def pulse(self, load: Callable[[], Usage] = Usage) -> None:
        """Shows that the event loop turns, for ever, and what its device has to do."""
        while True:
            self.beat()
            self.loads(load())
            await asyncio.sleep(_PULSE_S)

    def beat(self) -> None:
        """Says that the event loop turns."""
        self._row["beat"] = _now()

    def loads(self, usage: Usage) -> None:
        """Says what its device has to do."""
        self._row["load"] = usage

    def busy(self, is_busy: bool) -> None:
        """Says that the device starts a batch, or is done with it."""
        self._busy[0] = _now() if is_busy else 0.0

    def spare(self) -> int:
        """How many CPU threads nobody else wants now: as many as there are workers, where no more
        than one request is there."""
        return len(self.fleet) if self.fleet.asked <= 1 else 1

    def connections(self, count: int) -> None:
        """Says how many it has."""
        self._row["connections"] = count

    @property
    def has_more_than_others(self) -> bool:
        """Whether one that takes requests too has fewer connections."""
        rows = self.fleet.rows
        return bool((rows["ready"] & (rows["connections"] < self._row["connections"])).any())

    def asks(self, count: int) -> None:
        """Says that so many requests more have come, or fewer are left."""
        self._asked[0] += count

    def polls(self, is_polling: bool) -> None:
        """Says whether it stays awake where it could sleep."""
        self._row["polls"] = is_polling

    @property
    def is_only(self) -> bool:
        """Whether no other worker is asked anything, or stays awake."""
        rows = self.fleet.rows
        others = int(rows["asked"].sum()) - self._asked[0] + int(rows["polls"].sum())
        return others == int(self._row["polls"][0])

    def ready(self, is_ready: bool) -> None:
        """Says whether requests are taken."""
        self._row["ready"] = is_ready
