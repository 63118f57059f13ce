"""Remote engines of several workers, and device processes, on one event loop: real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import numpy as np

from qkv.attention.catalogue import variants
from qkv.engine.batch_verifier import BatchVerifier
from qkv.engine.engine import Engine
from qkv.engine.remote.channel import SocketBroker
from qkv.engine.remote.device_process import DeviceProcess
from qkv.engine.remote.remote_engine import RemoteEngine
from qkv.engine.remote.shared_memory import SharedMemory, WorkerRegion
from qkv.errors import ServiceUnavailable
from qkv.jobs.job import Job
from qkv.jobs.loaded.loaded_layers import NO_LAYERS, LoadedLayers
from qkv.jobs.plan import Limits, Plan
from qkv.telemetry.worker_state import SharedState
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support import engines

LIMITS: Final = Limits(response_bytes=1 << 30, job_bytes=1 << 30)


class Service:
    """The remote engines of several workers, and device processes.

    Attributes:
        engines: the engine of each device process.
        engine: the first of them.
        remotes: the remote engine of each worker.
    """

    def __init__(self, workers: int, size: int, devices: int, **options: Any) -> None:
        self._layers: LoadedLayers = options.pop("layers", NO_LAYERS)
        self.shared_state = SharedState(
            workers,
            variants=tuple(variants()),
            max_batch_size=32,
            devices=["cpu"] * devices,
            layers=self._layers.names,
        )
        self.shared_memory = SharedMemory(workers, size)
        self.socket_broker = SocketBroker(workers)
        self._regions: dict[RemoteEngine, WorkerRegion] = {}
        self._control_sockets: list[socket.socket] = []
        self._alive_pipes: list[tuple[int, int]] = []
        defaults: dict[str, Any] = {
            "max_batch": 32, "stack": True, "verifier": BatchVerifier("off"),
        }  # fmt: skip
        self._options = defaults | options
        self._processes: list[asyncio.Future[bool]] = []
        self.engines = [self.start_device(number) for number in range(devices)]
        self.engine = self.engines[0]
        self.remotes = [self.remote(index) for index in range(workers)]

    def start_device(self, number: int) -> Engine:
        """Starts a device process, or replaces it; returns its engine."""
        index = len(self.shared_state) + number
        control_socket = self.socket_broker.create_control_socket(index)
        self._control_sockets.append(control_socket)
        self._alive_pipes.append(os.pipe())
        engine = Engine(**{"device": engines.new_test_device()} | self._options)
        process = DeviceProcess(
            engine,
            self.shared_state.worker(index),
            self.shared_memory,
            control_socket,
            self._alive_pipes[-1][0],
            self._layers,
        )
        self._processes.append(asyncio.ensure_future(process.run()))
        self.socket_broker.connect(index)
        return engine

    def remote(self, index: int) -> RemoteEngine:
        """Starts the remote engine of a worker, or replaces it."""
        self._control_sockets.append(self.socket_broker.create_control_socket(index))
        region = self.shared_memory.region(index)
        remote = RemoteEngine(index, region, self._control_sockets[-1], self.shared_state)
        self._regions[remote] = region
        remote.start()
        self.socket_broker.connect(index)
        return remote

    def has_free_memory(self, remote: RemoteEngine) -> bool:
        """True if no block of a remote engine's region is allocated."""
        try:
            self._regions[remote].allocate(self.shared_memory.region_bytes)
        except ServiceUnavailable:
            return False
        return True

    async def wait_until_free(self, remote: RemoteEngine) -> None:
        """Waits until all blocks of a remote engine's region are released."""
        await until(lambda: self.has_free_memory(remote))

    async def close(self) -> None:
        """Stops as if the supervisor was killed: remote engines first."""
        for remote in self.remotes:
            await remote.stop()
        for _, supervisor_end in self._alive_pipes:
            os.close(supervisor_end)
        for running in self._processes:
            await running
        for reading_end, _ in self._alive_pipes:
            os.close(reading_end)
        for control_socket in self._control_sockets:
            control_socket.close()
        self.socket_broker.close()


def end_connection(remote: RemoteEngine, number: int = 0) -> None:
    """Closes a worker's connection to a device process, as if the process had ended."""
    # no worker closes a connection itself; the engines of these tests are in its process
    channel = remote.links[number]._channel
    assert channel is not None
    channel.close()


@asynccontextmanager
async def service(
    workers: int = 2, size: int = 64 << 20, devices: int = 1, **options: Any
) -> AsyncIterator[Service]:
    fixture = Service(workers, size, devices, **options)
    try:
        for remote in fixture.remotes:
            await remote.wait_until_ready()
            await until(lambda remote=remote: all(link.is_ready for link in remote.links))  # type: ignore[misc]
        yield fixture
    finally:
        await fixture.close()


def run(test: Callable[[Service], Awaitable[None]], *sizes: int, **options: Any) -> None:
    """Runs a test on its own event loop."""

    async def whole() -> None:
        async with service(*sizes, **options) as fixture:
            await test(fixture)

    asyncio.run(whole())


def plain(seed: int, length: int = 4, width: int = 8, **fields: Any) -> Job:
    """Returns a job of one batch item; its batch key depends on its length and width.

    Work grows with the square of the length, memory with the width too.
    """
    draw = np.random.default_rng(seed)
    tensors = {
        name: RawTensor.from_numpy(draw.normal(size=(1, 2, length, width)).astype(np.float32))
        for name in ("query", "key", "value")
    }
    return Job.new(Plan, "softmax", Message({"outputs": ["output"]} | fields, tensors), LIMITS)


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def queued_count(engine: Engine) -> int:
    return engine.queued.requests
