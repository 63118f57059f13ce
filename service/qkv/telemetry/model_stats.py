"""The loaded flag and the statistics of each model, in shared memory.

The Open Inference Protocol calls a variant a model, and a loaded layer another one. Each worker
writes its own counts, which outlive it, and reads the sum of all.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from qkv.telemetry.metrics import float64_view
from qkv.telemetry.times import Times

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
        variants: their names.
        workers: number of processes that count.
        max_batch_size: limit of requests in a batch.
        layers: names of the loaded layers. A run of one counts for its variant too.
    """

    def __init__(
        self,
        variants: Sequence[str],
        workers: int,
        max_batch_size: int,
        layers: Sequence[str] = (),
    ) -> None:
        names, self._variant_count = (*variants, *layers), len(variants)
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
        """Returns True if the model exists and is loaded."""
        index = self._indices.get(name)
        return index is not None and not self._unloaded[index]

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
        stage_times = np.add(stages, total[_SHARED:_HEAD]).tolist()
        times = dict(zip(("queue", *_STAGES), (queue, *stage_times), strict=True))
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

    def process_totals(self, process: int) -> tuple[int, float]:
        """Returns the number of inferences of a process, and their seconds of computation, each
        batch counted once."""
        variants = self._counts[process, : self._variant_count, _HEAD:]
        sizes = variants.reshape(self._variant_count, -1, _PER_SIZE).sum(0)
        counts, seconds = sizes[:, 0], sizes[:, 3 + _STAGES.index("compute_infer")]
        return int(counts @ np.arange(1, len(counts) + 1)), float(seconds.sum())


class ModelStatsRecorder:
    """A record of the jobs of one process; safe across its threads."""

    def __init__(self, indices: dict[str, int], counts: np.ndarray) -> None:
        self._rows = {name: float64_view(counts[index]) for name, index in indices.items()}
        self._lock = threading.Lock()

    def record_batch(self, name: str, requests: Sequence[Times]) -> None:
        """Records a batch.

        Args:
            name: name of the model.
            requests: the times of each request.
        """
        row, first = self._rows[name], _HEAD + _PER_SIZE * (len(requests) - 1)
        with self._lock:
            row[0] = time.time() * 1e3
            row[first] += 1
            for times in requests:
                row[first + 1] += times.total_s
                row[first + 2] += times.queue_s
                count = times.stacked_count
                row[first + 3] += times.load_s / count
                row[first + 4] += times.compute_s / count
                row[first + 5] += times.split_s / count
                if count > 1:  # each request counts the shared seconds in full
                    row[_SHARED] += times.load_s - times.load_s / count
                    row[_SHARED + 1] += times.compute_s - times.compute_s / count
                    row[_SHARED + 2] += times.split_s - times.split_s / count

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
