"""A bar that says how far something is, where somebody sees it: in a terminal or a notebook."""

from __future__ import annotations

import shutil
import sys
from html import escape
from typing import Any, Final, TextIO

__all__ = ["Bar"]

_WIDTH: Final = 24


class Bar:
    """On a terminal one line of stderr, written over again; in a notebook a bar of the page's own;
    anywhere else nothing. Once closed, it is wiped out."""

    def __init__(self) -> None:
        self._page = _Page() if _in_notebook() else None
        self._line = _Line(sys.stderr) if self._page is None and sys.stderr.isatty() else None

    def show(self, done: int, total: int, doing: str) -> None:
        """So many of so many are done, and this one runs."""
        for place in (self._page, self._line):
            if place is not None:
                place.show(done, total, doing)

    def close(self) -> None:
        """Nothing runs any more."""
        for place in (self._page, self._line):
            if place is not None:
                place.wipe()


class _Line:
    """The last line of a terminal."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._long = 0

    def show(self, done: int, total: int, doing: str) -> None:
        full = _WIDTH * done // max(total, 1)
        text = f"{'━' * full}{'╌' * (_WIDTH - full)} {done}/{total} {doing}"
        text = text[
            : shutil.get_terminal_size().columns - 1
        ]  # a line that wraps is not overwritten
        self._write(f"\r{text:{self._long}}")
        self._long = len(text)

    def wipe(self) -> None:
        if self._long:
            self._write(f"\r{'':{self._long}}\r")
            self._long = 0

    def _write(self, text: str) -> None:
        self._terminal.write(text)
        self._terminal.flush()


class _Page:
    """An output of a notebook's cell."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, done: int, total: int, doing: str) -> None:
        bar = f'<progress value="{done}" max="{max(total, 1)}"></progress>'
        self._display(f"<div>{bar} {done}/{total} {escape(doing)}</div>")

    def wipe(self) -> None:
        if self._handle is not None:
            self._display("")

    def _display(self, html: str) -> None:
        from IPython.display import HTML, display  # there, or this would be no notebook

        shown = HTML(html)
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)


def _in_notebook() -> bool:
    """Whether a kernel runs this, whose front end shows HTML; IPython in a terminal has none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")
