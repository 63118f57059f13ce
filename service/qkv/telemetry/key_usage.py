"""The requests and the computation of each API key, in shared memory."""

from __future__ import annotations

import mmap
from typing import Final, NamedTuple

import numpy as np

__all__ = ["KeyUsage", "KeyUsageRecorder", "Used"]

_MAX_KEYS: Final = 4096  # names that one process counts; that of a removed key keeps its place
_ROW: Final = np.dtype([("name", "S64"), ("used", "f8", 3)])


class Used(NamedTuple):
    """The use of the service by one key.

    Attributes:
        requests: its requests.
        rejected: those that were rejected, because the key had its share of the queue.
        compute_s: seconds of computation, its part of those of a batch.
    """

    requests: float
    rejected: float
    compute_s: float


class KeyUsage:
    """The counts of all processes, by the names of keys; create it before the fork.

    Keys may be added while the service runs, so that each process writes the names that it has
    seen beside its counts. Counts outlive their process.

    Args:
        processes: number of processes that count.
    """

    def __init__(self, processes: int) -> None:
        block = mmap.mmap(-1, _ROW.itemsize * processes * _MAX_KEYS)
        self._rows = np.frombuffer(block, _ROW).reshape(processes, _MAX_KEYS)

    def recorder(self, process: int) -> KeyUsageRecorder:
        """Returns the recorder of a process."""
        return KeyUsageRecorder(self._rows[process])

    @property
    def totals(self) -> dict[str, Used]:
        """The use of the service by each key, by its name."""
        totals: dict[str, np.ndarray] = {}
        for row in self._rows[self._rows["name"] != b""]:
            name = row["name"].decode()
            totals[name] = totals.get(name, 0.0) + row["used"]
        return {name: Used(*totals[name].tolist()) for name in sorted(totals)}


class KeyUsageRecorder:
    """A count of the requests of one process by key; only its event loop may call it."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows
        names = rows["name"].tolist()
        self._places = {name.decode(): place for place, name in enumerate(names) if name}

    def add(self, name: str) -> int | None:
        """Adds a name with counts of zero; returns its place, None if there is none left."""
        place = self._places.get(name)
        if place is None and len(self._places) < _MAX_KEYS:
            place = self._places[name] = len(self._places)
            self._rows["name"][place] = name.encode()
        return place

    def record(self, name: str, *, is_rejected: bool, compute_s: float) -> None:
        """Counts a request of the key with this name."""
        if (place := self.add(name)) is not None:
            self._rows["used"][place] += (1, is_rejected, compute_s)
