"""The engine of a worker that has no device: the one process that has it runs the jobs.

To routes it is an `Engine`. Tensors are written into memory that both share, once; the answer's are
read from there.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import orjson
import torch

from qkv.engine.accounting import Alone
from qkv.engine.admission import Door
from qkv.engine.engine import ANY_LOAD
from qkv.engine.executor import Standing
from qkv.engine.remote import job_codec as parcel
from qkv.engine.remote.channel import Asked, Channel, Kind
from qkv.engine.remote.shared_memory import Block, Region
from qkv.engine.remote.socket_handover import receive
from qkv.engine.work_queue import Answer, Load, Rate
from qkv.errors import NotNow, from_problem
from qkv.jobs.job import Job
from qkv.telemetry.metrics import Usage
from qkv.telemetry.worker_state import Fleet
from qkv.tensors import RawTensor

__all__ = ["Remote"]

_LARGE: Final = 1 << 20  # bytes; more is not copied on the event loop
_TURN_S: Final = 0.05


@dataclass(slots=True, eq=False)
class _Waiting:
    job: Job
    future: asyncio.Future[Answer]
    inputs: Block
    answer: Block
    priority: int
    wait_s: float | None
    since: float = field(default_factory=time.perf_counter)
    is_sent: bool = False

    @property
    def load(self) -> Load:
        """What it asks for."""
        return Load(1, self.inputs.bytes.nbytes + self.answer.bytes.nbytes, self.job.flops)


class Remote:
    """Has jobs run by the device process.

    A job that was taken is answered, or, where the device process ends, fails with NotNow. A caller
    who leaves before its turn takes its job with it. Its memory is free again once the device
    process says that it does not look at it any more.

    Args:
        device: the one that runs them; not touched here.
        region: where tensors go.
        mailbox: brings one end of a pair of sockets whenever the device process starts.
        fleet: says when the service ends.
        most: what may be asked for and not answered.

    Attributes:
        door: lets requests in whose bodies come in.
        broken: never set: the device is not here.
    """

    def __init__(
        self,
        device: torch.device,
        region: Region,
        mailbox: socket.socket,
        fleet: Fleet,
        most: Load = ANY_LOAD,
    ) -> None:
        self.device = device
        self._region = region
        self._mailbox = mailbox
        self._fleet = fleet
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._load = Load()
        self._rate = Rate()
        self._answered = 0.0  # when the last was, by time.perf_counter
        self.door = Door(most, lambda: self._load, self._rate.retry_after)
        self.broken = asyncio.Event()
        self._copying: set[asyncio.Task[None]] = set()
        self._channel: Channel | None = None
        self._is_ready = asyncio.Event()
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Waits for the device process; to be called on the loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._mailbox, self._letter)

    async def until_ready(self) -> None:
        """Returns once jobs are taken, or none ever will be."""
        while not self._is_ready.is_set() and not self._fleet.draining:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_ready.wait(), _TURN_S)

    async def stop(self) -> None:
        """Takes no more jobs, and awaits the answers to those that were taken."""
        self._closing = True
        while futures := [w.future for w in self._waiting.values() if not w.future.done()]:
            await asyncio.wait(futures)
        assert self._loop is not None
        self._loop.remove_reader(self._mailbox)
        if self._channel is not None:
            self._channel.close()

    @property
    def alive(self) -> bool:
        """Yes: a device process that ends is replaced."""
        return True

    @property
    def ready(self) -> bool:
        """Whether jobs are taken."""
        return self._is_ready.is_set() and not self._closing

    def usage(self) -> Usage:
        """Nothing waits here: what does, the device process counts."""
        return Usage()

    def runs_now(self, _job: Job) -> bool:
        """No job runs in this process."""
        return False

    def run_standing(self, _standing: Standing) -> Alone | None:
        """None does."""
        return None

    def run_now(self, _job: Job) -> Answer | None:
        """None: it has no device."""
        return None

    def submit(
        self, job: Job, *, priority: int = 0, wait_s: float | None = None
    ) -> asyncio.Future[Answer]:
        """As `Engine.submit`.

        Raises:
            NotNow: there is no room for it, the device process starts again, or this one stops.
        """
        assert self._loop is not None
        if self._closing:
            raise NotNow("the service is stopping", retry_after=5)
        if not self._is_ready.is_set():
            raise NotNow("the process that runs attention starts again")
        try:
            inputs = self._region.take(parcel.room_for(parcel.sizes_in(job)))
            answer = self._region.take(parcel.room_for(parcel.sizes_out(job)))
        except NotNow as full:
            full.retry_after = self._rate.retry_after(self._load)
            raise
        waiting = _Waiting(job, self._loop.create_future(), inputs, answer, priority, wait_s)
        request = next(self._ids)
        self._waiting[request] = waiting
        self._load = self._load.plus(waiting.load)
        waiting.future.add_done_callback(partial(self._left, request, waiting.load))
        if inputs.bytes.nbytes <= _LARGE:
            parcel.write(job, inputs.bytes)
            self._send(request, waiting)
        else:
            task = self._loop.create_task(self._send_large(request, waiting))
            self._copying.add(task)
            task.add_done_callback(self._copying.discard)
        return waiting.future

    async def _send_large(self, request: int, waiting: _Waiting) -> None:
        try:
            await asyncio.to_thread(parcel.write, waiting.job, waiting.inputs.bytes)
        except Exception as error:  # ours to fix; its caller must not wait for ever
            if not waiting.future.done():
                waiting.future.set_exception(error)
        if waiting.future.done():  # or its caller has left, or the device process has ended
            self._waiting.pop(request, None)
        else:
            self._send(request, waiting)

    def _send(self, request: int, waiting: _Waiting) -> None:
        assert self._channel is not None
        inputs, answer = waiting.inputs, waiting.answer
        asked = Asked(
            inputs.first,
            inputs.bytes.nbytes,
            answer.first,
            answer.bytes.nbytes,
            max(0, min(waiting.priority, 255)),
            waiting.since,
            waiting.wait_s,
            parcel.head_of(waiting.job),
        )
        waiting.is_sent = True
        self._channel.send(Kind.ASK, request, asked.pack())

    def _left(self, request: int, load: Load, future: asyncio.Future[Answer]) -> None:
        """Tells the device process of a caller that has left; only it knows when it is done."""
        self._load = self._load.minus(load)
        waiting = self._waiting.get(request)
        if waiting is not None and future.cancelled() and waiting.is_sent:
            assert self._channel is not None
            self._channel.send(Kind.LEAVE, request)

    def _take(self, kind: Kind, request: int, what: bytes) -> None:
        """What the device process says."""
        if kind == Kind.READY:
            self._is_ready.set()
            return
        waiting = self._waiting.pop(request)
        if waiting.future.done():  # its caller has left
            return
        if kind == Kind.ANSWER:
            now = time.perf_counter()
            self._rate.add(waiting.load, now - max(waiting.since, self._answered))
            self._answered = now
            names, timing = orjson.loads(what)
            waiting.future.set_result(Answer(_outputs(waiting, names), timing))
        else:
            status, problem, retry_after = orjson.loads(what)
            waiting.future.set_exception(from_problem(status, problem, retry_after))

    def _letter(self) -> None:
        """A device process has started."""
        assert self._loop is not None
        if (letter := receive(self._mailbox)) is None:  # what that means is seen elsewhere
            self._loop.remove_reader(self._mailbox)
            return
        if self._channel is not None:  # that the one before has ended may not have been seen yet
            self._channel.close()
            self._lost(self._channel)
        channel = self._channel = Channel(self._take, lambda: self._lost(channel))
        # kept, for a task that nobody refers to may vanish
        self._opening = self._loop.create_task(channel.open(letter[1]))

    def _lost(self, channel: Channel) -> None:
        """The device process has ended, and with it what it had to run."""
        if channel is not self._channel:
            return
        self._channel = None
        self._is_ready.clear()
        waiting = list(self._waiting.values())
        self._waiting.clear()
        for each in waiting:
            if not each.future.done():
                each.future.set_exception(NotNow("the process that runs attention has ended"))


def _outputs(waiting: _Waiting, names: list[str]) -> dict[str, RawTensor]:
    """The answer's tensors, where the device process has written them."""
    answers, data = waiting.job.answers, waiting.answer.bytes.data
    places = parcel.laid_out(parcel.sizes_out(waiting.job, names))
    return {
        name: RawTensor(*answers[name], data[place])
        for name, place in zip(names, places, strict=True)
    }
