"""`Lane`: waiting jobs of several tenants, which take turns; `JobQueue`: the jobs for one device.

The event loop runs small jobs from a lane. The device's thread has a queue, which has a lane for
each priority and for each batch key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from qkv.engine.admission import Admission
from qkv.jobs.job import PRIORITIES, Job
from qkv.jobs.tenant import Tenant

_PARTS: Final = 1 << 20  # of a unit of work, so that a large weight loses nothing


class VirtualTimes(dict[Tenant, int]):
    """The work of each tenant's jobs that have begun, divided by its weight.

    The tenant with the least time is next, so that work done is in proportion to weights. A tenant
    without waiting jobs earns nothing: when it brings one, its time is at least that of the job
    that began last. So a tenant waits for at most one job of each other tenant, however many these
    have.

    This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996, section 2) with one
    counter for each tenant instead of a tag for each job, as in Sheng et al., "Fairness in Serving
    Large Language Models" (OSDI 2024, section 4), so that jobs in a batch of another tenant count
    too.
    """

    _now = 0  # whole numbers: a float would lose the work of a small job once the times are large

    def join(self, tenant: Tenant) -> None:
        """Adds a tenant that has a job, and had none."""
        self[tenant] = max(self.get(tenant, 0), self._now)

    def begin(self, tenant: Tenant) -> None:
        """Sets the time to that of a tenant whose job, or whose batch, begins."""
        self._now = max(self._now, self[tenant])

    def charge(self, job: Job) -> None:
        """Adds the work of a job to its tenant's time."""
        self[job.tenant] += int(job.plan.load.work * _PARTS / job.tenant.weight)


class Lane(dict[Tenant, OrderedDict[Job, None]]):
    """The jobs of each tenant that has some, oldest first; for one thread at a time.

    Args:
        times: of the tenants.
    """

    def __init__(self, times: VirtualTimes) -> None:
        self._times = times

    def put(self, job: Job) -> None:
        """Adds a job, whose tenant has a time."""
        line = self.get(job.tenant)
        if line is None:
            line = self[job.tenant] = OrderedDict()
        line[job] = None

    def discard(self, job: Job) -> None:
        """Removes a job that is here."""
        line = self[job.tenant]
        del line[job]
        if not line:
            del self[job.tenant]

    def first(self) -> Job:
        """Returns the oldest job of the tenant that is next; of the one that came first if equal.
        There is at least one."""
        tenant = min(self, key=self._times.__getitem__)
        return next(iter(self[tenant]))

    def take_turn(self, count: int) -> list[Job]:
        """Removes and returns jobs: all of a lone tenant, or as many as `count` of several in
        turn; cancelled jobs cost nothing."""
        if len(self) == 1:
            ((_, line),) = self.items()
            self.clear()
            return [*line]
        jobs: list[Job] = []
        while self and len(jobs) < count:
            job = self.first()
            self.discard(job)
            if not job.is_cancelled:
                self._times.begin(job.tenant)
                self._times.charge(job)
            jobs.append(job)
        return jobs


class JobQueue:
    """The jobs that wait for one device, by priority; those with equal batch keys run together.

    It is not safe across threads: the engine holds a lock.

    Args:
        admission: has what the jobs hold.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._times = VirtualTimes()
        self._lanes = {priority: Lane(self._times) for priority in PRIORITIES}
        self._groups: dict[Hashable, Lane] = {}

    def __len__(self) -> int:
        return sum([len(line) for lane in self._lanes.values() for line in lane.values()])

    def put(self, job: Job) -> None:
        """Adds a job."""
        if job.tenant not in self._admission.jobs:
            self._times.join(job.tenant)
        self._lanes[job.priority].put(job)
        key = _group_key(job)
        if (group := self._groups.get(key)) is None:
            group = self._groups[key] = Lane(self._times)
        group.put(job)
        self._admission.take(job)

    def remove(self, job: Job) -> bool:
        """Removes a job; returns False if it is not here any more."""
        if job not in self._lanes[job.priority].get(job.tenant, ()):
            return False
        self._discard(job)
        return True

    def clear(self) -> list[Job]:
        """Removes and returns all jobs."""
        lines = [line for lane in self._lanes.values() for line in lane.values()]
        jobs = [job for line in lines for job in line]
        for job in jobs:
            self._discard(job)
        return jobs

    def find_next(self) -> Job | None:
        """Returns the job of the highest priority that is next; removes cancelled jobs before
        it."""
        for lane in self._lanes.values():
            while lane:
                job = lane.first()
                if not job.is_cancelled:
                    return job
                self._discard(job)
        return None

    def take_batch(self, max_jobs: int, max_bytes: int) -> list[Job]:
        """Removes and returns the next job and others with its batch key, of all tenants in turn.

        Args:
            max_jobs: limit of jobs, cancelled jobs not included.
            max_bytes: limit of the bytes of their tensors, beyond the first job.
        """
        if (first := self.find_next()) is None:
            return []
        self._times.begin(first.tenant)
        batch: list[Job] = []
        job, group, total = first, self._groups[_group_key(first)], 0
        while True:
            total += job.plan.bytes
            if batch and total > max_bytes:
                break
            self._discard(job)
            if job is first or not job.is_cancelled:
                self._times.charge(job)
                batch.append(job)
            if not group or len(batch) >= max_jobs:
                break
            job = group.first()
        return batch

    def _discard(self, job: Job) -> None:
        key = _group_key(job)
        for lane in (self._lanes[job.priority], self._groups[key]):
            lane.discard(job)
        if not self._groups[key]:
            del self._groups[key]
        self._admission.give_back(job)


def _group_key(job: Job) -> Hashable:
    """Jobs with equal keys may run together."""
    return job.priority, job.batch_key
