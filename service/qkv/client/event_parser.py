"""Server-sent events as they come in: chunks of bytes in, events out (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

__all__ = ["MEDIA_TYPE", "Event", "EventParser"]

MEDIA_TYPE: Final = "text/event-stream"

_LINE_END: Final = re.compile(b"\r\n|\n|\r")


class Event(NamedTuple):
    """What one event says.

    Attributes:
        name: "message" where it says none.
        data: its lines of data.
    """

    name: str
    data: str


class EventParser:
    """One stream of events, whose chunks may end anywhere."""

    def __init__(self) -> None:
        self._has_started = False
        self._ends_in_cr = False  # the last chunk ended in \r: a \n that comes next is part of it
        self._line_parts: list[bytes] = []  # of a line that has not ended
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """The events that end in this chunk; what never ends is no event."""
        if self._ends_in_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._ends_in_cr = False
        if not chunk:
            return
        self._ends_in_cr = chunk.endswith(b"\r")
        first, *others = _LINE_END.split(chunk)
        self._line_parts.append(first)
        for other in others:
            line = b"".join(self._line_parts).decode(errors="replace")
            self._line_parts = [other]
            if event := self._parse_line(line):
                yield event

    def _parse_line(self, line: str) -> Event | None:
        if not self._has_started:
            self._has_started, line = True, line.removeprefix("\ufeff")
        if not line:
            event = Event(self._name or "message", "\n".join(self._data)) if self._data else None
            self._name, self._data = "", []
            return event
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._name = value
        elif field == "data":
            self._data.append(value)
        return None  # ids and times to come again are for who reads on; a comment is for nobody
