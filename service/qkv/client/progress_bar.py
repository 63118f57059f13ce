"""The progress bar of a sweep, drawn by tqdm in a terminal or a notebook."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm as Tqdm

__all__ = ["ProgressBar"]


class ProgressBar:
    """A progress bar on stderr if that is a terminal, or in the output of a notebook's cell.

    Elsewhere it shows nothing. It disappears when it is closed.
    """

    def __init__(self) -> None:
        self._bar: Tqdm[Any] | None = None

    def show(self, done: int, total: int, doing: str) -> None:
        """Shows that `done` of `total` cells are measured, and `doing` is next."""
        if self._bar is None:
            from tqdm.auto import tqdm  # takes 60 ms, and chooses terminal or notebook

            # a notebook's stderr is no terminal
            disable = False if "ipykernel.zmqshell" in sys.modules else None
            self._bar = tqdm(
                desc=doing,
                total=total,
                unit="cell",
                leave=False,
                dynamic_ncols=True,
                disable=disable,
            )
        self._bar.set_description(doing, refresh=False)
        self._bar.update(done - self._bar.n)
        self._bar.refresh()

    def close(self, finished: bool = False) -> None:
        """Removes the bar. In a notebook it stays, in red, if the sweep is not finished."""
        if self._bar is not None:
            if finished and self._bar.total is not None:
                self._bar.update(self._bar.total - self._bar.n)
            self._bar.close()
