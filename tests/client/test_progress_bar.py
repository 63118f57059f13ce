"""Tests of the progress bar: one line on a terminal, a widget in a notebook, elsewhere nothing."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from qkv import Client
from qkv.client.progress_bar import ProgressBar
from support.processes import TIMEOUT_S
from support.scripted_server import encode_event, event_reply, scripted_server
from support.terminals import open_terminal


class Terminal:
    """A terminal of 60 columns.

    Attributes:
        stream: a process's end of it.
    """

    def __init__(self) -> None:
        self._screen, end = open_terminal(columns=60)
        os.set_blocking(self._screen, False)
        self.stream = os.fdopen(end, "w")
        self._text = ""

    def text(self) -> str:
        """Returns all text that was written to it."""
        self.stream.flush()
        try:
            while part := os.read(self._screen, 1 << 16):
                self._text += part.decode()
        except BlockingIOError:
            return self._text
        raise AssertionError

    def close(self) -> None:
        self.stream.close()
        os.close(self._screen)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def screens(written: str) -> list[str]:
    """Returns the content of the last line of a terminal after each carriage return."""
    line, seen = "", []
    for part in written.split("\r"):
        line = part + line[len(part) :]
        seen.append(line.rstrip())
    return seen


def test_bar_is_one_line_of_a_terminal_and_disappears(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    bar = ProgressBar()
    assert terminal.text() == ""
    bar.show(0, 4, "softmax at 16,384")
    bar.show(3, 4, "linear at 256")
    bar.show(3, 4, "x" * 100)
    bar.close()
    bar.close()
    text = terminal.text()
    assert "\n" not in text
    shown = screens(text)
    (first,) = {line for line in shown if line.startswith("softmax at 16,384:   0%")}
    (second,) = {line for line in shown if line.startswith("linear at 256:  75%")}
    assert "| 0/4 [" in first
    assert "| 3/4 [" in second
    assert 50 < max(map(len, shown)) <= 60  # a longer line would wrap and stay
    assert shown[-1] == ""


def test_bar_is_not_shown_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar()
    bar.show(1, 2, "softmax")
    bar.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("finished", [True, False])
def test_bar_is_shown_in_a_notebook(monkeypatch: pytest.MonkeyPatch, finished: bool) -> None:
    """tqdm.auto has the widget, in red if it is closed before its end."""
    bars: list[Any] = []

    class Widget:
        def __init__(self, **options: Any) -> None:
            self.options, self.n, self.total = options, 0, options["total"]
            self.calls: list[Any] = []
            bars.append(self)

        def set_description(self, text: str, refresh: bool) -> None:
            self.calls.append(text)

        def update(self, n: int) -> None:
            self.n += n

        def refresh(self) -> None:
            self.calls.append(self.n)

        def close(self) -> None:
            self.calls.append("closed")

    monkeypatch.setattr("tqdm.auto.tqdm", Widget)
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", ModuleType("ipykernel.zmqshell"))
    bar = ProgressBar()
    bar.show(0, 4, "softmax")
    bar.show(1, 4, "linear")
    bar.close(finished)
    (widget,) = bars
    assert widget.options["disable"] is False  # though its stderr is no terminal
    assert widget.calls == ["softmax", 0, "linear", 1, "closed"]
    assert widget.n == (4 if finished else 1)


def test_bar_disappears_with_a_deleted_sweep(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    started = encode_event("progress", {"done": 0, "total": 1, "variant": "softmax", "length": 8})
    cell = {"index": 0, "variant": "softmax", "parameters": {}, "length": 8}
    with scripted_server(event_reply(started, encode_event("cell", cell), end="held")) as received:
        with Client(received.url) as client:
            for _ in client.sweep(["softmax"], [8]):
                assert screens(terminal.text())[-1].startswith("softmax at 8:   0%")
                break
            gc.collect()
        assert screens(terminal.text())[-1] == ""
        assert received.disconnected.wait(TIMEOUT_S)
