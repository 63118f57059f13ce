"""Messages between a worker and the device process."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from qkv.engine.remote.channel import Channel
from qkv.engine.remote.messages import JobRequest, JobResult, MessageType
from qkv.jobs.result import Result
from qkv.telemetry.times import Times


class Transport:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False


def stream_of(*messages: tuple[Any, ...]) -> bytes:
    transport, sender = Transport(), Channel(lambda *_: None)
    sender.connection_made(transport)  # type: ignore[arg-type]
    for message in messages:
        sender.send(*message)
    return transport.written


def received(stream: bytes, step: int) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    receiver = Channel(lambda kind, parts: found.append((kind, *parts)))
    for first in range(0, len(stream), step):
        receiver.data_received(stream[first : first + step])
    return found


def test_messages_survive_any_fragmentation() -> None:
    requests = tuple(
        JobRequest(1 << 40, b"key" * 5, content, 64, 1 << 40, 3, 123.456, deadline, tenant, 0.25)
        for content, deadline, tenant in (
            (b"content" * 999, None, ""),
            (None, 0.0, "a" * 64),
            (b"", 1.5, "\N{GREEK SMALL LETTER MU}"),
        )
    )
    sent = [
        (MessageType.RUN, requests),
        (MessageType.RUN, requests[:1]),
        (MessageType.CANCEL, 1 << 63),
        (MessageType.READY, "cuda:0"),
        (MessageType.ERROR, 7, 503, {"title": "full", "limit": 1 << 62}, 5, True),
        (MessageType.UNKNOWN_PLAN, 9),
    ]
    stream = stream_of(*sent)
    for step in (1, 3, 13, 14, 1000, len(stream)):
        assert received(stream, step) == sent


def test_messages_of_any_size_arrive() -> None:
    """More than msgpack buffers by default."""
    content = bytes(120 << 20)
    ((_, found),) = received(stream_of((MessageType.READY, content)), 1 << 20)
    assert len(found) == len(content)


def test_results_arrive_as_sent() -> None:
    for backend in ("", "explicit", "\N{GREEK SMALL LETTER MU}"):
        notes = (backend, "a note") if backend else ()
        results = [
            Result({}, Times(0.1, 0.2, 0.3, number, 0.5), backend, 64, device="cuda:0", notes=notes)
            for number in range(3)
        ]
        sent = [JobResult.of(number, result) for number, result in enumerate(results)]
        ((_, found),) = received(stream_of((MessageType.RESULTS, sent)), 99)
        measured = [JobResult(*each) for each in found]
        assert [each.id for each in measured] == [0, 1, 2]
        assert [asdict(each.result("cuda:0")) for each in measured] == [asdict(r) for r in results]
