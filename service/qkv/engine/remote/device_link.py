"""The worker's connection to one device process, and the jobs that it has there.

`WorkerLink` is the other end.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from qkv.engine.remote.channel import Channel
from qkv.engine.remote.job_memory import layouts_of
from qkv.engine.remote.messages import JobRequest, JobResult, MessageType
from qkv.engine.remote.shared_memory import Block
from qkv.errors import QkvError, ServiceUnavailable, from_problem
from qkv.jobs.job import Job
from qkv.jobs.load import Load
from qkv.jobs.plan import Plan
from qkv.jobs.plan_description import describe


@dataclass(slots=True, eq=False)
class Transfer:
    """The transfer of a job to a device process, and of its result back.

    Attributes:
        id: the worker's number for it.
        job: the job.
        link: the connection to its device process.
        inputs, outputs: memory for its tensors, which any device process can use.
        is_sent: the device process of `link` has its request, or gets it in this turn.
        is_second_attempt: another device process had it, and did not complete it.
    """

    id: int
    job: Job
    link: DeviceLink
    inputs: Block
    outputs: Block
    is_sent: bool = False
    is_second_attempt: bool = False


class DeviceLink:
    """A link to one device process: the jobs of one turn of the event loop go in one message.

    Args:
        number: number of the device process.
        device_name: name of its device, until it sends its own.
        set_work: publishes the work of its jobs, in floating-point operations.
        on_change: called when its device process starts or stops to accept jobs.
        on_results: called with the work of a message of results, and the earliest submission.
        on_not_run: called with transfers of jobs that its device process does not run, and the
            error.

    Attributes:
        number, device_name: as the arguments.
        transfers: those of jobs without an answer, by id. A cancelled job gets one too, once the
            device process does not read its inputs any more.
        is_ready: the device process accepts jobs.
        was_ready: a device process has accepted jobs of this worker.
    """

    def __init__(
        self,
        number: int,
        device_name: str,
        set_work: Callable[[float], None],
        on_change: Callable[[], None],
        on_results: Callable[[Load, float], None],
        on_not_run: Callable[[Sequence[Transfer], QkvError], None],
    ) -> None:
        self.number, self.device_name = number, device_name
        self.transfers: dict[int, Transfer] = {}
        self.is_ready = self.was_ready = False
        self._set_work, self._on_change = set_work, on_change
        self._on_done, self._on_not_run = on_results, on_not_run
        self._work = 0
        self._plans: WeakSet[Plan] = WeakSet()  # those that the device process has got
        self._requests: list[JobRequest] = []  # not sent yet
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
        """Closes the connection once all messages are sent."""
        if self._channel is not None:
            self._channel.close()

    def add(self, transfer: Transfer) -> None:
        """Counts a job as work of this device."""
        self.transfers[transfer.id] = transfer
        self._add_work(transfer.job.plan.load.work)

    def remove(self, id: int) -> Transfer:
        """Stops to count a job; returns its transfer."""
        transfer = self.transfers.pop(id)
        self._add_work(-transfer.job.plan.load.work)
        return transfer

    def _add_work(self, work: int) -> None:
        self._work += work
        self._set_work(self._work)

    def send(self, transfer: Transfer) -> None:
        """Sends a job at the end of this turn of the event loop, with the others of this turn; at
        once if no other is on the way."""
        job = transfer.job
        description = job.plan.derived(describe)
        if not (is_known := job.plan in self._plans):
            self._plans.add(job.plan)
        request = JobRequest(
            transfer.id,
            description.key,
            None if is_known else description.content,
            transfer.inputs.offset,
            transfer.outputs.offset,
            job.priority,
            job.submitted_at,
            job.deadline,
            job.tenant.name,
            job.tenant.weight,
        )
        transfer.is_sent = True
        self._requests.append(request)
        if len(self.transfers) == 1:
            self._flush()
        elif len(self._requests) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def cancel(self, transfer: Transfer) -> None:
        """Sends CANCEL. The job's memory stays allocated until its answer: only the device process
        knows when it no longer reads the inputs."""
        if self._channel is not None and transfer.is_sent and transfer.id in self.transfers:
            self._flush()
            self._channel.send(MessageType.CANCEL, transfer.id)

    def _flush(self) -> None:
        """Sends the jobs that are not sent yet in one message."""
        if self._requests and self._channel is not None:
            self._channel.send(MessageType.RUN, self._requests)
            self._requests = []

    def _on_message(self, kind: MessageType, parts: Sequence[Any]) -> None:
        """Handles a message of the device process."""
        if kind == MessageType.READY:
            (self.device_name,) = parts
            self.is_ready = self.was_ready = True
            self._on_change()
        elif kind == MessageType.RESULTS:
            (results,) = parts
            self._on_results([JobResult(*result) for result in results])
        elif kind == MessageType.ERROR:
            self._on_error(*parts)
        elif kind == MessageType.UNKNOWN_PLAN:
            self._send_again(*parts)

    def _on_results(self, results: Sequence[JobResult]) -> None:
        """Resolves jobs whose outputs are in shared memory."""
        done, started_at = Load(), math.inf
        for measured in results:
            transfer = self.remove(measured.id)
            job, result = transfer.job, measured.result(self.device_name)
            done = done.plus(job.plan.load)
            started_at = min(started_at, job.submitted_at)
            result.outputs = layouts_of(job.plan).outputs.read(transfer.outputs.bytes.data)
            job.resolve(result)
        self._on_done(done, started_at)

    def _on_error(
        self, id: int, status: int, problem: dict[str, Any], retry_after: int, is_stopped: bool
    ) -> None:
        """Fails a job, unless another device process may run it."""
        transfer = self.remove(id)
        error = from_problem(status, problem, retry_after)
        if is_stopped:
            if self.is_ready:  # its queue is empty now: it would get all new jobs
                self.is_ready = False
                self._on_change()
            self._on_not_run([transfer], error)
        else:
            transfer.job.resolve(error)

    def _send_again(self, id: int) -> None:
        """Sends a job with its plan, which the device process had to drop for others."""
        transfer = self.transfers[id]
        if transfer.job.future.done():  # it was cancelled
            self.remove(id)
            return
        self._plans.discard(transfer.job.plan)
        self.send(transfer)

    def _on_connection_lost(self, channel: Channel) -> None:
        """Gives all jobs back: the device process has ended."""
        if channel is not self._channel:
            return
        self._channel = None
        self.is_ready = False
        self._plans.clear()
        self._requests = []
        transfers = list(self.transfers.values())
        self.transfers.clear()
        self._add_work(-self._work)
        self._on_change()
        self._on_not_run(transfers, ServiceUnavailable("the device process has ended"))
