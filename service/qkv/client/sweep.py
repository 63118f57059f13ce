"""Iterators over the cells of a sweep, as the service measures them.

`Client.sweep` returns a `Sweep`, `AsyncClient.sweep` an `AsyncSweep`.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from qkv.client.event_source import ServerSentEvent
from qkv.client.progress_bar import ProgressBar
from qkv.client.sweep_cells import Cell, Progress, SweepResults
from qkv.errors import MalformedRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class _SweepBase(SweepResults):
    """Results of a sweep with a progress bar; base of both iterators."""

    def __init__(self, progress: bool) -> None:
        super().__init__()
        self._bar = ProgressBar() if progress else None
        self._closed = False

    def plot(self, ax: Axes | None = None) -> Figure:
        """Draws the times against the lengths.

        Args:
            ax: axes of matplotlib to draw into; None: a new figure.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        from qkv.client.figures.sweep_plot import draw_sweep  # needs matplotlib

        return draw_sweep(self, ax)

    def _handle_event(self, event: ServerSentEvent) -> Cell | None:
        result = self.add_event(event)
        if isinstance(result, Cell):
            return result
        if self._bar is not None and isinstance(result, Progress):
            self._bar.show(result.done, result.total, f"{result.variant} at {result.length:,}")
        return None

    def _finish(self) -> None:
        self._closed = True
        if self._bar is not None:
            self._bar.close(self.finished)

    def __del__(self) -> None:
        """Removes the bar of a sweep that was not closed, such as after a `break`."""
        if not sys.is_finalizing():
            self._finish()

    def _check_finished(self) -> None:
        if not (self.finished or self._closed):
            raise MalformedRequest("the event stream of the sweep ended before the event `done`")


class Sweep(_SweepBase):
    """An iterator over the cells of a sweep.

    The sweep starts when the first cell is read. It ends when it is closed, its `with` block is
    left, or the object is deleted; then the service stops measuring. The measured cells stay in
    `cells`, `table()`, `csv()` and `plot()`, and a notebook shows them.

    Args:
        events: of the service.
        progress: True shows a progress bar in a terminal or a notebook.
    """

    def __init__(self, events: Generator[ServerSentEvent], progress: bool) -> None:
        super().__init__(progress)
        self._events = events

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Cell:
        try:
            for event in self._events:
                if (cell := self._handle_event(event)) is not None:
                    return cell
            self._check_finished()
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Ends the sweep. The measured cells stay."""
        self._events.close()
        self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncSweep(_SweepBase):
    """A `Sweep` for asyncio."""

    def __init__(self, events: AsyncGenerator[ServerSentEvent], progress: bool) -> None:
        super().__init__(progress)
        self._events = events

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Cell:
        try:
            async for event in self._events:
                if (cell := self._handle_event(event)) is not None:
                    return cell
            self._check_finished()
        except BaseException:
            await self.close()
            raise
        await self.close()
        raise StopAsyncIteration

    async def close(self) -> None:
        """Ends the sweep. The measured cells stay."""
        try:
            await self._events.aclose()
        finally:
            self._finish()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
