"""The worker's connection to one device process, and the jobs that it has there.

`WorkerLink` is the other end.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import orjson

from qkv.engine.load import Load
from qkv.engine.remote.channel import Channel
from qkv.engine.remote.messages import (
    JobRequest,
    MessageType,
    pack_id,
    unpack_id,
    unpack_results,
)
from qkv.engine.remote.shared_memory import Block
from qkv.engine.result import Result
from qkv.engine.tenant import Tenant
from qkv.errors import QkvError, ServiceUnavailable, from_problem
from qkv.jobs.job import Job

__all__ = ["DeviceLink", "LinkOwner", "SubmittedJob"]


@dataclass(slots=True, eq=False)
class SubmittedJob:
    """A job on its way to a device process, or there.

    Attributes:
        id: the worker's number for it.
        job: the job.
        future: receives its result.
        link: the connection to its device process.
        inputs, outputs: memory for its tensors, which any device process can use.
        tenant, priority: as `Engine.submit` takes them.
        enqueued_at: time of submission, by `time.perf_counter`.
        deadline: time at which it expires, by the same clock.
        load: the work of the job.
        is_sent: the device process of `link` has its request, or gets it in this turn.
        is_second_attempt: another device process had it, and did not complete it.
    """

    id: int
    job: Job
    future: asyncio.Future[Result]
    link: DeviceLink
    inputs: Block
    outputs: Block
    tenant: Tenant
    priority: int
    enqueued_at: float
    deadline: float
    load: Load
    is_sent: bool = False
    is_second_attempt: bool = False


@dataclass(frozen=True)
class LinkOwner:
    """The functions that a `DeviceLink` calls.

    Attributes:
        on_change: called when its device process starts or stops to accept jobs.
        on_results: called with the work of a frame of results, and the earliest submission.
        on_not_run: called with jobs that its device process does not run, and the error.
    """

    on_change: Callable[[], None]
    on_results: Callable[[Load, float], None]
    on_not_run: Callable[[Sequence[SubmittedJob], QkvError], None]


class DeviceLink:
    """A link to one device process: the jobs of one turn of the event loop go in one frame.

    Args:
        number: number of the device process.
        device_name: name of its device, until it sends its own.
        set_work: publishes the work of `jobs`, in floating-point operations.
        owner: the functions that this link calls.

    Attributes:
        number, device_name: as the arguments.
        jobs: the jobs without a result, by id. A cancelled job is in it until the device process no
            longer reads its inputs.
        is_ready: the device process accepts jobs.
        was_ready: a device process has accepted jobs of this worker.
    """

    def __init__(
        self,
        number: int,
        device_name: str,
        set_work: Callable[[float], None],
        owner: LinkOwner,
    ) -> None:
        self.number, self.device_name = number, device_name
        self.jobs: dict[int, SubmittedJob] = {}
        self.is_ready = self.was_ready = False
        self._set_work, self._owner = set_work, owner
        self._work = 0
        self._requests: list[bytes] = []  # packed, not sent yet
        self._channel: Channel | None = None

    def connect(self, end: socket.socket) -> None:
        """Connects a device process that has started."""
        if self._channel is not None:  # the loss of the previous one may not be seen yet
            self._channel.close()
            self._on_connection_lost(self._channel)
        channel = self._channel = Channel(
            self._on_message, lambda: self._on_connection_lost(channel)
        )
        # keep a reference: a task without one may be collected
        self._opening = asyncio.get_running_loop().create_task(channel.open(end))

    def close(self) -> None:
        """Closes the connection once all frames are sent."""
        if self._channel is not None:
            self._channel.close()

    def add(self, submitted: SubmittedJob) -> None:
        """Counts a job as work of this device."""
        self.jobs[submitted.id] = submitted
        self._add_work(submitted.load.work)

    def remove(self, id: int) -> SubmittedJob:
        """Stops to count a job; returns it."""
        submitted = self.jobs.pop(id)
        self._add_work(-submitted.load.work)
        return submitted

    def _add_work(self, work: int) -> None:
        self._work += work
        self._set_work(self._work)

    def send(self, submitted: SubmittedJob) -> None:
        """Sends a job at the end of this turn of the event loop, with the others of this turn; at
        once if no other is on the way."""
        request = JobRequest(
            submitted.id,
            submitted.inputs.offset,
            submitted.outputs.offset,
            max(0, min(submitted.priority, 255)),
            submitted.enqueued_at,
            submitted.deadline,
            submitted.tenant,
            submitted.job.plan.encoded,
        )
        submitted.is_sent = True
        self._requests.append(request.pack())
        if len(self.jobs) == 1:
            self._flush()
        elif len(self._requests) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def cancel(self, submitted: SubmittedJob) -> None:
        """Sends CANCEL. The job's memory stays allocated: only the device process knows when it no
        longer reads the inputs."""
        if self._channel is not None and submitted.is_sent and submitted.id in self.jobs:
            self._flush()
            self._channel.send(MessageType.CANCEL, pack_id(submitted.id))

    def _flush(self) -> None:
        """Sends the jobs that are not sent yet in one frame."""
        if self._requests and self._channel is not None:
            self._channel.send(MessageType.RUN, b"".join(self._requests))
            self._requests.clear()

    def _on_message(self, kind: MessageType, payload: bytes) -> None:
        """Handles a frame of the device process."""
        if kind == MessageType.READY:
            self.device_name = payload.decode()
            self.is_ready = self.was_ready = True
            self._owner.on_change()
        elif kind == MessageType.RESULTS:
            self._on_results(payload)
        elif kind == MessageType.ERROR:
            self._on_error(payload)
        else:
            self.remove(unpack_id(payload)[0])

    def _on_results(self, payload: bytes) -> None:
        """Resolves the futures of jobs whose outputs are in shared memory."""
        done, started_at = Load(), math.inf
        for id, result in unpack_results(payload, self.device_name):
            submitted = self.remove(id)
            done = done.plus(submitted.load)
            started_at = min(started_at, submitted.enqueued_at)
            if not submitted.future.done():  # else it was cancelled
                layout = submitted.job.plan.output_layout
                result.outputs = layout.read(submitted.outputs.bytes.data)
                submitted.future.set_result(result)
        self._owner.on_results(done, started_at)

    def _on_error(self, payload: bytes) -> None:
        """Fails a job, unless another device process may run it."""
        id, text = unpack_id(payload)
        submitted = self.remove(id)
        status, problem, retry_after, is_stopped = orjson.loads(text)
        error = from_problem(status, problem, retry_after)
        if is_stopped:
            if self.is_ready:  # its queue is empty now: it would get all new jobs
                self.is_ready = False
                self._owner.on_change()
            self._owner.on_not_run([submitted], error)
        elif not submitted.future.done():  # else it was cancelled
            submitted.future.set_exception(error)

    def _on_connection_lost(self, channel: Channel) -> None:
        """Gives all jobs back: the device process has ended."""
        if channel is not self._channel:
            return
        self._channel = None
        self.is_ready = False
        self._requests.clear()
        jobs = list(self.jobs.values())
        self.jobs.clear()
        self._add_work(-self._work)
        self._owner.on_change()
        self._owner.on_not_run(jobs, ServiceUnavailable("the device process has ended"))
