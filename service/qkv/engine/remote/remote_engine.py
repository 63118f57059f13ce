"""The engine of a worker without a device: the device process runs its jobs.

It is a `JobExecutor`, as `Engine` is. It writes input tensors once, into memory shared with the
device process, and reads the outputs there.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson

from qkv.engine.admission import AdmissionController
from qkv.engine.engine import DEFAULT_LIMIT
from qkv.engine.remote.channel import Channel, receive_connection
from qkv.engine.remote.job_codec import decode_label
from qkv.engine.remote.messages import (
    NO_DEADLINE,
    JobRequest,
    JobTimes,
    MessageType,
    pack_id,
    pack_plan,
    unpack_id,
    unpack_results,
)
from qkv.engine.remote.sent_plans import SentPlan, SentPlans
from qkv.engine.remote.shared_memory import Block, WorkerRegion
from qkv.engine.work_queue import JobResult, Load, ThroughputEstimate
from qkv.errors import ServiceUnavailable, from_problem
from qkv.jobs.job import Job
from qkv.telemetry.metrics import Usage
from qkv.telemetry.worker_state import SharedState, WorkerState

__all__ = ["RemoteEngine"]

_LARGE_BYTES: Final = 1 << 20  # larger inputs are copied in a thread, not on the event loop
_POLL_S: Final = 0.05


@dataclass(slots=True, eq=False)
class _SubmittedJob:
    id: int
    job: Job
    plan: SentPlan
    future: asyncio.Future[JobResult]
    inputs: Block
    outputs: Block
    priority: int
    enqueued_at: float
    deadline: float
    is_sent: bool = False


class RemoteEngine:
    """Sends jobs to the device process: those of one turn of the event loop in one frame.

    A submitted job gets its result, or fails with ServiceUnavailable if the device process ends.
    Cancelling its future before it runs removes it from the device process's queue. Its memory is
    free again once the device process sends that it no longer reads it.

    Args:
        device_name: name of the type of its device, until the device process sends its own.
        region: memory for tensors.
        control_socket: receives one end of a socket pair whenever the device process starts.
        shared_state: has the flag that the service drains.
        limit: the most load of unfinished jobs.

    Attributes:
        device_name: as responses give it.
        is_shared: always true.
        admission: admits requests before their bodies are read.
        failed: never set: the device is not in this process.
    """

    is_shared = True

    def __init__(
        self,
        device_name: str,
        region: WorkerRegion,
        control_socket: socket.socket,
        shared_state: SharedState,
        limit: Load = DEFAULT_LIMIT,
    ) -> None:
        self.device_name = device_name
        self._region = region
        self._control_socket = control_socket
        self._shared_state = shared_state
        self._ids = itertools.count(1)
        self._submitted: dict[int, _SubmittedJob] = {}
        self._plans = SentPlans()
        self._requests: list[bytes] = []  # packed, not sent yet
        self._load = Load()
        self._throughput = ThroughputEstimate()
        self._last_result_at = 0.0  # by time.perf_counter
        self.admission = AdmissionController(
            limit, lambda: self._load, self._throughput.retry_after
        )
        self.failed = asyncio.Event()
        self._copy_tasks: set[asyncio.Task[None]] = set()
        self._channel: Channel | None = None
        self._is_connected = asyncio.Event()
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Waits for the device process; call it on the event loop that will submit jobs."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._control_socket, self._on_new_connection)

    async def prepare(self, _worker: WorkerState) -> None:
        """Waits for the device process, as `wait_until_ready`."""
        await self.wait_until_ready()

    async def wait_until_ready(self) -> None:
        """Waits until the device process accepts jobs, or the service drains."""
        while not self._is_connected.is_set() and not self._shared_state.is_draining:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_connected.wait(), _POLL_S)

    async def stop(self) -> None:
        """Rejects new jobs, and awaits the results of submitted jobs."""
        self._closing = True
        while futures := [s.future for s in self._submitted.values() if not s.future.done()]:
            await asyncio.wait(futures)
        assert self._loop is not None
        self._loop.remove_reader(self._control_socket)
        if self._channel is not None:
            self._channel.close()

    @property
    def is_alive(self) -> bool:
        """Always true: the supervisor restarts the device process."""
        return True

    @property
    def is_ready(self) -> bool:
        """True while the device process accepts jobs and this engine is not stopping."""
        return self._is_connected.is_set() and not self._closing

    def usage(self) -> Usage:
        """Returns zeros: the device process counts its queue."""
        return Usage()

    def run_inline(self, _job: Job) -> JobResult | None:
        """Returns None: no job runs in this process."""
        return None

    async def run_with_others(self, _job: Job) -> JobResult | None:
        """Returns None, as `run_inline`."""
        return None

    def submit(
        self, job: Job, *, priority: int = 0, wait_s: float | None = None
    ) -> asyncio.Future[JobResult]:
        """Submits a job, as `Engine.submit` does.

        Raises:
            ServiceUnavailable: the shared memory is full, the device process is restarting, or
                this process is stopping.
        """
        assert self._loop is not None
        if self._closing:
            raise ServiceUnavailable("the service is stopping", retry_after=5)
        if not self._is_connected.is_set():
            raise ServiceUnavailable("the device process is restarting")
        plan = self._find_plan(job)
        try:
            inputs = self._region.allocate(plan.input_bytes)
            outputs = self._region.allocate(plan.output_bytes)
        except ServiceUnavailable as full:
            full.retry_after = self._throughput.retry_after(self._load)
            raise
        future: asyncio.Future[JobResult] = self._loop.create_future()
        now = time.perf_counter()
        deadline = NO_DEADLINE if wait_s is None else now + wait_s
        submitted = _SubmittedJob(
            next(self._ids), job, plan, future, inputs, outputs, priority, now, deadline
        )
        self._submitted[submitted.id] = submitted
        self._load = self._load.plus(plan.load)
        future.add_done_callback(partial(self._on_done, submitted))
        if plan.input_bytes <= _LARGE_BYTES:
            plan.write_inputs(job, inputs.bytes)
            self._send(submitted)
        else:
            task = self._loop.create_task(self._send_large(submitted))
            self._copy_tasks.add(task)
            task.add_done_callback(self._copy_tasks.discard)
        return future

    def _find_plan(self, job: Job) -> SentPlan:
        """Returns the plan of a job; sends it if the device process does not know it."""
        assert self._channel is not None
        plan, header = self._plans.find(job)
        if header is not None:
            self._flush()  # the plan may take the number of one that these jobs have
            self._channel.send(MessageType.PLAN, pack_plan(plan.number, header))
        return plan

    async def _send_large(self, submitted: _SubmittedJob) -> None:
        write_inputs, inputs = submitted.plan.write_inputs, submitted.inputs.bytes
        try:
            await asyncio.to_thread(write_inputs, submitted.job, inputs)
        except Exception as error:  # a bug; its client must not wait for ever
            if not submitted.future.done():
                submitted.future.set_exception(error)
        if submitted.future.done():  # failed, cancelled, or the device process has ended
            self._submitted.pop(submitted.id, None)
        else:
            submitted.plan = self._find_plan(submitted.job)  # its number may be another plan's now
            self._send(submitted)

    def _send(self, submitted: _SubmittedJob) -> None:
        """Sends a job at the end of this turn of the event loop, with the others of this turn; at
        once if no other is on the way."""
        assert self._loop is not None
        request = JobRequest(
            submitted.id,
            submitted.plan.number,
            submitted.inputs.offset,
            submitted.outputs.offset,
            max(0, min(submitted.priority, 255)),
            submitted.enqueued_at,
            submitted.deadline,
        )
        submitted.is_sent = True
        self._requests.append(request.pack())
        if len(self._submitted) == 1:
            self._flush()
        elif len(self._requests) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Sends the jobs that are not sent yet in one frame."""
        if self._requests and self._channel is not None:
            self._channel.send(MessageType.RUN, b"".join(self._requests))
            self._requests.clear()

    def _on_done(self, submitted: _SubmittedJob, future: asyncio.Future[JobResult]) -> None:
        """Stops counting a job; sends CANCEL if it was cancelled. Its memory stays allocated: only
        the device process knows when it no longer reads the inputs."""
        self._load = self._load.minus(submitted.plan.load)
        if future.cancelled() and submitted.is_sent and submitted.id in self._submitted:
            assert self._channel is not None
            self._flush()
            self._channel.send(MessageType.CANCEL, pack_id(submitted.id))

    def _on_message(self, kind: MessageType, payload: bytes) -> None:
        """Handles a frame of the device process."""
        if kind == MessageType.READY:
            self.device_name = payload.decode()
            self._is_connected.set()
        elif kind == MessageType.RESULTS:
            self._on_results(payload)
        elif kind == MessageType.ERROR:
            id, text = unpack_id(payload)
            submitted = self._submitted.pop(id)
            if not submitted.future.done():  # else it was cancelled
                status, problem, retry_after = orjson.loads(text)
                submitted.future.set_exception(from_problem(status, problem, retry_after))
        else:
            self._submitted.pop(unpack_id(payload)[0])

    def _on_results(self, payload: bytes) -> None:
        """Resolves the futures of jobs whose outputs are in shared memory."""
        label, all_times = unpack_results(payload)
        names, backend = decode_label(label)
        done, started_at = Load(), math.inf
        for times in all_times:
            submitted = self._submitted.pop(times.id)
            done = done.plus(submitted.plan.load)
            started_at = min(started_at, submitted.enqueued_at)
            if not submitted.future.done():  # else it was cancelled
                outputs = submitted.plan.read_outputs(names, submitted.outputs.bytes)
                timing = self._timing(submitted.job, times, backend)
                submitted.future.set_result(JobResult(outputs, timing))
        now = time.perf_counter()
        self._throughput.add(done, now - max(started_at, self._last_result_at))
        self._last_result_at = now

    def _timing(self, job: Job, times: JobTimes, backend: str) -> dict[str, Any]:
        """Returns a job's timing as `JobResult` has it."""
        _, queue_ms, transfer_ms, compute_ms, total_ms, batch_size = times
        return {
            "queue_ms": queue_ms,
            "transfer_ms": transfer_ms,
            "compute_ms": compute_ms,
            "total_ms": total_ms,
            "batch_size": batch_size,
            "device": self.device_name,
            "backend": backend,
            "flops": job.flops,
            "bytes": job.bytes,
        }

    def _on_new_connection(self) -> None:
        """Connects a device process that has started."""
        assert self._loop is not None
        if (connection := receive_connection(self._control_socket)) is None:
            # the supervisor has exited: `parent_alive_fd` ends this worker
            self._loop.remove_reader(self._control_socket)
            return
        if self._channel is not None:  # the loss of the previous one may not be seen yet
            self._channel.close()
            self._on_connection_lost(self._channel)
        self._plans = SentPlans()
        channel = self._channel = Channel(
            self._on_message, lambda: self._on_connection_lost(channel)
        )
        # keep a reference: a task without one may be collected
        self._opening = self._loop.create_task(channel.open(connection[1]))

    def _on_connection_lost(self, channel: Channel) -> None:
        """Fails all jobs: the device process has ended."""
        if channel is not self._channel:
            return
        self._channel = None
        self._is_connected.clear()
        self._requests.clear()
        submitted_jobs = list(self._submitted.values())
        self._submitted.clear()
        for submitted in submitted_jobs:
            if not submitted.future.done():
                submitted.future.set_exception(ServiceUnavailable("the device process has ended"))
