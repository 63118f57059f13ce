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

__all__ = ["Models", "Recorder"]

# Triton's names, in docs/protocol/extension_statistics.md; of each a count and nanoseconds
_DURATIONS: Final = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
_STAGES: Final = _DURATIONS[3:]
_PLAIN: Final = 4  # last_inference, inference_count, execution_count, and how many failed
_HEAD: Final = _PLAIN + len(_DURATIONS)
_PER_SIZE: Final = 1 + len(_STAGES)  # a count and nanoseconds, for one batch size


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
        self._counts = np.frombuffer(block, "i8", int(np.prod(shape))).reshape(shape)
        self._unloaded = np.frombuffer(block, "?", len(names), self._counts.nbytes)

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
        total = counts.sum(0).tolist()
        sizes = np.reshape(total[_HEAD:], (-1, _PER_SIZE)).tolist()
        return {
            "last_inference": int(counts[:, 0].max()),
            "inference_count": total[1],
            "execution_count": total[2],
            "inference_stats": {
                stage: {"count": total[3 if stage == "fail" else 1], "ns": ns}
                for stage, ns in zip(_DURATIONS, total[_PLAIN:_HEAD], strict=True)
            },
            "batch_stats": [
                {"batch_size": size}
                | {
                    stage: {"count": count, "ns": ns}
                    for stage, ns in zip(_STAGES, times, strict=True)
                }
                for size, (count, *times) in enumerate(sizes, start=1)
                if count
            ],
        }


class Recorder:
    """Counts what becomes of one worker's requests; safe across its threads."""

    def __init__(self, places: dict[str, int], counts: np.ndarray) -> None:
        self._rows = {name: memoryview(counts[place]) for name, place in places.items()}
        self._lock = threading.Lock()

    def ran(
        self, name: str, requests: Sequence[Sequence[float]], together: Sequence[float]
    ) -> None:
        """A batch ran.

        Args:
            name: the model's.
            requests: of each the seconds since it came, and of waiting, loading, computing and
                taking apart, of all that ran with it in one call.
            together: seconds of loading, computing and taking apart, of the whole batch.
        """
        row, at = self._rows[name], _HEAD + _PER_SIZE * (len(requests) - 1)
        with self._lock:
            row[0] = int(time.time() * 1e3)
            row[1] += len(requests)
            row[2] += 1
            for total, queue, load, compute, split in requests:
                row[_PLAIN] += int(total * 1e9)
                row[_PLAIN + 2] += int(queue * 1e9)
                row[_PLAIN + 3] += int(load * 1e9)
                row[_PLAIN + 4] += int(compute * 1e9)
                row[_PLAIN + 5] += int(split * 1e9)
            load, compute, split = together
            row[at] += 1
            row[at + 1] += int(load * 1e9)
            row[at + 2] += int(compute * 1e9)
            row[at + 3] += int(split * 1e9)

    def failed(self, name: str, total: float) -> None:
        """A request was queued and not answered: it failed, or its time was up.

        Args:
            name: the model's.
            total: seconds since it came.
        """
        row = self._rows[name]
        with self._lock:
            row[3] += 1
            row[_PLAIN + 1] += int(total * 1e9)
