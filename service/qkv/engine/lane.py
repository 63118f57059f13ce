"""`Lane`: the jobs that wait for one resource, in the order in which they run.

The engine has one for the device's thread, and one for the event loop, which runs small jobs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from qkv.engine.admission import Admission
from qkv.jobs.job import PRIORITIES, Job
from qkv.jobs.tenant import Tenant

__all__ = ["Lane"]

_PARTS: Final = 1 << 20  # of a unit of work, so that a large weight loses nothing

_Lines = dict[Tenant, OrderedDict[Job, None]]
"""The jobs of each tenant that has some, oldest first."""


class Lane:
    """Waiting jobs, grouped by batch key; those of one tenant run oldest first, in each priority.

    Work done is in proportion to the weights of tenants. Each has a virtual time: the work of its
    jobs that have begun, divided by its weight. The tenant with the least is next. A tenant without
    waiting jobs earns nothing: when it brings one, its time is at least that of the job that began
    last. So a tenant waits for at most one job of each other tenant, however many these have.

    This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996, section 2) with one
    counter for each tenant instead of a tag for each job, as in Sheng et al., "Fairness in Serving
    Large Language Models" (OSDI 2024, section 4), so that jobs in a batch of another tenant count
    too.

    It is not safe across threads: the engine holds a lock where several use one.

    Args:
        admission: has what the jobs hold; None: they hold nothing, and run one by one.
    """

    def __init__(self, admission: Admission | None = None) -> None:
        self._admission = admission
        self._lines: dict[int, _Lines] = {priority: {} for priority in PRIORITIES}
        self._groups: dict[Hashable, _Lines] = {}
        # whole numbers: a float would lose the work of a small job once the times are large
        self._times: dict[Tenant, int] = {}
        self._now = 0

    def __len__(self) -> int:
        return sum([len(line) for lines in self._lines.values() for line in lines.values()])

    @property
    def line_count(self) -> int:
        """Number of tenants that wait, in all priorities."""
        return sum([len(lines) for lines in self._lines.values()])

    def put(self, job: Job) -> None:
        """Adds a job."""
        tenant = job.tenant
        if not any(tenant in lines for lines in self._lines.values()):
            self._times[tenant] = max(self._times.get(tenant, 0), self._now)
        for lines in self._lines_of(job):
            if (line := lines.get(tenant)) is None:
                line = lines[tenant] = OrderedDict()
            line[job] = None
        if self._admission is not None:
            self._admission.take(job)

    def remove(self, job: Job) -> bool:
        """Removes a job; returns False if it is not here any more."""
        if job not in self._lines[job.priority].get(job.tenant, ()):
            return False
        self._discard(job)
        return True

    def clear(self) -> list[Job]:
        """Removes and returns all jobs."""
        lines = [line for lines in self._lines.values() for line in lines.values()]
        jobs = [job for line in lines for job in line]
        for job in jobs:
            self._discard(job)
        return jobs

    def find_next(self) -> Job | None:
        """Returns the job of the highest priority that is next; removes cancelled jobs before
        it."""
        for lines in self._lines.values():
            while lines:
                job = self._first(lines)
                if not job.is_cancelled:
                    return job
                self._discard(job)
        return None

    def take(self, max_jobs: int = 1, max_bytes: int = 0) -> list[Job]:
        """Removes and returns the next job and others with its batch key, of all tenants in turn.

        Args:
            max_jobs: limit of jobs, cancelled jobs not included.
            max_bytes: limit of the bytes of their tensors, beyond the first job.
        """
        if (first := self.find_next()) is None:
            return []
        self._now = max(self._now, self._times[first.tenant])
        batch, total = [first], first.plan.bytes
        self._begin(first)
        group = self._groups.get(_key(first), {}) if max_jobs > 1 else {}
        while group and len(batch) < max_jobs:
            job = self._first(group)
            if job.is_cancelled:
                self._discard(job)
                continue
            total += job.plan.bytes
            if total > max_bytes:
                break
            self._begin(job)
            batch.append(job)
        return batch

    def _first(self, lines: _Lines) -> Job:
        """Returns the oldest job of the tenant that is next; the one that came first if equal."""
        tenant = min(lines, key=self._times.__getitem__)
        return next(iter(lines[tenant]))

    def _begin(self, job: Job) -> None:
        """Removes a job that runs now, and charges its tenant."""
        self._discard(job)
        self._times[job.tenant] += int(job.plan.load.work * _PARTS / job.tenant.weight)

    def _lines_of(self, job: Job) -> list[_Lines]:
        """Returns the lines of its priority, and those of its batch key."""
        lines = [self._lines[job.priority]]
        if self._admission is not None:
            lines.append(self._groups.setdefault(_key(job), {}))
        return lines

    def _discard(self, job: Job) -> None:
        for lines in self._lines_of(job):
            line = lines[job.tenant]
            del line[job]
            if not line:
                del lines[job.tenant]
        if self._admission is not None:
            if not self._groups[_key(job)]:
                del self._groups[_key(job)]
            self._admission.give_back(job)


def _key(job: Job) -> Hashable:
    """Jobs with equal keys may run together."""
    return job.priority, job.batch_key
