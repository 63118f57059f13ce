"""A sweep as it runs: cells, one after the other, as the service measures them."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import Self

from qkv.client.event_parser import Event
from qkv.client.progress_bar import ProgressBar
from qkv.client.sweep_cells import Cell, Progress, SweepResults
from qkv.errors import MalformedRequest

__all__ = ["AsyncSweep", "Sweep"]


class _SweepBase(SweepResults):
    """Results of a sweep with a progress bar; base of both iterators."""

    def __init__(self, progress: bool) -> None:
        super().__init__()
        self._bar = ProgressBar() if progress else None
        self._closed = False

    def _handle_event(self, event: Event) -> Cell | None:
        result = self.add_event(event)
        if isinstance(result, Cell):
            return result
        if self._bar is not None and isinstance(result, Progress):
            self._bar.show(result.done, result.total, f"{result.variant} at {result.length:,}")
        return None

    def _finish(self) -> None:
        self._closed = True
        if self._bar is not None:
            self._bar.close()

    def __del__(self) -> None:
        """Who leaves a loop lets go of it unclosed, and of its line on the terminal."""
        if not sys.is_finalizing():
            self._finish()

    def _check_finished(self) -> None:
        if not (self.finished or self._closed):
            raise MalformedRequest("the sweep ended before it was done")


class Sweep(_SweepBase):
    """An iterator of the cells of a sweep, which starts with the first and ends when it is closed,
    left or let go: the service then stops measuring.

    What came so far is in `cells`, `table()`, `csv()`, and a notebook shows it.

    Args:
        events: of the service.
        progress: show a bar, where there is someone to see it.
    """

    def __init__(self, events: Generator[Event], progress: bool) -> None:
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
        """Ends it; what it has measured stays."""
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
    """The twin of `Sweep` for asyncio."""

    def __init__(self, events: AsyncGenerator[Event], progress: bool) -> None:
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
        """Ends it; what it has measured stays."""
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
