"""A bar that says how far something is, where somebody sees it: in a terminal or a notebook."""

from __future__ import annotations

import shutil
import sys
from html import escape
from typing import Any, Final, TextIO

__all__ = ["ProgressBar"]

_WIDTH: Final = 24


class ProgressBar:
    """On a terminal one line of stderr, written over again; in a notebook a bar of the page's own;
    anywhere else nothing. Once closed, it is wiped out."""

    def __init__(self) -> None:
        self._notebook_bar = _NotebookBar() if _in_notebook() else None
        self._terminal_bar = (
            _TerminalBar(sys.stderr) if self._notebook_bar is None and sys.stderr.isatty() else None
        )

    def show(self, done: int, total: int, doing: str) -> None:
        """So many of so many are done, and this one runs."""
        for bar in (self._notebook_bar, self._terminal_bar):
            if bar is not None:
                bar.show(done, total, doing)

    def close(self) -> None:
        """Nothing runs any more."""
        for bar in (self._notebook_bar, self._terminal_bar):
            if bar is not None:
                bar.clear()


class _TerminalBar:
    """The last line of a terminal."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._line_length = 0

    def show(self, done: int, total: int, doing: str) -> None:
        full = _WIDTH * done // max(total, 1)
        text = f"{'━' * full}{'╌' * (_WIDTH - full)} {done}/{total} {doing}"
        text = text[
            : shutil.get_terminal_size().columns - 1
        ]  # a line that wraps is not overwritten
        self._write(f"\r{text:{self._line_length}}")
        self._line_length = len(text)

    def clear(self) -> None:
        if self._line_length:
            self._write(f"\r{'':{self._line_length}}\r")
            self._line_length = 0

    def _write(self, text: str) -> None:
        self._terminal.write(text)
        self._terminal.flush()


class _NotebookBar:
    """An output of a notebook's cell."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, done: int, total: int, doing: str) -> None:
        bar = f'<progress value="{done}" max="{max(total, 1)}"></progress>'
        self._display(f"<div>{bar} {done}/{total} {escape(doing)}</div>")

    def clear(self) -> None:
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
