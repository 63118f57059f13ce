"""The priority of threads beside the event loop of their process."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

_MAX_NICENESS: Final = 19
_NICENESS: Final = 6
"""Added to that of the event loop: a quarter of its weight."""


def yield_to_event_loop() -> None:
    """Lets the event loop, and all else of this machine, go before this thread."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # only root may lower niceness, and Ray starts processes with 15
        niceness = min(os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS, _MAX_NICENESS)
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


def use_yielding_threads() -> None:
    """Lets the event loop go before threads of `asyncio.to_thread`, which copy large tensors."""
    executor = ThreadPoolExecutor(thread_name_prefix="qkv-thread", initializer=yield_to_event_loop)
    asyncio.get_running_loop().set_default_executor(executor)
