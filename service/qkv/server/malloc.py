"""How much of what is freed the C library's malloc keeps, in the processes of the service."""

from __future__ import annotations

import ctypes
import platform
from typing import Final

__all__ = ["keep_one"]

# malloc.h
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8

_LARGEST: Final = 32 << 20  # bytes of a block that is kept, the most there is
_KEPT: Final = 16 << 20  # free bytes at the heap's end


def keep_one() -> bool:
    """Has this process and its forks keep one heap; false where malloc is not glibc's.

    By itself glibc makes one for each thread. Bodies and answers are made in whichever thread is
    free, so that each of these heaps grows to what the largest of them ever took, and stays so:
    most of what a worker came to hold was free (docs/soak.md has the figures). Thresholds that are
    set no longer move with what comes; with these, calls are as fast as they were.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {_ARENA_MAX: 1, _MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: _KEPT}
    return all(mallopt(name, value) == 1 for name, value in settings.items())
