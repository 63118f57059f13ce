"""Checks on the device itself that a request has the same bits alone and in a stacked batch.

A GPU's libraries choose kernels by the size of a batch, so that the bits may depend on it. No test
can know this of every device: the engine compares while it serves.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final, Literal

from qkv.engine.executor import JobOutput
from qkv.jobs.job import Job

__all__ = ["BatchVerifier", "VerifyMode"]

_log = logging.getLogger("qkv.engine")

VerifyMode = Literal["off", "sample", "always"]
"""Which stacked batches are checked: none; the first of each kind, and later ones now and then;
all."""

_EVERY: Final = 1024  # in the mode "sample", the first batch of a kind and every so many later ones
_MAX_KINDS: Final = 4096  # kinds of batches whose counts are kept, the most recent ones


class BatchVerifier:
    """Compares stacked batches with one of their jobs that runs alone, bit for bit.

    A kind of batch is a `Job.kind` and the number of items. A kind with other bits is not stacked
    again.

    Args:
        mode: which batches are checked.
        on_check: called with True if a check found the same bits, else with False.
    """

    def __init__(
        self, mode: VerifyMode = "sample", on_check: Callable[[bool], None] = lambda _: None
    ) -> None:
        self._mode, self._on_check = mode, on_check
        self._counts: OrderedDict[Hashable, int] = OrderedDict()
        self._different: set[Hashable] = set()

    def may_stack(self, jobs: Sequence[Job]) -> bool:
        """Returns True if jobs with equal batch keys may run as one call."""
        return not self._different or len(jobs) == 1 or _kind(jobs) not in self._different

    def has_same_bits(
        self,
        jobs: Sequence[Job],
        outputs: Sequence[JobOutput],
        run_alone: Callable[[Job], JobOutput],
    ) -> bool:
        """Returns False if a check is due, and a job alone has other bits than in the batch.

        Args:
            jobs: the batch.
            outputs: of each job.
            run_alone: runs a job.
        """
        stacked = [i for i, output in enumerate(outputs) if output.stacked_count > 1]
        if self._mode == "off" or not stacked:
            return True
        kind = _kind(jobs)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        self._counts.move_to_end(kind)
        if len(self._counts) > _MAX_KINDS:
            self._counts.popitem(last=False)
        if self._mode == "sample" and count % _EVERY != 1:
            return True
        place = stacked[count % len(stacked)]
        alone = run_alone(jobs[place])
        is_same = _bits(alone) == _bits(outputs[place])
        self._on_check(is_same)
        if not is_same:
            self._different.add(kind)
            _log.warning(
                "%s has other bits in a batch of %d requests than alone: "
                "batches of this kind are not stacked again",
                jobs[0].variant.name,
                len(jobs),
            )
        return is_same


def _kind(jobs: Sequence[Job]) -> Hashable:
    return jobs[0].kind, sum(job.batch_size for job in jobs)


def _bits(output: JobOutput) -> Mapping[str, bytes]:
    return {name: bytes(raw.data) for name, raw in output.outputs.items()}
