"""Tests that events are read as WHATWG HTML, section 9.2, says, for any end of a chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.client.event_source import EVENT_STREAM, aiter_events, iter_events
from qkv.errors import MalformedRequest


class _Chunks(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in chunks.

    Attributes:
        sent: number of chunks that the client has read.
    """

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks
        self.sent = 0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self.sent += 1
            yield chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


def response(*chunks: bytes, kind: str = EVENT_STREAM) -> httpx.Response:
    return httpx.Response(200, headers={"content-type": kind}, stream=_Chunks(*chunks))


def read(*chunks: bytes) -> list[tuple[str, str]]:
    return [(event.event, event.data) for event in iter_events(response(*chunks))]


async def read_async(*chunks: bytes) -> list[tuple[str, str]]:
    return [(event.event, event.data) async for event in aiter_events(response(*chunks))]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\n", [("message", "a")]),
        (b"data:a\n\n", [("message", "a")]),
        (b"data:  a\n\n", [("message", " a")]),  # only one space is dropped
        (b"event: cell\ndata: {}\n\n", [("cell", "{}")]),
        (b"data: {}\nevent: cell\n\n", [("cell", "{}")]),
        (b"data: YHOO\ndata: +2\ndata: 10\n\n", [("message", "YHOO\n+2\n10")]),  # the standard's
        (b": test stream\n\ndata: first event\nid: 1\n\ndata:second\nid\n\ndata:  third\n\n",
         [("message", "first event"), ("message", "second"), ("message", " third")]),
        (b"data\ndata\n\ndata:", [("message", "\n")]),
        (b"event: cell\n\ndata: a\n\n", [("message", "a")]),  # no data: no event
        (b"id: 1\n\nid: 2\n\n", []),
        (b"data: a\n", []),  # no blank line at the end
        (b"data: a", []),
        (b"retry: 10\nnonsense: 1\n: b\n\n", []),
        (b"data: a: b\n\n", [("message", "a: b")]),
        (b"\xef\xbb\xbfdata: a\n\n", [("message", "a")]),
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [("message", "a")]),  # a mark at the start only
        ("data: é\u2028\x85\x0b\n\n".encode(), [("message", "é\u2028\x85\x0b")]),  # no line ends
        (b"data: \xff\n\n", [("message", "\ufffd")]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_stream_is_parsed_by_the_rules_of_the_standard(
    stream: bytes, expected: list[tuple[str, str]], end: bytes
) -> None:
    assert read(stream.replace(b"\n", end)) == expected
    assert asyncio.run(read_async(stream.replace(b"\n", end))) == expected


LINES = st.sampled_from([b"data: a", b"data", b"event: x", b": c", b"", b"", b"data: \xc3\xa9"])
ENDS = st.sampled_from([b"\n", b"\r", b"\r\n"])


@given(st.lists(st.tuples(LINES, ENDS)), st.data())
def test_chunks_may_end_anywhere(lines: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    """Also inside a character, and between the two bytes of a line end."""
    stream = b"".join(line + end for line, end in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parts = [stream[i:j] for i, j in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    plain = stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    assert read(*parts) == read(plain)
    assert read(*(bytes([byte]) for byte in stream)) == read(plain)


def test_event_is_yielded_as_soon_as_it_ends() -> None:
    body = _Chunks(b"data: a\n", b"\n", b"data: b\r\n\r\n")
    headers = {"content-type": f"{EVENT_STREAM}; charset=latin-1"}  # it is UTF-8 all the same
    events = iter_events(httpx.Response(200, headers=headers, stream=body))
    assert next(events).data == "a"
    assert body.sent == 2
    assert next(events).data == "b"


@pytest.mark.parametrize("kind", ["text/html", "application/json; charset=utf-8", ""])
def test_other_media_type_is_an_error(kind: str) -> None:
    with pytest.raises(MalformedRequest, match="expected text/event-stream"):
        next(iter_events(response(b"data: a\n\n", kind=kind)))
