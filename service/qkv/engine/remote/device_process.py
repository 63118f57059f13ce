"""The process that owns the device, where workers do not: it runs what they write into memory that
all of them share."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import orjson

from qkv.engine.engine import Engine
from qkv.engine.remote import job_codec as parcel
from qkv.engine.remote.channel import Asked, Channel, Kind
from qkv.engine.remote.shared_memory import Arena
from qkv.engine.remote.socket_handover import receive
from qkv.engine.warmup import warm_up
from qkv.engine.work_queue import Answer
from qkv.errors import Internal, NotNow, QkvError
from qkv.jobs.job import Limits
from qkv.telemetry.worker_state import Worker

__all__ = ["DeviceProcess"]

_log = logging.getLogger("qkv.device")

_LARGE: Final = 1 << 20  # bytes; more is not copied on the event loop
_TURN_S: Final = 0.01


class DeviceProcess:
    """Takes jobs from every worker, so that their jobs form batches together.

    Args:
        engine: what runs them.
        worker: what this process is in its fleet.
        arena: where tensors are.
        limits: what each job may ask for.
        mailbox: brings a worker's index and one end of a pair of sockets whenever one starts.
        leash: reads as closed once the parent has ended.
    """

    def __init__(
        self,
        engine: Engine,
        worker: Worker,
        arena: Arena,
        limits: Limits,
        mailbox: socket.socket,
        leash: int,
    ) -> None:
        self._engine, self._worker = engine, worker
        self._mailbox, self._leash = mailbox, leash
        opener = parcel.Opener(limits)
        self._callers = [
            _Caller(i, engine, arena, opener, self._left) for i in range(len(worker.fleet))
        ]
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ending = asyncio.Event()
        self._is_orphan = False

    async def run(self) -> bool:
        """Runs jobs until SIGTERM, or until parent and workers are gone; answers what it took.

        Returns:
            Whether the device works; where it failed for good, this ends by itself.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._is_ending.set)
        self._engine.start()
        pulse = asyncio.create_task(self._worker.pulse(self._engine.usage))
        watch = asyncio.create_task(self._watch())
        await warm_up(self._engine)
        self._engine.ledger.recorder = self._worker.recorder
        self._worker.loads(self._engine.usage())
        loop.add_reader(self._leash, self._orphaned)
        loop.add_reader(self._mailbox, self._letter)
        self._worker.ready(True)
        await self._is_ending.wait()
        self._worker.ready(False)
        await self._engine.stop()
        for caller in self._callers:
            await caller.close()
        pulse.cancel()
        watch.cancel()
        return not self._engine.broken.is_set()

    async def _watch(self) -> None:
        await self._engine.broken.wait()
        self._is_ending.set()

    def _letter(self) -> None:
        """A worker has started."""
        if (letter := receive(self._mailbox)) is None:
            asyncio.get_running_loop().remove_reader(self._mailbox)
            return
        index, end = letter
        task = asyncio.create_task(self._callers[index].open(end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _orphaned(self) -> None:
        """The parent is gone; workers end by themselves once they have answered."""
        asyncio.get_running_loop().remove_reader(self._leash)
        self._is_orphan = True
        self._left()

    def _left(self) -> None:
        """A worker has ended."""
        if self._is_orphan and not any(caller.is_there for caller in self._callers):
            self._is_ending.set()


class _Held(NamedTuple):
    """A job of a worker's.

    Attributes:
        asked: as it came.
        inputs: its tensors' bytes; the job refers to them as long as the device may read them.
        future: its answer.
    """

    asked: Asked
    inputs: np.ndarray
    future: asyncio.Future[Answer]


class _Caller:
    """One worker, and its jobs that are not answered.

    A worker that is started anew takes over the region of the one before. It is told that it may
    once nothing here looks at what that one had written, or writes for it.
    """

    def __init__(
        self,
        index: int,
        engine: Engine,
        arena: Arena,
        opener: parcel.Opener,
        on_lost: Callable[[], None],
    ) -> None:
        self._index = index
        self._engine, self._arena, self._opener = engine, arena, opener
        self._on_lost = on_lost
        self._held: dict[int, _Held] = {}
        self._leaving = 0  # jobs that run for nobody
        self._channel: Channel | None = None
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def is_there(self) -> bool:
        """Whether it may ask for something."""
        return self._channel is not None and not self._channel.closed.is_set()

    async def open(self, end: socket.socket) -> None:
        """Takes its jobs from now on."""
        if self._channel is not None:  # the worker before it may not have been seen to end
            self._channel.close()
            self._lost(self._channel)
        channel = self._channel = Channel(self._take, lambda: self._lost(channel))
        while self._leaving:
            gc.collect()  # an exception's traceback may be all that still refers to a job
            await asyncio.sleep(_TURN_S)
        await channel.open(end)
        channel.send(Kind.READY)

    async def close(self) -> None:
        """Returns once its answers are on their way and its end is closed."""
        await asyncio.sleep(0)  # for what the engine has just handed over
        await asyncio.gather(*self._answering)
        if self._channel is not None and self.is_there:
            self._channel.close()
            await self._channel.closed.wait()

    def _take(self, kind: Kind, request: int, what: bytes) -> None:
        """What the worker says."""
        if kind == Kind.LEAVE:
            if (held := self._held.get(request)) is not None and held.future.cancel():
                self._let_go(request)
            return
        try:
            self._ask(request, Asked.unpack(what))
        except Exception as error:
            self._say(request, *_fault(error))

    def _ask(self, request: int, asked: Asked) -> None:
        inputs = self._arena.bytes(self._index, asked.inputs, asked.inputs_size)
        job = self._opener.open(asked.head, inputs)
        future = self._engine.submit(
            job, priority=asked.priority, wait_s=asked.wait_s, since=asked.since
        )
        self._held[request] = _Held(asked, inputs, future)
        future.add_done_callback(partial(self._done, request))

    def _done(self, request: int, future: asyncio.Future[Answer]) -> None:
        held = self._held.get(request)
        if held is None or held.future is not future or future.cancelled():
            return
        if future.exception() is None and held.asked.answer_size > _LARGE:
            task = asyncio.create_task(self._reply_large(request, held))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        else:
            del self._held[request]
            self._say(request, *self._reply(held))

    async def _reply_large(self, request: int, held: _Held) -> None:
        reply = await asyncio.to_thread(self._reply, held)
        if self._held.get(request) is held:  # else its worker has ended meanwhile
            del self._held[request]
            self._say(request, *reply)

    def _reply(self, held: _Held) -> tuple[Kind, bytes]:
        """What the worker is told, once the answer is copied to where it looks for it."""
        try:
            answer, asked = held.future.result(), held.asked
            tensors = answer.outputs.values()
            room = self._arena.bytes(self._index, asked.answer, asked.answer_size)
            places = parcel.laid_out(t.nbytes for t in tensors)
            for place, tensor in zip(places, tensors, strict=True):
                room[place] = np.frombuffer(tensor.data, np.uint8)
            return Kind.ANSWER, orjson.dumps([list(answer.outputs), answer.timing])
        except Exception as error:
            return _fault(error)

    def _say(self, request: int, kind: Kind, what: bytes) -> None:
        if self._channel is not None:
            self._channel.send(kind, request, what)

    def _let_go(self, request: int) -> None:
        """Waits for the device to have done with a job that nobody waits for."""
        inputs = self._held.pop(request).inputs
        self._leaving += 1
        told = partial(self._gone, self._channel, request)
        loop = asyncio.get_running_loop()

        def gone() -> None:
            with suppress(RuntimeError):  # the loop is closed, and this process ends
                loop.call_soon_threadsafe(told)

        weakref.finalize(inputs, gone).atexit = False

    def _gone(self, channel: Channel | None, request: int) -> None:
        self._leaving -= 1
        if channel is not None and channel is self._channel:
            channel.send(Kind.GONE, request)

    def _lost(self, channel: Channel) -> None:
        """The worker has ended: its jobs run for nobody."""
        if channel is self._channel:
            for request, held in list(self._held.items()):
                held.future.cancel()
                self._let_go(request)
            self._on_lost()


def _fault(error: Exception) -> tuple[Kind, bytes]:
    """What a worker is told of a failure; what is ours to fix is logged."""
    if not isinstance(error, QkvError):
        _log.error("a job could not be taken, or not be answered", exc_info=error)
        error = Internal("the computation failed")
    retry_after = error.retry_after if isinstance(error, NotNow) else 1
    return Kind.FAULT, orjson.dumps([error.status, error.problem(), retry_after])
