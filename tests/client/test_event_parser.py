"""Server-sent events are read as WHATWG HTML, section 9.2, says, wherever chunks end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.client.event_parser import Event, EventParser


def read(*chunks: bytes) -> list[Event]:
    events = EventParser()
    return [event for chunk in chunks for event in events.feed(chunk)]


@pytest.mark.parametrize(
    ("stream", "wanted"),
    [
        (b"data: a\n\n", [("message", "a")]),
        (b"data:a\n\n", [("message", "a")]),
        (b"data:  a\n\n", [("message", " a")]),  # one space goes, no more
        (b"event: cell\ndata: {}\n\n", [("cell", "{}")]),
        (b"data: {}\nevent: cell\n\n", [("cell", "{}")]),
        (b"data: YHOO\ndata: +2\ndata: 10\n\n", [("message", "YHOO\n+2\n10")]),  # the standard's
        (b": test stream\n\ndata: first event\nid: 1\n\ndata:second\nid\n\ndata:  third\n\n",
         [("message", "first event"), ("message", "second"), ("message", " third")]),
        (b"data\n\ndata\ndata\n\ndata:", [("message", ""), ("message", "\n")]),
        (b"event: cell\n\ndata: a\n\n", [("message", "a")]),  # a name without data is nothing
        (b"data: a\n", []),  # never ended
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
def test_the_standards_rules(stream: bytes, wanted: list[tuple[str, str]], end: bytes) -> None:
    assert read(stream.replace(b"\n", end)) == wanted


LINES = st.sampled_from([b"data: a", b"data", b"event: x", b": c", b"", b"", b"data: \xc3\xa9"])
ENDS = st.sampled_from([b"\n", b"\r", b"\r\n"])


@given(st.lists(st.tuples(LINES, ENDS)), st.data())
def test_chunks_may_end_anywhere(lines: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    """Within a letter and between the two halves of a line end too."""
    stream = b"".join(line + end for line, end in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parts = [stream[i:j] for i, j in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    plain = stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    assert read(*parts) == read(plain)
    assert read(*(bytes([byte]) for byte in stream)) == read(plain)


def test_an_event_is_told_as_soon_as_it_ends() -> None:
    events = EventParser()
    assert not [*events.feed(b"data: a\r\n")]
    assert [*events.feed(b"\r")] == [("message", "a")]
    assert not [*events.feed(b"\n")]
    assert [*events.feed(b"data: b\n\n")] == [("message", "b")]
