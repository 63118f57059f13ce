"""The progress bar of a sweep or a comparison, drawn by tqdm in a terminal or a notebook."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm as Tqdm


class ProgressBar:
    """A progress bar on stderr if that is a terminal, or in the output of a notebook's cell.

    Elsewhere it shows nothing. It disappears when it is closed.

    Args:
        unit: name of one step.
    """

    def __init__(self, unit: str = "cell") -> None:
        self._unit = unit
        self._bar: Tqdm[Any] | None = None

    def show(self, done: int, total: int, doing: str) -> None:
        """Shows that `done` of `total` steps are done, and `doing` is next."""
        if self._bar is None:
            from tqdm.auto import tqdm  # takes 60 ms, and chooses terminal or notebook

            # a notebook's stderr is no terminal
            disable = False if "ipykernel.zmqshell" in sys.modules else None
            self._bar = tqdm(
                desc=doing,
                total=total,
                unit=self._unit,
                leave=False,
                dynamic_ncols=True,
                disable=disable,
            )
        self._bar.set_description(doing, refresh=False)
        self._bar.update(done - self._bar.n)
        self._bar.refresh()

    def close(self, finished: bool = False) -> None:
        """Removes the bar. In a notebook it stays, in red, if not all is finished."""
        if self._bar is not None:
            if finished and self._bar.total is not None:
                self._bar.update(self._bar.total - self._bar.n)
            self._bar.close()
