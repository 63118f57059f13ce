"""Bodies and responses are in memory once between socket and torch.

Measured on requests of 64 MiB; the client is another process."""

from __future__ import annotations

import json as stdlib
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from qkv.api import request_body
from qkv.api.request_body import Chunk, TensorResponse
from qkv.engine import executor, forward
from qkv.tensors import RawTensor
from qkv.wire import open_inference, safetensors
from qkv.wire.message import Message
from support.known_requests import Array
from support.processes import TIMEOUT_S
from support.service import Server

MiB: Final = 1 << 20
BODY: Final = 64 * MiB
SMALL: Final = 8 * MiB
"""Bytes allowed for other memory: chunks of the socket, messages, Python itself."""

ROWS, WIDTH = BODY // 256, 64  # of queries; with one key the response has the same size
TENSORS: Final = "application/vnd.safetensors"
CLIENT: Final = """
import http.client, json, sys
host, port, path, headers, content, answer, chunked = sys.argv[1:]
with open(content, "rb") as file:
    whole = file.read()
pieces = (whole[i : i + 100_000] for i in range(0, len(whole), 100_000))
connection = http.client.HTTPConnection(host, int(port))
connection.request("POST", path, pieces if chunked else whole, json.loads(headers),
                   encode_chunked=bool(chunked))
came = connection.getresponse()
with open(answer, "wb") as file:
    file.write(came.read())
print(json.dumps([came.status, dict(came.getheaders())]))
"""


@dataclass
class Seen:
    """The memory of one request.

    Attributes:
        buffers: address and size of each buffer that received a body.
        arguments: address of each argument of the variant.
        result: address and size of the variant's output.
        sent: address and size of each chunk of the response.
        traced: peak bytes of Python and numpy, beyond those before.
        resident: the same for the process, with torch; None if it is unknown.
    """

    buffers: list[tuple[int, int]] = field(default_factory=list)
    arguments: dict[str, int] = field(default_factory=dict)
    result: tuple[int, int] = (0, 0)
    sent: list[tuple[int, int]] = field(default_factory=list)
    traced: int = 0
    resident: int | None = None


def place(buffer: Chunk) -> tuple[int, int]:
    return np.frombuffer(buffer, np.uint8).ctypes.data, len(buffer)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The measurements of a request to a service in this process."""
    seen = Seen()
    aligned, call_variant = request_body._new_aligned_buffer, forward.call_variant
    going = TensorResponse.__init__

    def spy_aligned(size: int, at: int) -> memoryview:
        buffer = aligned(size, at)
        seen.buffers.append(place(buffer))
        return buffer

    def spy_call_variant(job: Any, tensors: dict[str, Any], *others: Any) -> Any:
        seen.arguments = {n: t.data_ptr() for n, t in tensors.items()}
        passed = call_variant(job, tensors, *others)
        output = passed[0]["output"]
        seen.result = output.data_ptr(), output.nbytes
        return passed

    def spy_going(self: TensorResponse, chunks: Sequence[Chunk], *args: Any) -> None:
        seen.sent = [place(chunk) for chunk in chunks]
        going(self, chunks, *args)

    # private: only the addresses of its buffers show that tensors are not copied
    monkeypatch.setattr(request_body, "_new_aligned_buffer", spy_aligned)
    monkeypatch.setattr(executor, "call_variant", spy_call_variant)
    monkeypatch.setattr(TensorResponse, "__init__", spy_going)
    return seen


def resident(most: bool) -> int | None:
    """Returns the resident bytes of the process, or their peak since `forget` (Linux only)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("VmHWM" if most else "VmRSS")]
    return 1024 * int(found[0]) if found else None


def forget() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak
    except OSError:
        return False
    return True


def ask(
    server: Server,
    seen: Seen,
    folder: Path,
    path: str,
    chunks: Sequence[Chunk],
    headers: Mapping[str, str],
    chunked: bool = False,
) -> tuple[dict[str, str], bytes]:
    """Posts a body from another process; returns the response's headers and body."""
    with (folder / "content").open("wb") as file:
        file.writelines(chunks)
    host, port = server.address
    command = [sys.executable, "-c", CLIENT, host, str(port), path, stdlib.dumps(dict(headers))]
    command += [str(folder / "content"), str(folder / "answer"), "1" if chunked else ""]
    is_known, before = forget(), resident(most=False)
    tracemalloc.start()
    try:
        process = subprocess.run(command, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True)
        seen.traced = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    after = resident(most=True)
    if is_known and before is not None and after is not None:
        seen.resident = after - before
    status, named = stdlib.loads(process.stdout)
    assert status == 200
    return {n.lower(): v for n, v in named.items()}, (folder / "answer").read_bytes()


