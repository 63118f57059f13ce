"""The bar of a sweep: on a terminal one line, in a notebook a bar of the page's, else nothing."""

from __future__ import annotations

import gc
import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from qkv import Client
from qkv.client.progress_bar import ProgressBar
from support.processes import TIMEOUT_S
from support.scripted_server import encode_event, event_reply, scripted_server


class Terminal(io.StringIO):
    """What says that it is one."""

    def isatty(self) -> bool:
        return True


def screen(written: str) -> list[str]:
    """What has stood in the last line, after each carriage return."""
    line, seen = "", []
    for part in written.split("\r"):
        line = part + line[len(part) :]
        seen.append(line.rstrip())
    return seen


def test_on_a_terminal_it_is_one_line_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    bar = ProgressBar()
    bar.show(0, 4, "softmax at 16,384")
    bar.show(3, 4, "linear at 256")
    bar.show(3, 4, "x" * 100)
    bar.close()
    bar.close()
    text = terminal.getvalue()
    assert "\n" not in text
    shown = screen(text)
    assert shown[1] == "╌" * 24 + " 0/4 softmax at 16,384"
    assert shown[2] == "━" * 18 + "╌" * 6 + " 3/4 linear at 256"
    assert max(map(len, shown)) == 59  # one that wraps could not be written over
    assert shown[-2:] == ["", ""]


def test_elsewhere_it_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar()
    bar.show(1, 2, "softmax")
    bar.close()
    assert capsys.readouterr() == ("", "")


def test_in_a_notebook_it_is_the_pages_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, html: str) -> None:
            shown.append(html)

    def display(html: str, display_id: bool) -> Handle:
        assert display_id
        assert not shown
        shown.append(html)
        return Handle()

    ipython: Any = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    ipython.display = ModuleType("IPython.display")
    ipython.display.HTML, ipython.display.display = str, display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    bar = ProgressBar()
    bar.show(0, 4, "<script>")
    bar.show(1, 4, "linear")
    bar.close()
    assert shown == [
        '<div><progress value="0" max="4"></progress> 0/4 &lt;script&gt;</div>',
        '<div><progress value="1" max="4"></progress> 1/4 linear</div>',
        "",
    ]
    ipython.get_ipython = SimpleNamespace  # IPython in a terminal has no kernel
    ProgressBar().show(0, 4, "softmax")
    assert len(shown) == 3


def test_it_goes_with_a_sweep_that_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    told = encode_event("progress", {"done": 0, "total": 1, "variant": "softmax", "length": 8})
    made = {"index": 0, "variant": "softmax", "parameters": {}, "length": 8}
    with scripted_server(event_reply(told, encode_event("cell", made), end="held")) as received:
        with Client(received.url) as client:
            for _ in client.sweep(["softmax"], [8]):
                assert "0/1 softmax at 8" in screen(terminal.getvalue())[-1]
                break
            gc.collect()
        assert screen(terminal.getvalue())[-1] == ""
        assert received.disconnected.wait(TIMEOUT_S)
