"""Supervisor process: forks, restarts and drains the workers.

The supervisor also forks the device processes, if there are any. It imports torch and starts no
thread, so that a forked worker is ready within a fraction of a second. `startup.serve` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import click
import uvloop

from qkv.api.app import new_device_process, queue_limits
from qkv.api_keys import ValidApiKeys
from qkv.engine.remote.channel import SocketBroker
from qkv.engine.remote.remote_engine import RemoteEngine
from qkv.engine.remote.shared_memory import SharedMemory
from qkv.errors import ServiceUnavailable, stopping
from qkv.jobs.loaded.loaded_layers import LoadedLayers
from qkv.server import listener
from qkv.server.worker import DRAIN_ACCEPT_S, DRAIN_IDLE_S, run_worker
from qkv.settings import Settings
from qkv.telemetry.log_format import LogFormatter
from qkv.telemetry.log_writer import StderrHandler
from qkv.telemetry.worker_state import SharedState, WorkerState

_log = logging.getLogger(__name__)

_TRY = """\
qkv serves on {url} ({device}, {workers}); Ctrl-C stops it. Try:
curl {url}/v1/attention/softmax {key}--json \
'{{"inputs": {{"query": [[1,0],[0,1]], "key": [[1,0],[0,1]], "value": [[1,2],[3,4]]}}}}'"""

_POLL_INTERVAL_S: Final = 0.05
# Consecutive polls with every worker stuck before the supervisor responds with 503: after the whole
# service was suspended, all heartbeats are late for a moment.
_STUCK_POLLS: Final = 20
BACKLOG_TIMEOUT_S: Final = 2.0  # for workers to accept the connections in the backlog
EXIT_TIMEOUT_S: Final = 10.0  # for workers to exit after the drain period
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """The process that forks, monitors and restarts the workers and the device processes.

    Args:
        settings: settings of the service.
        sockets: those that all workers accept from: the service's, and that of metrics if there is
            one.
        state: state shared by all processes.
        devices: names of the devices, as torch has them.
        layers: that requests may name.
        api_keys: that requests may have; None: they need none.
        shared_memory: memory of workers and device processes; None: each worker has an engine.
    """

    def __init__(
        self,
        settings: Settings,
        sockets: Sequence[socket.socket],
        state: SharedState,
        devices: Sequence[str],
        layers: LoadedLayers,
        api_keys: ValidApiKeys | None,
        shared_memory: SharedMemory | None,
    ) -> None:
        self._settings, self._sockets = settings, sockets
        self._listening = sockets[0]
        self._state = state
        self._devices, self._layers = devices, layers
        self._api_keys = api_keys
        self._shared_memory = shared_memory
        self._broker = None if shared_memory is None else SocketBroker(len(state))
        self._indices: dict[int, int] = {}  # index in the shared state, by process id
        self._started_at: list[float] = [0.0] * len(state.processes)
        self._restart_at: dict[int, float] = {}  # by index, of the processes that have exited
        self._stuck_polls = 0  # consecutive ones with every worker stuck
        self._rejections = listener.Rejections()
        self._signal_count = 0
        self._format = LogFormatter(as_json=settings.request_log == "json")
        # no process writes to it; a child reads end of file once the supervisor has exited
        self._parent_alive_pipe = os.pipe()

    def run(self) -> int:
        """Serves until a stop signal; returns the exit status."""
        for number in _STOP_SIGNALS:
            # nohup ignores SIGHUP, so that the service outlives its terminal
            is_ignored = signal.getsignal(number) is signal.SIG_IGN
            if number != signal.SIGHUP or self._reloads_keys or not is_ignored:
                signal.signal(number, self._on_signal)
        # A full collection would take a fifth of a second in each worker, and copy every page that
        # the processes share.
        gc.collect()
        gc.freeze()
        for index in reversed(self._state.processes):  # workers wait for a device process
            self._start(index)
        is_announced = False
        while not self._signal_count:
            if not is_announced and self._state.is_complete:
                is_announced = True
                self._announce()
            for index, status in self._collect_exited().items():
                if not is_announced:
                    return self._give_up(index, status)
                self._plan_restart(index, status)
            self._start_planned()
            self._reject_while_stuck()
            time.sleep(_POLL_INTERVAL_S)
        return self._drain()

    def _on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGHUP and self._reloads_keys:
            self._reload_keys()
            return
        if self._signal_count and number == signal.SIGHUP:
            return  # both the shell and the kernel send it when a terminal closes
        self._signal_count += 1
        if self._signal_count > 1:
            self._kill_all()
            os._exit(1)

    @property
    def _reloads_keys(self) -> bool:
        """True if SIGHUP says that the file of API keys has changed."""
        return self._settings.api_keys_file is not None

    def _reload_keys(self) -> None:
        """Reads the file of API keys again, and makes the workers do so."""
        assert self._api_keys is not None
        try:
            self._api_keys.reload()  # for workers that start later
        except ValueError as error:
            self._log_line(f"the API keys stay as they were: {error}", logging.ERROR)
            return
        self._signal(signal.SIGHUP, range(len(self._state)))

    def _start(self, index: int) -> None:
        worker = self._state.worker(index)
        control_socket = self._broker.create_control_socket(index) if self._broker else None
        self._started_at[index] = time.monotonic()
        # a signal to a new child must end it, not run the supervisor's handler in it
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        pid = os.fork()
        if pid:
            self._indices[pid] = index
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
            if self._broker is not None and control_socket is not None:
                control_socket.close()
                self._broker.connect(index)
            return
        status, errors = 1, StderrHandler()
        errors.setFormatter(self._format)
        try:
            errors.start()
            # Ctrl-C and a closing terminal reach all processes; only the supervisor stops by them.
            # SIGINT stays blocked, since uvicorn replaces its handler.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP, signal.SIGTERM))
            os.close(self._parent_alive_pipe[1])
            status = self._run_child(index, worker, control_socket)
        except BaseException:
            _log.exception("%s failed", self._name(index))
        finally:
            try:
                errors.stop()
            finally:
                os._exit(status)

    def _run_child(
        self, index: int, worker: WorkerState, control_socket: socket.socket | None
    ) -> int:
        """Runs a forked process to its end; returns its exit status."""
        self._rejections.close()
        if self._broker is not None:
            self._broker.close()
        if index >= len(self._state):
            assert control_socket is not None
            return self._run_device_process(index, worker, control_socket)
        remote = None
        if self._shared_memory is not None and control_socket is not None:
            region, limits = self._shared_memory.region(index), queue_limits(self._settings)
            remote = RemoteEngine(index, region, control_socket, self._state, limits)
        alive_fd = self._parent_alive_pipe[0]
        return run_worker(
            self._settings, self._sockets, worker, remote, alive_fd, self._layers, self._api_keys
        )

    def _run_device_process(
        self, index: int, worker: WorkerState, control_socket: socket.socket
    ) -> int:
        for each in self._sockets:
            each.close()
        assert self._shared_memory is not None
        device_process = new_device_process(
            self._settings,
            self._devices[index - len(self._state)],
            worker,
            self._shared_memory,
            control_socket,
            self._parent_alive_pipe[0],
            self._layers,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            is_clean = runner.run(device_process.run())
        return 0 if is_clean else 1

    def _plan_restart(self, index: int, status: int) -> None:
        """Plans to restart a process, at most once a second."""
        self._log_line(f"{self._describe_exit(index, status)}; restarting it")
        self._restart_at[index] = self._started_at[index] + 1

    def _start_planned(self) -> None:
        """Starts the processes whose time has come."""
        now = time.monotonic()
        for index in [i for i, restart_at in self._restart_at.items() if restart_at <= now]:
            del self._restart_at[index]
            self._start(index)

    def _reject_while_stuck(self) -> None:
        """Rejects new connections while every worker is stuck.

        A stuck process is ended by nobody here: `/livez` is 503 then, and whoever started the
        service restarts it. An engine whose device hangs may not end by a signal anyway.
        """
        is_stuck = set(self._state.stuck_processes).issuperset(range(len(self._state)))
        self._stuck_polls = self._stuck_polls + 1 if is_stuck else 0
        if self._stuck_polls > _STUCK_POLLS:
            self._rejections.accept(self._listening, ServiceUnavailable("every worker is stuck"))
        self._rejections.discard_received()

    def _name(self, index: int) -> str:
        if (number := index - len(self._state)) < 0:
            return f"worker {index}"
        if len(self._devices) == 1:
            return "the device process"
        return f"device process {number} ({self._devices[number]})"

    def _describe_exit(self, index: int, status: int) -> str:
        """Returns the name of a process that has exited, the reason, and how long it has lived."""
        reason = f"with status {status}"
        if status < 0:
            reason = f"by {signal.Signals(-status).name}"
        if status == -signal.SIGKILL:  # as Linux sends it to a process of a full cgroup
            reason += ", perhaps out of memory,"
        lived_s = time.monotonic() - self._started_at[index]
        return f"{self._name(index)} exited {reason} after {lived_s:.1f} s"

    def _collect_exited(self) -> dict[int, int]:
        """Returns the exit status of each process that has exited since the last call.

        By index. The status is negative if a signal has ended the process: minus its number.
        """
        exited = {}
        while self._indices:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            if pid in self._indices:
                index = self._indices.pop(pid)
                exited[index] = os.waitstatus_to_exitcode(status)
                self._state.clear_row(index)
        return exited

    def _drain(self) -> int:
        """Stops the service gracefully; returns the exit status.

        First the workers accept new connections, and serve one more request on each connection.
        Then the kernel drops new SYNs, and the workers accept the backlog, so that closing the
        socket resets no connection. Device processes accept jobs until the workers have exited.
        """
        self._state.drain()
        time.sleep(DRAIN_ACCEPT_S)
        listener.stop_accepting(self._listening)
        deadline = time.monotonic() + BACKLOG_TIMEOUT_S
        self._wait_while(
            lambda: bool(self._indices) and listener.has_pending(self._listening), deadline
        )
        # connections that no worker has accepted
        self._rejections.accept(self._listening, stopping())
        self._listening.close()
        deadline = time.monotonic() + DRAIN_IDLE_S + self._settings.drain_s + EXIT_TIMEOUT_S
        workers = range(len(self._state))
        for group in (workers, self._state.processes):  # device processes after the workers
            self._signal(signal.SIGTERM, group)
            self._wait_while(partial(self._has_any, group), deadline)
        self._wait_while(lambda: bool(self._rejections), math.inf)  # each has a deadline
        remaining_count = len(self._indices)
        self._kill_all()
        return 1 if remaining_count else 0

    def _has_any(self, group: range) -> bool:
        """Returns True if a process with one of these indices has not exited."""
        return not set(group).isdisjoint(self._indices.values())

    def _wait_while(self, condition: Callable[[], bool], deadline: float) -> None:
        """Waits until a condition does not hold any more, at most to a time of `time.monotonic`."""
        while condition() and time.monotonic() < deadline:
            self._collect_exited()
            self._rejections.discard_received()
            time.sleep(_POLL_INTERVAL_S)

    def _give_up(self, index: int, status: int) -> int:
        exit_text = self._describe_exit(index, status)
        self._log_line(f"{exit_text}, before it was ready; the service stops", logging.ERROR)
        self._kill_all()
        return 1

    def _kill_all(self) -> None:
        self._signal(signal.SIGKILL, self._state.processes)

    def _signal(self, number: signal.Signals, group: range) -> None:
        """Sends a signal to the processes with these indices."""
        for pid, index in list(self._indices.items()):
            if index in group:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.kill(pid, number)

    def _log_line(self, message: str, level: int = logging.WARNING) -> None:
        """Writes a message as the processes write theirs, but without a thread."""
        _print_line(
            self._format.format(_log.makeRecord(_log.name, level, "", 0, message, (), None))
        )

    def _announce(self) -> None:
        host, port = self._listening.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        workers = f"{len(self._state)} worker{'s' if len(self._state) > 1 else ''}"
        url = f"http://{host}:{port}"
        counts = Counter(self._devices).items()
        device = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts)
        key = '-H "Authorization: Bearer $QKV_API_KEY" ' if self._settings.has_keys else ""
        _print_line(_TRY.format(url=url, device=device, workers=workers, key=key))


def _print_line(text: str) -> None:
    """Writes to stderr; never fails or blocks because of a slow reader or a full disk."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            click.echo(text, err=True)