def large(**first: Array) -> dict[str, RawTensor]:
    row = np.arange(WIDTH, dtype="f4")
    arrays = {
        **first,
        "query": np.broadcast_to(row / 7, (1, 1, ROWS, WIDTH)),
        "key": row.reshape(1, 1, 1, -1),
        "value": row.reshape(1, 1, 1, -1) - 5,
    }
    return {name: RawTensor.from_numpy(a) for name, a in arrays.items()}


def check(output: Array) -> None:
    """With one key every row is that key's value."""
    assert output.shape == (1, 1, ROWS, WIDTH)
    assert (output == np.arange(WIDTH, dtype="f4") - 5).all()


def over_v2(
    server: Server, seen: Seen, folder: Path, tensors: dict[str, RawTensor], chunked: bool = False
) -> None:
    message = Message({"parameters": {"binary_data_output": True}}, tensors)
    chunks, length = open_inference.encode(message, "inputs", tensors.keys())
    headers = {
        open_inference.LENGTH_HEADER: str(length),
        "Content-Type": "application/octet-stream",
    }
    path = "/v2/models/softmax/infer"
    named, response = ask(server, seen, folder, path, chunks, headers, chunked)
    length = open_inference.json_length(named[open_inference.LENGTH_HEADER.lower()])
    check(open_inference.decode(response, "outputs", length).tensors["output"].numpy())


def over_safetensors(
    server: Server, seen: Seen, folder: Path, tensors: dict[str, RawTensor], chunked: bool = False
) -> None:
    chunks = safetensors.encode(Message({"outputs": ["output"]}, tensors), "inputs")
    headers = {"Content-Type": TENSORS}
    path = "/v1/attention/softmax"
    _, response = ask(server, seen, folder, path, chunks, headers, chunked)
    check(safetensors.decode(response, "outputs").tensors["output"].numpy())


PROTOCOLS: Final[dict[str, Callable[..., None]]] = {"v2": over_v2, "safetensors": over_safetensors}


def check_sent(seen: Seen) -> None:
    """Asserts that the response was sent from the variant's output."""
    assert seen.result[1] == BODY
    assert seen.result in seen.sent
    assert sum(size for _, size in seen.sent) - BODY < SMALL


def is_within(seen: Seen, name: str) -> bool:
    ((first, size),) = seen.buffers
    return first <= seen.arguments[name] < first + size


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_body_is_in_memory_once(server: Server, seen: Seen, tmp_path: Path, protocol: str) -> None:
    PROTOCOLS[protocol](server, seen, tmp_path, large())
    assert len(seen.buffers) == 1
    assert all(is_within(seen, n) for n in ("query", "key", "value"))
    assert seen.arguments["query"] % 64 == 0  # the first tensor is aligned in the body
    assert seen.arguments["query"] - seen.buffers[0][0] < SMALL
    check_sent(seen)
    assert BODY <= seen.traced < BODY + SMALL  # numpy allocates the body, torch the response
    if seen.resident is not None:  # the body, the response, and no copies
        assert seen.resident < 2 * BODY + BODY // 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_unaligned_tensor_is_copied_once(
    server: Server, seen: Seen, tmp_path: Path, protocol: str
) -> None:
    tensors = large(mask=np.ones((1, 1), bool))  # one byte, then the queries
    PROTOCOLS[protocol](server, seen, tmp_path, tensors)
    assert not is_within(seen, "query")
    assert seen.arguments["query"] % 64 == 0
    check_sent(seen)
    assert BODY <= seen.traced < BODY + SMALL
    if seen.resident is not None:
        assert seen.resident < 3 * BODY + BODY // 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_body_of_unknown_length_is_in_memory_at_most_twice(
    server: Server, seen: Seen, tmp_path: Path, protocol: str
) -> None:
    """It is copied to an aligned buffer after the last chunk."""
    PROTOCOLS[protocol](server, seen, tmp_path, large(), chunked=True)
    assert all(is_within(seen, n) for n in ("query", "key", "value"))
    assert seen.arguments["query"] % 64 == 0
    check_sent(seen)
    assert seen.traced < 2 * BODY + SMALL
