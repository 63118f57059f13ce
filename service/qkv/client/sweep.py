"""A sweep as it runs: cells, one after the other, as the service measures them."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import Self

from qkv.client.event_parser import Event
from qkv.client.progress_bar import Bar
from qkv.client.sweep_cells import Cell, Cells, Progress
from qkv.errors import Unparseable

__all__ = ["AsyncSweep", "Sweep"]


class _Shown(Cells):
    """Cells, with a bar that says how many."""

    def __init__(self, progress: bool) -> None:
        super().__init__()
        self._bar = Bar() if progress else None
        self._closed = False

    def _cell(self, event: Event) -> Cell | None:
        taken = self.take(event)
        if isinstance(taken, Cell):
            return taken
        if self._bar is not None and isinstance(taken, Progress):
            self._bar.show(taken.done, taken.total, f"{taken.variant} at {taken.length:,}")
        return None

    def _end(self) -> None:
        self._closed = True
        if self._bar is not None:
            self._bar.close()

    def __del__(self) -> None:
        """Who leaves a loop lets go of it unclosed, and of its line on the terminal."""
        if not sys.is_finalizing():
            self._end()

    def _check_end(self) -> None:
        if not (self.finished or self._closed):
            raise Unparseable("the sweep ended before it was done")


class Sweep(_Shown):
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
                if (cell := self._cell(event)) is not None:
                    return cell
            self._check_end()
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Ends it; what it has measured stays."""
        self._events.close()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncSweep(_Shown):
    """The twin of `Sweep` for asyncio."""

    def __init__(self, events: AsyncGenerator[Event], progress: bool) -> None:
        super().__init__(progress)
        self._events = events

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Cell:
        try:
            async for event in self._events:
                if (cell := self._cell(event)) is not None:
                    return cell
            self._check_end()
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
            self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
