"""Load generator: sends requests in turn over open connections, from processes of its own.

It compares every response with the expected bytes and reads the timing in it. Common load
generators only count bytes.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import itertools
import pickle
import random
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvloop

PROCESSES: Final = 2  # client processes; a small request takes one of them about 50 us of CPU
WARM_UP: Final = 5  # requests
MIN_RESPONSES: Final = 3  # regardless of the duration

STAGES: Final = (b"queue", b"transfer", b"compute", b"total")
_STAGE: Final = re.compile(rb'(queue|transfer|compute|total)_ms\\?":([0-9.e+-]+)')
_LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
_STATUS_OK: Final = b"HTTP/1.1 200 "
ID_DIGITS: Final = 12
NO_ID: Final = "0" * ID_DIGITS
"""The id in a body that gets a new id each time it is sent."""

_waiting: Final[list[subprocess.Popen[bytes]]] = []
"""Client processes of earlier loads, for the next ones: to start one takes 0.2 s of CPU."""


@dataclass(frozen=True)
class BenchRequest:
    """A request, and the bytes that every response to it has.

    Attributes:
        path: path of the POST request.
        headers: the headers without Content-Length.
        body: the body.
        expected_bytes: the tensors, as the first or last bytes of the response body.
        is_at_end: True if they are the last bytes.
        id_offset: index in the body of `NO_ID`, which the client replaces by a new number each
            time; -1: there is none.
    """

    path: str
    headers: Mapping[str, str]
    body: bytes
    expected_bytes: bytes = b""
    is_at_end: bool = False
    id_offset: int = -1


class LoadInstructions(NamedTuple):
    """Instructions for a client process.

    Attributes:
        host, port: address of the service.
        requests: the requests, sent in turn.
        first: index of the first one that this process sends.
        connections: number of open connections.
        in_flight: number of them with a request in flight; the others are idle.
        duration_s: duration of the measurement.
    """

    host: str
    port: int
    requests: Sequence[BenchRequest]
    first: int
    connections: int
    in_flight: int
    duration_s: float


class ResponseTiming(NamedTuple):
    """Times of a response: measured by the client, and of the stages in the response."""

    latency_ms: float
    queue_ms: float
    transfer_ms: float
    compute_ms: float
    total_ms: float

    @property
    def added_ms(self) -> float:
        """Milliseconds without the attention itself."""
        return self.latency_ms - self.compute_ms


class LoadResult(NamedTuple):
    """Responses of a measurement.

    Attributes:
        timings: of all responses.
        rate: responses per second.
        cpu_s: CPU time of the client processes.
    """

    timings: list[ResponseTiming]
    rate: float
    cpu_s: float = 0.0


def load(
    address: tuple[str, int],
    requests: BenchRequest | Sequence[BenchRequest],
    duration_s: float,
    connections: int = 1,
    in_flight: int = 0,
) -> LoadResult:
    """Sends requests in turn, after a warm-up that uses every connection.

    Args:
        address: host and port of the service.
        requests: the request, or several: each client process starts at another one.
        duration_s: duration; responses to requests in flight at its end are received too.
        connections: number of open connections.
        in_flight: number of them with a request in flight; 0: all.

    Raises:
        RuntimeError: a response was wrong.
    """
    requests = (requests,) if isinstance(requests, BenchRequest) else requests
    in_flight = in_flight or connections
    count = min(PROCESSES, in_flight)
    processes = [_take_process() for _ in range(count)]
    try:
        for i, process in enumerate(processes):
            first = i * len(requests) // count
            own = [len(range(i, total, count)) for total in (connections, in_flight)]
            instructions = LoadInstructions(*address, requests, first, own[0], own[1], duration_s)
            _send(process, instructions)
        for process in processes:
            _receive(process)
        for process in processes:
            _send(process, "go")
        results: list[LoadResult] = [_receive(process) for process in processes]
    except BaseException:
        _end(processes)
        raise
    _waiting.extend(processes)
    return LoadResult(
        [timing for result in results for timing in result.timings],
        sum(result.rate for result in results),
        sum(result.cpu_s for result in results),
    )


def _take_process() -> subprocess.Popen[bytes]:
    """Returns a client process that waits, or a new one."""
    while _waiting:
        process = _waiting.pop()
        if process.poll() is None:
            return process
    # Not as __main__, because it pickles classes of this module.
    command = [sys.executable, "-c", "import load; load.main()"]
    here, pipe = Path(__file__).parent, subprocess.PIPE
    return subprocess.Popen(command, cwd=here, stdin=pipe, stdout=pipe)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


atexit.register(_end, _waiting)


def _send(process: subprocess.Popen[bytes], message: Any) -> None:
    """Sends a message to a client process."""
    assert process.stdin is not None
    pickle.dump(message, process.stdin)
    process.stdin.flush()


def _receive(process: subprocess.Popen[bytes]) -> Any:
    """Receives a message from a client process."""
    assert process.stdout is not None
    try:
        message = pickle.load(process.stdout)
    except EOFError:
        raise RuntimeError("a client process has failed; its error is above") from None
    if isinstance(message, RuntimeError):
        raise RuntimeError(f"a client process has failed: {message}")
    return message


class _Connection(asyncio.Protocol):
    """One connection, and the response that it receives."""

    def __init__(self, client: LoadClient) -> None:
        self._client = client
        self._buffer = bytearray()
        self._response_bytes: int | None = None

    def connection_made(self, transport: Any) -> None:  # uvloop has its own class
        self._transport = transport

    def send_request(self) -> None:
        self.request, chunks = self._client.next_request()
        self._sent_at = time.perf_counter()
        self._transport.writelines(chunks)

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._response_bytes is None:
            if (end := self._buffer.find(b"\r\n\r\n")) < 0:
                return
            length = _LENGTH.search(self._buffer, 0, end)
            self._head_bytes = end + 4
            self._response_bytes = self._head_bytes + (int(length[1]) if length else 0)
        if len(self._buffer) >= self._response_bytes:
            now, response = time.perf_counter(), self._buffer
            self._buffer, self._response_bytes = bytearray(), None
            latency_ms = (now - self._sent_at) * 1e3
            self._client.on_response(self, latency_ms, response, self._head_bytes)

    def connection_lost(self, error: Exception | None) -> None:
        self._client.fail(f"connection lost: {error}")


class LoadClient:
    """The connections of a client process."""

    def __init__(self, instructions: LoadInstructions) -> None:
        requests, first = instructions.requests, instructions.first
        ordered = [*requests[first:], *requests[:first]]
        self._next = itertools.cycle([(r, encode_request(r, instructions.host)) for r in ordered])
        self._ids = itertools.count(random.randrange(10 ** (ID_DIGITS - 1)))
        self._instructions = instructions

    def next_request(self) -> tuple[BenchRequest, Sequence[bytes]]:
        """Returns a request, and its bytes with a new id."""
        request, (before, after) = next(self._next)
        if request.id_offset < 0:
            return request, (before,)
        return request, (before, b"%0*d" % (ID_DIGITS, next(self._ids)), after)

    async def run(self) -> None:
        """Warms up, reports that it is ready, waits for the start, and reports the responses.

        At the end it closes the connections.
        """
        instructions, loop = self._instructions, asyncio.get_running_loop()
        self._idle: deque[_Connection] = deque()
        for _ in range(instructions.connections):
            _, connection = await loop.create_connection(
                lambda: _Connection(self), instructions.host, instructions.port
            )
            self._idle.append(connection)
        await self._send_requests(0.0, max(WARM_UP, instructions.connections))
        _report("ready")
        pickle.load(sys.stdin.buffer)
        result = await self._send_requests(instructions.duration_s, MIN_RESPONSES)
        for connection in self._idle:
            connection.close()
        _report(result)

    async def _send_requests(self, duration_s: float, min_responses: int) -> LoadResult:
        """Returns the responses of this process; at the end waits for those in flight."""
        self._timings: list[ResponseTiming] = []
        self._completion = asyncio.get_running_loop().create_future()
        self._in_flight, self._min_responses = self._instructions.in_flight, min_responses
        start, cpu_start = time.perf_counter(), time.process_time()
        self._end = start + duration_s
        for _ in range(self._in_flight):
            self._idle.popleft().send_request()
        await self._completion
        rate = len(self._timings) / (time.perf_counter() - start)
        return LoadResult(self._timings, rate, time.process_time() - cpu_start)

    def on_response(
        self, connection: _Connection, latency_ms: float, response: bytearray, head_bytes: int
    ) -> None:
        """Checks and records a response; the longest idle connection sends the next request."""
        request = connection.request
        size = len(request.expected_bytes)
        tensors = len(response) - size if request.is_at_end else head_bytes
        rest = (head_bytes, tensors) if request.is_at_end else (head_bytes + size, len(response))
        has_tensors = response[tensors : tensors + size] == request.expected_bytes
        if not (response.startswith(_STATUS_OK) and has_tensors):
            self.fail(f"wrong response: {bytes(response[:600])!r}")
            return
        stages = {name: float(value) for name, value in _STAGE.findall(response, *rest)}
        self._timings.append(ResponseTiming(latency_ms, *(stages[stage] for stage in STAGES)))
        self._idle.append(connection)
        if time.perf_counter() < self._end or len(self._timings) < self._min_responses:
            self._idle.popleft().send_request()
            return
        self._in_flight -= 1
        if not self._in_flight:
            self._completion.set_result(None)

    def fail(self, reason: str) -> None:
        """Ends the measurement with an error."""
        if not self._completion.done():
            self._completion.set_exception(RuntimeError(reason))


def _report(message: Any) -> None:
    """Sends a message from a client process to the process that started it."""
    pickle.dump(message, sys.stdout.buffer)
    sys.stdout.flush()


def encode_request(request: BenchRequest, host: str) -> tuple[bytes, bytes]:
    """Returns the bytes of a request before and after its id; all are before if it has none."""
    headers = {"Host": host, "Content-Length": len(request.body), **request.headers}
    lines = [f"POST {request.path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    head, at = "\r\n".join([*lines, "", ""]).encode(), request.id_offset
    if at < 0:
        return head + request.body, b""
    return head + request.body[:at], request.body[at + ID_DIGITS :]


def main() -> None:
    """Runs a client process: reads instructions from stdin and writes responses to stdout."""
    while True:
        try:
            uvloop.run(LoadClient(pickle.load(sys.stdin.buffer)).run())
        except EOFError:
            return
        except RuntimeError as error:
            _report(error)
        gc.collect()  # bodies may have hundreds of MiB
