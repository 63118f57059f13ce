"""The engine of a worker without a device: device processes run its jobs.

It submits and stops as `Engine` does. It writes input tensors once, into memory shared with all
device processes, and reads the outputs there.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from qkv.engine.admission import Admission
from qkv.engine.device.device import MemoryUsage
from qkv.engine.engine import DEFAULT_LIMIT
from qkv.engine.remote.channel import receive_connection
from qkv.engine.remote.device_link import DeviceLink, Transfer
from qkv.engine.remote.job_memory import layouts_of, write_inputs
from qkv.engine.remote.shared_memory import WorkerRegion
from qkv.errors import QkvError, ServiceUnavailable, stopping
from qkv.jobs.job import DEFAULT_PRIORITY, Job
from qkv.jobs.load import Load
from qkv.jobs.result import Result
from qkv.jobs.tenant import ANYONE, Tenant
from qkv.telemetry.worker_state import SharedState, WorkerState

_LARGE_BYTES: Final = 1 << 20  # larger inputs are copied in a thread, not on the event loop
_POLL_S: Final = 0.05
_IDLE_S: Final = 1.0  # in which the region is empty before its pages return to the system


class RemoteEngine:
    """An executor that sends each job to the device process with the least queued work.

    If a device process ends, another one gets its jobs: they are pure, and their inputs are still
    in shared memory. A job gets one further attempt, because it may be what ends the processes.
    Cancelling its future before it runs removes it from the device process's queue. Its memory is
    free again with the answer of the device process.

    Args:
        worker: index of this worker.
        region: memory for tensors.
        control_socket: receives one end of a socket pair whenever a device process starts.
        shared_state: has the device processes, their queued work, and the flag that the service
            drains.
        limit: the most load of unfinished jobs.

    Attributes:
        links: the connection to each device process.
        admission: admits requests before their bodies are read.
        failed: never set: no device is in this process.
    """

    def __init__(
        self,
        worker: int,
        region: WorkerRegion,
        control_socket: socket.socket,
        shared_state: SharedState,
        limit: Load = DEFAULT_LIMIT,
    ) -> None:
        self._region = region
        self._control_socket = control_socket
        self._shared_state = shared_state
        self.links = [
            DeviceLink(
                number,
                name,
                partial(shared_state.set_queued_work, worker, number),
                self._update,
                self._on_results,
                self._on_not_run,
            )
            for number, name in enumerate(shared_state.devices)
        ]
        self._usable: list[DeviceLink] = []
        self._owns_region = False
        self._turn = worker  # so that workers begin with different devices
        self._ids = itertools.count(1)
        self._last_result_at = 0.0  # by time.perf_counter
        self.admission = Admission(limit)
        self.failed = asyncio.Event()
        self._copy_tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def device_name(self) -> str:
        """The device, as responses give it; several have commas between them."""
        return ",".join([link.device_name for link in self.links])

    def start(self) -> None:
        """Waits for device processes; call it on the event loop that will submit jobs."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._control_socket, self._on_new_connection)
        self._releasing = self._loop.create_task(self._release_pages())

    async def prepare(self, _worker: WorkerState) -> None:
        """Waits for a device process, as `wait_until_ready`."""
        await self.wait_until_ready()

    async def wait_until_ready(self) -> None:
        """Waits until a device process accepts jobs, or the service drains."""
        while not self._usable and not self._shared_state.is_draining:
            await asyncio.sleep(_POLL_S)
            self._update()

    async def stop(self) -> None:
        """Rejects new jobs, and awaits the results of submitted jobs."""
        self._closing = True
        jobs = [t.job for link in self.links for t in link.transfers.values()]
        while futures := [job.future for job in jobs if not job.future.done()]:
            await asyncio.wait(futures)
        assert self._loop is not None
        self._loop.remove_reader(self._control_socket)
        self._releasing.cancel()
        for link in self.links:
            link.close()

    @property
    def is_alive(self) -> bool:
        """Always true: the supervisor restarts device processes."""
        return True

    @property
    def is_ready(self) -> bool:
        """True while a device process accepts jobs and this engine is not stopping."""
        return bool(self._usable) and not self._closing

    def memory_usage(self) -> MemoryUsage:
        """Returns zeros: only the device processes use a device."""
        return MemoryUsage()

    def submit(
        self,
        job: Job,
        *,
        tenant: Tenant = ANYONE,
        priority: int = DEFAULT_PRIORITY,
        wait_s: float | None = None,
    ) -> asyncio.Future[Result]:
        """Submits a job, as `Engine.submit` does.

        Raises:
            ServiceUnavailable: the shared memory is full, no device process accepts jobs now, or
                this process is stopping.
        """
        assert self._loop is not None
        if self._closing:
            raise stopping()
        if (link := self._choose()) is None:
            raise ServiceUnavailable("the device process is restarting")
        layouts = layouts_of(job.plan)
        size = layouts.input_bytes
        try:
            inputs = self._region.allocate(size)
            outputs = self._region.allocate(layouts.outputs.size)
        except ServiceUnavailable as full:
            full.retry_after = self.admission.throughput.retry_after(self.admission.jobs.total)
            raise
        future: asyncio.Future[Result] = self._loop.create_future()
        job.start_wait(future, tenant, priority, wait_s)
        transfer = Transfer(next(self._ids), job, link, inputs, outputs)
        link.add(transfer)
        self.admission.take(job)
        future.add_done_callback(partial(self._on_done, transfer))
        if size <= _LARGE_BYTES:
            write_inputs(job, inputs.bytes)
            link.send(transfer)
        else:
            task = self._loop.create_task(self._send_large(transfer))
            self._copy_tasks.add(task)
            task.add_done_callback(self._copy_tasks.discard)
        return future

    async def _release_pages(self) -> None:
        """Returns pages of the region to the system, in steps, when it is empty for a while."""
        while True:
            has_more = self._owns_region and self._region.release_idle_pages()
            await asyncio.sleep(0 if has_more else _IDLE_S)

    def _choose(self) -> DeviceLink | None:
        """Returns the usable link with the least queued work of all workers; None: there is none.

        Equal ones take turns. It takes 2.6 µs with two devices, and 0.1 µs with one.
        """
        usable = self._usable
        if len(usable) < 2:
            return usable[0] if usable else None
        totals = self._shared_state.queued_work
        self._turn = first = (self._turn + 1) % len(usable)
        return min(usable[first:] + usable[:first], key=lambda link: totals[link.number])

    async def _send_large(self, transfer: Transfer) -> None:
        job = transfer.job
        try:
            await asyncio.to_thread(write_inputs, job, transfer.inputs.bytes)
        except Exception as error:  # a bug; its client must not wait for ever
            job.resolve(error)
        link = transfer.link  # another one, if the first device process has ended
        if not job.future.done():
            link.send(transfer)
        elif transfer.id in link.transfers:  # failed or cancelled
            link.remove(transfer.id)

    def _on_done(self, transfer: Transfer, future: asyncio.Future[Result]) -> None:
        """Stops counting a job as load, and cancels it in its device process."""
        self.admission.give_back(transfer.job)
        if future.cancelled():
            transfer.link.cancel(transfer)

    def _on_results(self, done: Load, started_at: float) -> None:
        """Adds results of any device process to the estimate."""
        now = time.perf_counter()
        self.admission.throughput.add(done, now - max(started_at, self._last_result_at))
        self._last_result_at = now

    def _on_not_run(self, transfers: Sequence[Transfer], error: QkvError) -> None:
        """Submits jobs to another device process; fails those that had their second attempt."""
        for transfer in transfers:
            if transfer.job.future.done():  # it was cancelled
                continue
            link = self._choose()
            if link is None or transfer.is_second_attempt:
                transfer.job.resolve(error)
                continue
            transfer.link = link
            link.add(transfer)
            if transfer.is_sent:  # else `_send_large` sends it
                transfer.is_second_attempt = True
                link.send(transfer)

    def _on_new_connection(self) -> None:
        """Connects a device process that has started."""
        assert self._loop is not None
        if (connection := receive_connection(self._control_socket)) is None:
            # the supervisor has exited: `parent_alive_fd` ends this worker
            self._loop.remove_reader(self._control_socket)
            return
        number, end = connection
        self.links[number].connect(end)

    def _update(self) -> None:
        """Finds the links that can be used.

        A worker that replaces another one takes over its region, which device processes may still
        use for the previous worker. Each that has accepted jobs sends READY once it does not.
        """
        if not self._owns_region:
            in_use = self._shared_state.device_rows["was_ready"].tolist()
            self._owns_region = all(
                link.was_ready or not is_in_use
                for link, is_in_use in zip(self.links, in_use, strict=True)
            )
        self._usable = [link for link in self.links if link.is_ready and self._owns_region]
