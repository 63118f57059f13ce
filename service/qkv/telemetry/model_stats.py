"""What all worker processes know of each model together: whether it is loaded, its statistics.

A model is what the Open Inference Protocol calls a variant. Each worker writes its own counts,
which outlive it, and reads the sum of all.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from qkv.telemetry.metrics import numbers

__all__ = ["Models", "Recorder"]

# Triton's names, in docs/protocol/extension_statistics.md; of each a count and nanoseconds
_STAGES: Final = ("compute_input", "compute_infer", "compute_output")
_SHARED: Final = 3  # behind last_inference, and of what failed how many and seconds
_HEAD: Final = _SHARED + len(_STAGES)
_PER_SIZE: Final = 3 + len(_STAGES)  # of batches of one size: how many, success and queue, stages


class Models:
    """The models there are, in memory that is shared with forks.

    Args:
        names: of the models.
        workers: how many processes count.
        most: the largest batch size.
    """

    def __init__(self, names: Sequence[str], workers: int, most: int) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        shape = (workers, len(names), _HEAD + _PER_SIZE * most)
        block = mmap.mmap(-1, 8 * int(np.prod(shape)) + len(names) + 1)
        self._counts = np.frombuffer(block, "f8", int(np.prod(shape))).reshape(shape)
        self._unloaded = memoryview(block)[self._counts.nbytes :].cast("?")

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def names(self) -> list[str]:
        """Every model, loaded or not."""
        return list(self._places)

    def is_loaded(self, name: str) -> bool:
        """Whether the model answers."""
        return not self._unloaded[self._places[name]]

    def load(self, name: str, *, loaded: bool = True) -> None:
        """Has the model answer from now on, or not, in every worker."""
        self._unloaded[self._places[name]] = not loaded

    def recorder(self, worker: int) -> Recorder:
        """What a worker counts with."""
        return Recorder(self._places, self._counts[worker])

    def statistics(self, name: str) -> dict[str, Any]:
        """The model's statistics, summed over all workers, as Triton's statistics extension has
        them: times in nanoseconds, and in milliseconds since 1970 that of the last inference."""
        counts = self._counts[:, self._places[name]]
        total = counts.sum(0)
        sizes = total[_HEAD:].reshape(-1, _PER_SIZE)
        batches = [(size, *row) for size, row in enumerate(sizes.tolist(), start=1) if row[0]]
        inferences = sum(size * int(row[0]) for size, *row in batches)
        success, queue, *stages = sizes[:, 1:].sum(0).tolist()
        own = np.add(stages, total[_SHARED:_HEAD]).tolist()
        times = dict(zip(("queue", *_STAGES), (queue, *own), strict=True))
        return {
            "last_inference": int(counts[:, 0].max()),
            "inference_count": inferences,
            "execution_count": sum(int(count) for _, count, *_ in batches),
            "inference_stats": {
                "success": _lasted(inferences, success),
                "fail": _lasted(*total[1:_SHARED].tolist()),
            }
            | {stage: _lasted(inferences, seconds) for stage, seconds in times.items()},
            "batch_stats": [
                {"batch_size": size}
                | {stage: _lasted(count, s) for stage, s in zip(_STAGES, each, strict=True)}
                for size, count, _, _, *each in batches
            ],
        }


class Recorder:
    """Counts what becomes of one worker's requests; safe across its threads."""

    def __init__(self, places: dict[str, int], counts: np.ndarray) -> None:
        self._rows = {name: numbers(counts[place]) for name, place in places.items()}
        self._lock = threading.Lock()

    def ran(
        self,
        name: str,
        size: int,
        total: float,
        queue: float,
        together: Sequence[float],
        shared: Sequence[float] = (),
    ) -> None:
        """A batch ran.

        Args:
            name: the model's.
            size: how many requests it was.
            total: seconds since they came, of all.
            queue: seconds that they waited, of all.
            together: seconds of loading, computing and taking apart, of the whole batch.
            shared: what these come to beyond that, if each request counts what it shared with
                others for itself; none: nothing.
        """
        row, at = self._rows[name], _HEAD + _PER_SIZE * (size - 1)
        load, compute, split = together
        with self._lock:
            row[0] = time.time() * 1e3
            row[at] += 1
            row[at + 1] += total
            row[at + 2] += queue
            row[at + 3] += load
            row[at + 4] += compute
            row[at + 5] += split
            for place, seconds in enumerate(shared, start=_SHARED):
                row[place] += seconds

    def failed(self, name: str, total: float) -> None:
        """A request was queued and not answered: it failed, or its time was up.

        Args:
            name: the model's.
            total: seconds since it came.
        """
        row = self._rows[name]
        with self._lock:
            row[1] += 1
            row[2] += total


def _lasted(count: float, seconds: float) -> dict[str, int]:
    return {"count": int(count), "ns": round(seconds * 1e9)}
