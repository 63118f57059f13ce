"""The service as processes: a parent that owns the socket, workers that answer on it, and maybe one
process that has the device for all of them.

The parent forks the others, replaces one that dies, and drains them when it is told to stop. It
has torch imported and nothing started, so that a fork is a worker within a fraction of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

import click
import torch
import uvicorn
import uvloop

from qkv.api.app import create_app, most_of, new_device_process, new_fleet
from qkv.engine.engine import pick_device
from qkv.engine.remote.remote_engine import Remote
from qkv.engine.remote.shared_memory import Arena
from qkv.engine.remote.socket_handover import Exchange
from qkv.server import listener as port
from qkv.server import malloc as heap
from qkv.server.acceptor import Acceptor
from qkv.server.cpus import usable_cpus
from qkv.settings import Settings
from qkv.telemetry.stderr_logging import StandardError
from qkv.telemetry.worker_state import Fleet, Worker

__all__ = ["serve"]

_log = logging.getLogger("qkv.serve")

_TRY = """\
qkv serves on {url} ({device}, {workers}); Ctrl-C stops it. Try:
curl {url}/v1/attention/softmax --json \
'{{"inputs": {{"query": [[1,0],[0,1]], "key": [[1,0],[0,1]], "value": [[1,2],[3,4]]}}}}'"""

_GRACE_S: Final = 0.3  # after the signal, for requests on their way: they are told to go elsewhere
_TURN_S: Final = 0.05
_SURE: Final = 20  # turns that every worker is seen to hang: all of them may just have slept
_EMPTYING_S: Final = 2.0  # at most, for workers to take what waits to be accepted
_ENDING_S: Final = 10.0  # at most, for workers whose time to answer is over to end by themselves
_STOP: Final = (signal.SIGINT, signal.SIGTERM)


def serve(settings: Settings) -> int:
    """Serves until SIGINT or SIGTERM; then answers what has been accepted.

    Returns:
        The exit status: 0 after a clean stop.
    """
    _load_tracing(settings)
    heap.keep_one()
    listening = port.listen(settings.host, settings.port)
    device = _device_type(settings.device)
    workers = settings.workers or (1 if device == "cuda" else usable_cpus())
    is_apart = settings.device_process == "one" or (
        settings.device_process == "auto" and device == "cuda" and workers > 1
    )
    fleet = new_fleet(settings, workers, device_process=is_apart)
    arena = _new_arena(workers, settings.max_queue_bytes) if is_apart else None
    return _Parent(settings, listening, fleet, device, arena).run()


def _load_tracing(settings: Settings) -> None:
    """Imports what makes traces, where they are asked for: once for all workers."""
    try:
        if settings.traces:
            import_module("qkv.telemetry.tracing")
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"OTEL_* in the environment asks for traces, and {error.name} is not installed: "
            "pip install 'qkv[tracing]', or set OTEL_SDK_DISABLED=true"
        ) from None


def _new_arena(regions: int, size: int) -> Arena:
    try:
        return Arena(regions, size)
    except OSError as error:
        raise click.ClickException(
            f"{regions} times QKV_MAX_QUEUE_BYTES of memory to share cannot be had: "
            f"{error.strerror}"
        ) from None


class _Parent:
    """Starts, watches and replaces the workers, and the device process where there is an arena."""

    def __init__(
        self,
        settings: Settings,
        listening: socket.socket,
        fleet: Fleet,
        device: str,
        arena: Arena | None,
    ) -> None:
        self._settings = settings
        self._listening = listening
        self._fleet = fleet
        self._device = device
        self._arena = arena
        self._exchange = None if arena is None else Exchange(len(fleet))
        self._pids: dict[int, int] = {}  # by process id, its index in the fleet
        self._started: list[float] = [0.0] * len(fleet.processes)
        self._signals = 0
        # nobody writes: workers read its end when the parent is gone
        self._leash = os.pipe()

    def run(self) -> int:
        """Serves; returns the exit status."""
        for s in _STOP:
            signal.signal(s, self._signalled)
        # What is there now stays. Looking through it for garbage, as each process would in time,
        # takes it a fifth of a second, and copies every page of it that they share.
        gc.collect()
        gc.freeze()
        for index in reversed(self._fleet.processes):  # workers wait for the device process
            self._start(index)
        announced, hung = False, 0
        while not self._signals:
            if not announced and self._fleet.ready:
                announced = True
                self._announce()
            for index in self._reap():
                if not announced:
                    return self._give_up()
                self._restart(index)
            hung = hung + 1 if set(range(len(self._fleet))) <= set(self._fleet.stuck) else 0
            if hung > _SURE:
                port.refuse(self._listening, "every worker hangs")
            time.sleep(_TURN_S)
        return self._drain()

    def _signalled(self, *_: object) -> None:
        self._signals += 1
        if self._signals > 1:
            self._kill()
            os._exit(1)

    def _start(self, index: int) -> None:
        worker = self._fleet.worker(index)
        mailbox = self._exchange.mailbox(index) if self._exchange else None
        self._started[index] = time.monotonic()
        # a signal to a worker that is just born must end it, not run this process's handler in it
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
        pid = os.fork()
        if pid:
            self._pids[pid] = index
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)
            if self._exchange is not None and mailbox is not None:
                mailbox.close()
                self._exchange.introduce(index)
            return
        status, errors = 1, StandardError()
        try:
            errors.start()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent decides
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)
            os.close(self._leash[1])
            status = self._be(index, worker, mailbox)
        except BaseException:
            _log.exception("%s failed", self._name(index))
        finally:
            try:
                errors.stop()
            finally:
                os._exit(status)

    def _be(self, index: int, worker: Worker, mailbox: socket.socket | None) -> int:
        """What a process does that was forked, to its end."""
        settings, leash = self._settings, self._leash[0]
        if self._arena is None or self._exchange is None or mailbox is None:
            return _work(settings, self._listening, worker, None, leash)
        self._exchange.close()
        if index == len(self._fleet):
            self._listening.close()
            made = new_device_process(settings, worker, self._arena, mailbox, leash)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                is_whole = runner.run(made.run())
            return 0 if is_whole else 1
        region, device = self._arena.region(index), torch.device(self._device)
        remote = Remote(device, region, mailbox, self._fleet, most_of(settings))
        return _work(settings, self._listening, worker, remote, leash)

    def _restart(self, index: int) -> None:
        """Starts a worker anew; one that dies at once, again and again, only once a second."""
        lived = time.monotonic() - self._started[index]
        _say(f"{self._name(index)} ended after {lived:.1f} s; starting another")
        if lived < 1:
            time.sleep(1 - lived)
        self._start(index)

    def _name(self, index: int) -> str:
        return f"worker {index}" if index < len(self._fleet) else "the device process"

    def _reap(self) -> list[int]:
        """The processes that have ended."""
        ended = []
        while self._pids:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            if pid in self._pids:
                ended.append(self._pids.pop(pid))
                self._fleet.has_ended(ended[-1])
        return ended

    def _drain(self) -> int:
        """Lets the workers answer what they have accepted.

        For a moment whoever comes is still let in, to be told 503. Then nobody new is, and the
        workers take all that waits to be accepted, so that closing the port resets nothing.
        """
        self._fleet.drain()
        time.sleep(_GRACE_S)
        port.close_door(self._listening)
        end = time.monotonic() + _EMPTYING_S
        while self._pids and port.has_waiting(self._listening) and time.monotonic() < end:
            self._reap()
            time.sleep(_TURN_S)
        port.refuse(self._listening, "the service is stopping")  # what no worker took
        self._listening.close()
        end = time.monotonic() + _GRACE_S + self._settings.drain_s + _ENDING_S
        workers = range(len(self._fleet))
        for some in (workers, self._fleet.processes):  # who runs jobs ends after who asks for them
            for pid, index in self._pids.items():
                if index in some:
                    os.kill(pid, signal.SIGTERM)
            while set(self._pids.values()) & set(some) and time.monotonic() < end:
                self._reap()
                time.sleep(_TURN_S)
        late = len(self._pids)
        self._kill()
        return 1 if late else 0

    def _give_up(self) -> int:
        _say("a worker ended before it was ready; giving up")
        self._kill()
        return 1

    def _kill(self) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _announce(self) -> None:
        host, port = self._listening.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        workers = f"{len(self._fleet)} worker{'s' if len(self._fleet) > 1 else ''}"
        url = f"http://{host}:{port}"
        _say(_TRY.format(url=url, device=self._device, workers=workers))


def _say(text: str) -> None:
    """Writes to stderr. Who read it may be gone or busy, or the disk full: that ends no service."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            click.echo(text, err=True)


