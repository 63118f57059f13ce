"""How glibc's malloc keeps what is freed: not by luck, while calls are timed."""

from __future__ import annotations

import ctypes
import platform
from typing import Final

__all__ = ["keep_freed"]

# malloc.h
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3

_LARGEST_KEPT: Final = 32 << 20  # the most there is: larger blocks always go back at once
_KEPT: Final = 64 << 20  # of free memory at the end of each heap


def keep_freed() -> bool:
    """Keeps freed blocks of up to 32 MiB for the next of that size, and up to 64 MiB of them at the
    end of each heap; false where malloc is not glibc's.

    By itself malloc gives a block back as soon as it is the last of its heap, and the next one
    comes anew, 4 KiB at a time: 0.2 ms for each MiB. Which blocks are the last is luck, and was up
    to half of what `mean` took. The service has thresholds of its own (`qkv.server.process`): it keeps less.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT) and mallopt(_TRIM_THRESHOLD, _KEPT))
