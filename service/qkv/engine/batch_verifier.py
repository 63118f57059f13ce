"""Checks on the device itself that requests have the same bits alone and in a stacked batch.

A GPU's libraries choose kernels by the size of a batch, so that the bits may depend on it. No test
can know this of every device: the engine compares while it serves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from qkv.jobs.job import Job
from qkv.jobs.plan_cache import BoundedCache, plain_bytes
from qkv.jobs.result import Result

_log = logging.getLogger("qkv.engine")

VerifyMode = Literal["off", "sample", "always"]
"""Which stacked batches are checked: none; the first of each kind, and later ones now and then;
all."""

_EVERY: Final = 1024  # in the mode "sample", the first batch of a kind and every so many later ones
_MAX_BYTES: Final = 32 << 20  # of the kinds of batches that are known, the most recent ones
_KIND_BYTES: Final = 1 << 10  # of a kind beside its key


@dataclass(slots=True)
class _Kind:
    """The number of batches of a kind, and True if one had other bits."""

    count: int = 0
    is_different: bool = False


class BatchVerifier:
    """A check of stacked calls: first, middle and last job are compared with themselves alone.

    Batches of one kind have equal `Plan.batch_key`, number of items, and sizes of jobs. A kind with
    other bits is not stacked again, as long as it is among the most recent ones.

    Args:
        mode: which batches are checked.
        on_check: called with True if a check found the same bits, else with False.
    """

    def __init__(
        self, mode: VerifyMode = "sample", on_check: Callable[[bool], None] = lambda _: None
    ) -> None:
        self._mode, self._on_check = mode, on_check
        self._kinds: BoundedCache[_Kind] = BoundedCache(_MAX_BYTES)
        self._has_different = False

    def may_stack(self, jobs: Sequence[Job]) -> bool:
        """Returns True if jobs with equal batch keys may run as one call."""
        if not self._has_different or len(jobs) == 1:
            return True
        return not self._find(jobs).is_different

    def has_same_bits(
        self,
        jobs: Sequence[Job],
        outputs: Sequence[Result],
        run_alone: Callable[[Job], Result],
    ) -> bool:
        """Returns False if a check is due, and a job alone has other bits than in the batch.

        Args:
            jobs: the batch.
            outputs: of each job.
            run_alone: runs a job.
        """
        stacked = [i for i, output in enumerate(outputs) if output.call_size > 1]
        if self._mode == "off" or not stacked:
            return True
        kind = self._find(jobs)
        kind.count += 1
        if self._mode == "sample" and kind.count % _EVERY != 1:
            return True
        # kernels treat the jobs at the edges of a batch differently from those in the middle
        places = {stacked[0], stacked[len(stacked) // 2], stacked[-1]}
        is_same = all(_bits(run_alone(jobs[i])) == _bits(outputs[i]) for i in sorted(places))
        self._on_check(is_same)
        if not is_same:
            kind.is_different = self._has_different = True
            _log.warning(
                "%s has other bits in a batch of %d requests than alone: "
                "batches of this kind are not stacked again",
                jobs[0].plan.variant.name,
                len(jobs),
            )
        return is_same

    def _find(self, jobs: Sequence[Job]) -> _Kind:
        """Returns the kind of a batch; forgets the least recently used one."""
        plan, sizes = jobs[0].plan, [job.plan.batch_size for job in jobs]
        key = plan.batch_key, sum(sizes), tuple(sorted(set(sizes)))
        if (kind := self._kinds.get(key)) is None:
            kind = _Kind()
            self._kinds.put(
                key, kind, _KIND_BYTES + plain_bytes((plan.batch_key.parts, key, plan.arguments))
            )
        return kind


def _bits(output: Result) -> Mapping[str, bytes]:
    return {name: bytes(raw.data) for name, raw in output.outputs.items()}
