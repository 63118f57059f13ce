"""Threads of this process for work that is no run: conversions, lists of layers, cases.

They are few, so that runs and other requests keep the other cores and asyncio's threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import torch
from fastapi import Request

from qkv.api.job_runner import cancel_on_disconnect
from qkv.errors import ClientDisconnected, DeadlineExceeded, ServiceUnavailable

_MAX_ACCEPTED: Final = 32
_RETRY_AFTER_S: Final = _MAX_ACCEPTED // 4  # if each takes 0.25 s, as a large right output
_LATE: Final = "the work of the request was not done in time, its deadline passed"

_T = TypeVar("_T")
Work = Callable[[Callable[[], None]], _T]
"""The work of a request. It calls its argument between its pieces: this raises to end the work."""


class WorkThreads:
    """A few threads for one kind of work.

    Work that waits ends at once if its client disconnects or its deadline passes. Work that has
    begun ends at its next piece: a thread cannot be stopped.

    Args:
        kind: of the work, for the names of the threads and messages.
        count: of threads.
    """

    def __init__(self, kind: str, count: int) -> None:
        self._kind, self._threads = kind, ThreadPoolExecutor(count, kind, use_one_core)
        self._free = asyncio.Semaphore(count)
        self._accepted = 0

    async def run(
        self, request: Request, received_at: float, wait_s: float | None, work: Work[_T]
    ) -> _T:
        """Runs the work of a request; returns once no thread does it any more.

        Args:
            request: the request; if its client disconnects, the work ends.
            received_at: time of its last byte, by `time.perf_counter`.
            wait_s: seconds from then that it may wait and work; None: no limit. Work that calls
                nothing between its pieces is completed once it has begun.
            work: the function to run.

        Raises:
            QkvError: from the work.
            ClientDisconnected: the client disconnected first.
            DeadlineExceeded: the deadline passed first.
            ServiceUnavailable: too many requests wait.
        """
        if self._accepted >= _MAX_ACCEPTED:
            text = f"{self._accepted} requests to {self._kind} wait for a thread"
            raise ServiceUnavailable(text, retry_after=_RETRY_AFTER_S)
        deadline = None if wait_s is None else received_at + wait_s
        self._accepted += 1
        pending = asyncio.ensure_future(self._run(deadline, work))
        try:
            return await cancel_on_disconnect(request, pending)
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)  # until its thread is free
            self._accepted -= 1

    async def _run(self, deadline: float | None, work: Work[_T]) -> _T:
        """Waits for a free thread and runs the work there; arguments and errors as for `run`."""
        await self._wait(deadline)
        is_cancelled = threading.Event()

        def raise_if_stopped() -> None:
            if is_cancelled.is_set():
                raise ClientDisconnected("the client disconnected during the work")
            if deadline is not None and time.perf_counter() >= deadline:
                raise DeadlineExceeded(_LATE)

        try:
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._threads, work, raise_if_stopped)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                is_cancelled.set()
                running.add_done_callback(asyncio.Future.exception)  # else asyncio logs it
                await asyncio.wait([running])  # its tensors stay admitted until the piece ends
                raise
        finally:
            self._free.release()

    async def _wait(self, deadline: float | None) -> None:
        left_s = None if deadline is None else deadline - time.perf_counter()
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded(_LATE)
        try:
            async with asyncio.timeout(left_s):
                await self._free.acquire()
        except TimeoutError:
            raise DeadlineExceeded(_LATE) from None


def use_one_core() -> None:
    """Lets torch use one core in this thread."""
    # a thread takes the number that any thread set last, when it first needs one. A number that is
    # set sooner is lost then, so the thread asks for it first. The engine sets its own for each job
    torch.get_num_threads()
    torch.set_num_threads(1)
