"""The loaded flag and the statistics of each model, in shared memory.

The Open Inference Protocol calls a variant a model. Each worker writes its own counts, which
outlive it, and reads the sum of all.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from qkv.telemetry.metrics import float64_view

__all__ = ["ModelStats", "ModelStatsRecorder"]

# Triton's names (docs/protocol/extension_statistics.md); each has a count and nanoseconds
_STAGES: Final = ("compute_input", "compute_infer", "compute_output")
_SHARED: Final = 3  # index after last_inference, and the count and seconds of failures
_HEAD: Final = _SHARED + len(_STAGES)
_PER_SIZE: Final = 3 + len(
    _STAGES
)  # for each batch size: count, seconds of success, queue and stages


class ModelStats:
    """Loaded flags and statistics of all models; create it before the fork.

    Args:
        names: names of the models.
        workers: number of processes that count.
        max_batch_size: limit of requests in a batch.
    """

    def __init__(self, names: Sequence[str], workers: int, max_batch_size: int) -> None:
        self._indices = {name: index for index, name in enumerate(names)}
        shape = (workers, len(names), _HEAD + _PER_SIZE * max_batch_size)
        block = mmap.mmap(-1, 8 * int(np.prod(shape)) + len(names) + 1)
        self._counts = np.frombuffer(block, "f8", int(np.prod(shape))).reshape(shape)
        self._unloaded = memoryview(block)[self._counts.nbytes :].cast("?")

    def __contains__(self, name: str) -> bool:
        return name in self._indices

    @property
    def names(self) -> list[str]:
        """The names of all models, loaded or not."""
        return list(self._indices)

    def is_loaded(self, name: str) -> bool:
        """Returns True if the model is loaded."""
        return not self._unloaded[self._indices[name]]

    def load(self, name: str, *, loaded: bool = True) -> None:
        """Loads or unloads the model in all workers."""
        self._unloaded[self._indices[name]] = not loaded

    def recorder(self, worker: int) -> ModelStatsRecorder:
        """Returns the recorder of a worker."""
        return ModelStatsRecorder(self._indices, self._counts[worker])

    def statistics(self, name: str) -> dict[str, Any]:
        """Returns the model's statistics, summed over all workers, in the form of Triton's
        statistics extension: durations in nanoseconds, and the time of the last inference in
        milliseconds since 1970."""
        counts = self._counts[:, self._indices[name]]
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
                "success": _count_and_ns(inferences, success),
                "fail": _count_and_ns(*total[1:_SHARED].tolist()),
            }
            | {stage: _count_and_ns(inferences, seconds) for stage, seconds in times.items()},
            "batch_stats": [
                {"batch_size": size}
                | {stage: _count_and_ns(count, s) for stage, s in zip(_STAGES, each, strict=True)}
                for size, count, _, _, *each in batches
            ],
        }


class ModelStatsRecorder:
    """Records the jobs of one process; safe across its threads."""

    def __init__(self, indices: dict[str, int], counts: np.ndarray) -> None:
        self._rows = {name: float64_view(counts[index]) for name, index in indices.items()}
        self._lock = threading.Lock()

    def record_batch(
        self,
        name: str,
        size: int,
        total_s: float,
        queue_s: float,
        batch_s: Sequence[float],
        shared_s: Sequence[float] = (),
    ) -> None:
        """Records a batch.

        Args:
            name: name of the model.
            size: number of requests.
            total_s: seconds since their submission, summed over all.
            queue_s: seconds in the queue, summed over all.
            batch_s: seconds of loading, computing and splitting, of the whole batch.
            shared_s: seconds to add to `batch_s` for the sum over requests, if each request counts
                the shared seconds as its own; empty: none.
        """
        row, at = self._rows[name], _HEAD + _PER_SIZE * (size - 1)
        load_s, compute_s, split_s = batch_s
        with self._lock:
            row[0] = time.time() * 1e3
            row[at] += 1
            row[at + 1] += total_s
            row[at + 2] += queue_s
            row[at + 3] += load_s
            row[at + 4] += compute_s
            row[at + 5] += split_s
            for index, seconds in enumerate(shared_s, start=_SHARED):
                row[index] += seconds

    def record_failure(self, name: str, total_s: float) -> None:
        """Records a queued request that failed or expired.

        Args:
            name: name of the model.
            total_s: seconds since its submission.
        """
        row = self._rows[name]
        with self._lock:
            row[1] += 1
            row[2] += total_s


def _count_and_ns(count: float, seconds: float) -> dict[str, int]:
    return {"count": int(count), "ns": round(seconds * 1e9)}
