"""The device process's connection to one worker: receives jobs, runs them, answers each."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from qkv.engine.device_errors import EngineStopped
from qkv.engine.engine import Engine
from qkv.engine.remote.channel import Channel
from qkv.engine.remote.job_memory import layouts_of, read_inputs
from qkv.engine.remote.messages import JobRequest, JobResult, MessageType
from qkv.engine.remote.shared_memory import SharedMemory
from qkv.errors import Internal, QkvError, ServiceUnavailable
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.jobs.plan_description import KnownPlans
from qkv.jobs.result import Result
from qkv.jobs.tenant import Tenant

_log = logging.getLogger("qkv.device")

_LARGE_BYTES: Final = 1 << 20  # larger outputs are copied in a thread, not on the event loop
_POLL_S: Final = 0.01


class WorkerJob(Job):
    """A job that is answered through the link to its worker instead of a future.

    The engine does not see that it is cancelled, and answers every job, so that the worker knows
    when nothing reads its inputs any more.

    Args:
        answer: gets its result or its error.
        request: the received request.
        plan: its plan.
        inputs: bytes of its tensors.

    Attributes:
        id: the worker's number for it.
        outputs_offset: offset of the memory for its outputs.
        is_wanted: the worker waits for its result.
    """

    __slots__ = ("_answer", "id", "is_wanted", "outputs_offset")

    def __init__(
        self,
        answer: Callable[[WorkerJob, Result | BaseException], None],
        request: JobRequest,
        plan: Plan,
        inputs: np.ndarray,
    ) -> None:
        super().__init__(plan, *read_inputs(plan, inputs))
        self._answer, self.id, self.outputs_offset = answer, request.id, request.outputs_offset
        self.tenant, self.priority = Tenant(request.tenant, request.weight), request.priority
        self.submitted_at, self.deadline = request.submitted_at, request.deadline
        self.timer, self.is_wanted = None, True

    @property
    def is_cancelled(self) -> bool:
        """False: it is answered in any case."""
        return False

    def resolve(self, outcome: Result | BaseException) -> None:
        """Sends its result or its error."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None  # which refers to this object
        self._answer(self, outcome)


