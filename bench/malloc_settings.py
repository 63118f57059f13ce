"""Settings of glibc's malloc that keep freed memory, for reproducible times."""

from __future__ import annotations

import ctypes
import platform
from typing import Final

# malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3

_MMAP_THRESHOLD_BYTES: Final = 32 << 20  # the maximum: malloc always returns larger blocks at once
_TRIM_THRESHOLD_BYTES: Final = 64 << 20  # of free memory at the end of each heap


def keep_freed_memory() -> bool:
    """Keeps freed blocks of up to 32 MiB, and up to 64 MiB at the end of each heap.

    By default malloc returns the last block of a heap to the kernel. The next block then needs new
    pages, 4 KiB at a time: 0.2 ms per MiB. The last blocks differ from run to run; this took up to
    half of the time of `mean`. The service has lower thresholds (`qkv.server.process`).

    Returns:
        False if malloc is not that of glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        and mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
    )