def _device_type(name: str) -> str:
    """The type of the device that workers will pick, asked in a fork: once this process had
    looked for a GPU, its children could not use one."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        with contextlib.suppress(BaseException):
            os.write(writer, pick_device(name).type.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        found = pipe.read().decode()
    os.waitpid(pid, 0)
    if not found:
        raise click.ClickException(f"QKV_DEVICE is {name}, and torch finds no such device")
    return found


def _work(
    settings: Settings,
    listening: socket.socket,
    worker: Worker,
    remote: Remote | None,
    leash: int,
) -> int:
    """A worker process, from fork to end."""
    app = create_app(settings, worker, remote)
    config = uvicorn.Config(
        app.state.front,
        loop="uvloop" if sys.platform != "win32" else "auto",
        http=app.state.protocol,
        lifespan="on",
        log_level="warning",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here asks where a caller is
        timeout_graceful_shutdown=settings.drain_s,
    )
    broken: asyncio.Event = app.state.engine.broken
    server = _Server(config, worker, leash, broken)
    server.run(sockets=[listening])
    return 0 if server.started and not broken.is_set() else 1


class _Server(uvicorn.Server):
    """uvicorn in a worker: says that it is ready, and refuses for a moment before it closes."""

    def __init__(
        self, config: uvicorn.Config, worker: Worker, leash: int, broken: asyncio.Event
    ) -> None:
        super().__init__(config)
        self._worker = worker
        self._leash = leash
        self._broken = broken

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])  # it listens nowhere itself: connections are brought to it
        assert sockets is not None
        (listening,) = sockets
        connections = self.server_state.connections
        self._acceptor = Acceptor(listening, self._worker, self._protocol, lambda: len(connections))
        self._acceptor.open()
        asyncio.get_running_loop().add_reader(self._leash, self._orphaned)
        self._worker.ready(True)

    async def on_tick(self, counter: int) -> bool:
        """Whether to end: as uvicorn has it, or because the device has failed for good."""
        return self._broken.is_set() or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._worker.ready(False)
        await asyncio.sleep(_GRACE_S)  # uvicorn closes what has sent nothing yet
        self._acceptor.close()
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class  # or whatever makes one
        made: asyncio.Protocol = make(self.config, self.server_state, self.lifespan.state)
        return made

    def _orphaned(self) -> None:
        """The parent is gone: nobody would replace or stop this worker."""
        asyncio.get_running_loop().remove_reader(self._leash)
        self._worker.fleet.drain()
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises the signal again after a clean stop, which would then end as a failure."""
        before = signal.signal(signal.SIGTERM, self.handle_exit)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
