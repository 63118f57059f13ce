"""Lets requests in before their bodies are read, or not: what is on its way counts too."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from qkv.engine.work_queue import Load
from qkv.errors import NotNow

__all__ = ["Door", "Place"]

_SLOWEST: Final = 1 << 20  # bytes a second that a body should come with, patience apart


class Door:
    """Knows of the bodies that come in; to be used on one event loop.

    Args:
        most: what may wait and come in together.
        waits: what waits now.
        retry_after: whole seconds until so much should be done.

    Attributes:
        comes: what comes in now.
        places: by whom.
        patience_s: seconds that a body may take, beside those for its size, before it counts no
            more where others want in: as many as its connection gives a part of it.
    """

    def __init__(
        self, most: Load, waits: Callable[[], Load], retry_after: Callable[[Load], int]
    ) -> None:
        self._most, self._waits, self._retry_after = most, waits, retry_after
        self.comes = Load()
        self.places: set[Place] = set()
        self.patience_s = 30.0

    def enter(self, size: int) -> Place:
        """A place for a request whose body has so many bytes, to be left once it has come.

        Raises:
            NotNow: too much waits or comes in already.
        """
        more = Load(1, size)
        if (why := self._most.exceeds(self._there, more)) is not None:
            self._forget_the_slow()
            why = self._most.exceeds(self._there, more)
        if why is not None:
            raise NotNow(why, retry_after=self._retry_after(self._there))
        return Place(self, more)

    @property
    def _there(self) -> Load:
        return self._waits().plus(self.comes)

    def _forget_the_slow(self) -> None:
        """Bodies that do not come keep nobody out for long; they may come yet."""
        now = time.perf_counter()
        for place in list(self.places):
            if now - place.since > self.patience_s + place.load.bytes / _SLOWEST:
                place.leave()


class Place:
    """Room for a request whose body comes in, from `enter` until the end of a `with`.

    Attributes:
        load: what it counts as.
        since: when it came, by `time.perf_counter`.
    """

    def __init__(self, door: Door, load: Load) -> None:
        self._door, self.load, self.since = door, load, time.perf_counter()
        door.comes = door.comes.plus(load)
        door.places.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Counts no more."""
        if self in self._door.places:
            self._door.places.remove(self)
            self._door.comes = self._door.comes.minus(self.load)

    def grow(self, size: int) -> None:
        """So many bytes have come that were not declared."""
        if self in self._door.places:
            self.load = self.load.plus(Load(0, size))
            self._door.comes = self._door.comes.plus(Load(0, size))