class WorkerLink:
    """The connection to one worker, and its jobs that have no answer yet.

    A restarted worker takes over the memory region of the previous one. READY is sent once this
    process has answered all jobs of the previous worker: then it does not use the region any more.

    Args:
        index: index of the worker.
        engine: runs its jobs.
        shared_memory: holds its tensors.
        plans: those of all workers.
        on_lost: called when the worker has exited.
    """

    def __init__(
        self,
        index: int,
        engine: Engine,
        shared_memory: SharedMemory,
        plans: KnownPlans,
        on_lost: Callable[[], None],
    ) -> None:
        self._index = index
        self._engine, self._shared_memory, self._plans = engine, shared_memory, plans
        self._on_lost = on_lost
        self._jobs: dict[int, WorkerJob] = {}
        self._results: list[JobResult] = []  # not sent yet
        self._channel: Channel | None = None
        self._copy_tasks: set[asyncio.Task[None]] = set()

    @property
    def is_connected(self) -> bool:
        """True while the worker may send messages."""
        return self._channel is not None and not self._channel.closed.is_set()

    async def open(self, end: socket.socket) -> None:
        """Starts to accept the worker's jobs."""
        if self._channel is not None:  # the loss of the previous worker may not be seen yet
            self._channel.close()
            self._on_connection_lost(self._channel)
        channel = self._channel = Channel(
            self._on_message, lambda: self._on_connection_lost(channel)
        )
        while self._jobs:  # noqa: ASYNC110 (an event would cost each job something)
            await asyncio.sleep(_POLL_S)
        await channel.open(end)
        channel.send(MessageType.READY, self._engine.device_name)

    async def close(self) -> None:
        """Sends all results, and waits until the channel is closed."""
        await asyncio.sleep(0)  # for results that the engine has just resolved
        await asyncio.gather(*self._copy_tasks)
        self._flush()
        if self._channel is not None and self.is_connected:
            self._channel.close()
            await self._channel.closed.wait()

    def _on_message(self, kind: MessageType, parts: Sequence[Any]) -> None:
        """Handles a message of the worker."""
        if kind == MessageType.RUN:
            (requests,) = parts
            self._run_jobs([JobRequest(*request) for request in requests])
        elif kind == MessageType.CANCEL:
            (id,) = parts
            if id in self._jobs:
                self._cancel(self._jobs[id])

    def _run_jobs(self, requests: Sequence[JobRequest]) -> None:
        """Submits the jobs of a message to the engine."""
        jobs = []
        for request in requests:
            try:
                if (plan := self._plans.find(request.plan, request.plan_content)) is None:
                    self._send(MessageType.UNKNOWN_PLAN, request.id)
                    continue
                size = layouts_of(plan).input_bytes
                inputs = self._shared_memory.view(self._index, request.inputs_offset, size)
                job = self._jobs[request.id] = WorkerJob(self._answer, request, plan, inputs)
            except Exception as error:  # a bug: the worker has validated the plan
                self._send_error(request.id, error)
            else:
                jobs.append(job)
        self._engine.submit_all(jobs)
        self._flush()  # the results of small jobs

    def _answer(self, job: WorkerJob, outcome: Result | BaseException) -> None:
        """Copies the outputs of a job into shared memory, and sends what was measured; or sends its
        error."""
        if self._jobs.get(job.id) is not job:
            return  # it has its answer
        if not isinstance(outcome, Result):
            self._send_error(job.id, outcome)
        elif not job.is_wanted:
            self._send_error(job.id, _cancelled())
        elif layouts_of(job.plan).outputs.size > _LARGE_BYTES:
            task = asyncio.create_task(self._answer_large(job, outcome))
            self._copy_tasks.add(task)
            task.add_done_callback(self._copy_tasks.discard)
        else:
            try:
                self._write_outputs(job, outcome)
            except Exception as error:
                self._send_error(job.id, error)
            else:
                self._send_result(job, outcome)

    async def _answer_large(self, job: WorkerJob, result: Result) -> None:
        try:
            await asyncio.to_thread(self._write_outputs, job, result)
        except Exception as error:
            self._send_error(job.id, error)
        else:
            self._send_result(job, result)

    def _write_outputs(self, job: WorkerJob, result: Result) -> None:
        layout = layouts_of(job.plan).outputs
        memory = self._shared_memory.view(self._index, job.outputs_offset, layout.size)
        layout.write(result.outputs, memory.data)

    def _send_result(self, job: WorkerJob, result: Result) -> None:
        """Sends what was measured of a job at the end of this turn of the event loop; at once if no
        other job is here."""
        del self._jobs[job.id]
        self._results.append(JobResult.of(job.id, result))
        if not self._jobs:
            self._flush()
        elif len(self._results) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Sends the results that are not sent yet."""
        if self._results:
            self._send(MessageType.RESULTS, self._results)
            self._results = []

    def _send_error(self, id: int, error: BaseException) -> None:
        """Sends the error of a job; logs it if it is a bug."""
        self._jobs.pop(id, None)
        if not isinstance(error, QkvError):
            _log.error("a job could not be read, or its result not be sent", exc_info=error)
            error = Internal("the computation failed")
        is_stopped = isinstance(error, EngineStopped)
        retry_after = error.retry_after or 1
        self._send(MessageType.ERROR, id, error.status, error.problem(), retry_after, is_stopped)

    def _send(self, kind: MessageType, *parts: Any) -> None:
        if self._channel is not None:
            self._channel.send(kind, *parts)

    def _cancel(self, job: WorkerJob) -> None:
        """Answers a queued job now. One that runs is answered at its end, without outputs."""
        job.is_wanted = False
        if self._engine.remove(job):
            self._send_error(job.id, _cancelled())

    def _on_connection_lost(self, channel: Channel) -> None:
        """Cancels the jobs of a worker that has exited."""
        if channel is self._channel:
            self._results = []
            for job in list(self._jobs.values()):
                self._cancel(job)
            self._on_lost()


def _cancelled() -> QkvError:
    """Returns the answer of a cancelled job. Its worker awaits it, and no client gets it."""
    return ServiceUnavailable("the job was cancelled")
