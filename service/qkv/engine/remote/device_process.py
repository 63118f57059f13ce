"""The process that owns the device: runs the jobs that workers write into shared memory.

The supervisor forks it and calls `DeviceProcess.run`.
"""

from __future__ import annotations

import asyncio
import signal
import socket

from qkv.engine.engine import Engine
from qkv.engine.remote.channel import receive_connection
from qkv.engine.remote.shared_memory import SharedMemory
from qkv.engine.remote.worker_link import WorkerLink
from qkv.engine.thread_priority import use_yielding_threads
from qkv.jobs.loaded.loaded_layers import NO_LAYERS, LoadedLayers
from qkv.jobs.plan_description import KnownPlans
from qkv.telemetry.worker_state import WorkerState


class DeviceProcess:
    """The process that runs the jobs of all workers, so that these form batches together.

    Args:
        engine: runs the jobs.
        worker: this process's row of the shared state.
        shared_memory: holds the tensors.
        control_socket: receives a worker's index and one end of a socket pair when it starts.
        parent_alive_fd: reads end of file once the supervisor has exited.
        layers: that jobs may name; the workers have the same.
    """

    def __init__(
        self,
        engine: Engine,
        worker: WorkerState,
        shared_memory: SharedMemory,
        control_socket: socket.socket,
        parent_alive_fd: int,
        layers: LoadedLayers = NO_LAYERS,
    ) -> None:
        self._engine, self._worker = engine, worker
        self._control_socket, self._parent_alive_fd = control_socket, parent_alive_fd
        plans = KnownPlans(layers)
        self._links = [
            WorkerLink(index, engine, shared_memory, plans, self._end_if_orphaned)
            for index in range(len(worker.shared_state))
        ]
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ending = asyncio.Event()
        self._is_orphan = False

    async def run(self) -> bool:
        """Runs jobs until SIGTERM, or until supervisor and workers have exited; sends all results.

        Returns:
            True if the device works. A permanent failure of the device ends the run too.
        """
        loop = asyncio.get_running_loop()
        use_yielding_threads()
        loop.add_signal_handler(signal.SIGTERM, self._is_ending.set)
        self._engine.start()
        heartbeat = asyncio.create_task(self._worker.run_heartbeat(self._engine.memory_usage))
        failure_watch = asyncio.create_task(self._end_on_failure())
        await self._engine.prepare(self._worker)
        loop.add_reader(self._parent_alive_fd, self._on_parent_exit)
        loop.add_reader(self._control_socket, self._on_new_connection)
        self._worker.set_ready(True)
        await self._is_ending.wait()
        self._worker.set_ready(False)
        await self._engine.stop()
        for link in self._links:
            await link.close()
        heartbeat.cancel()
        failure_watch.cancel()
        return not self._engine.failed.is_set()

    async def _end_on_failure(self) -> None:
        await self._engine.failed.wait()
        self._is_ending.set()

    def _on_new_connection(self) -> None:
        """Connects a worker that has started."""
        if (connection := receive_connection(self._control_socket)) is None:
            asyncio.get_running_loop().remove_reader(self._control_socket)
            return
        index, end = connection
        task = asyncio.create_task(self._links[index].open(end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_parent_exit(self) -> None:
        """Ends the run once all workers have exited; each exits after its last response."""
        asyncio.get_running_loop().remove_reader(self._parent_alive_fd)
        self._is_orphan = True
        self._end_if_orphaned()

    def _end_if_orphaned(self) -> None:
        """Ends the run if the supervisor and all workers have exited."""
        if self._is_orphan and not any(link.is_connected for link in self._links):
            self._is_ending.set()
