"""Settings of an operating system process: usable CPUs, and glibc's malloc.

The supervisor uses both functions before it forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from typing import Final

# malloc.h
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8

_MAX_HEAP_BLOCK_BYTES: Final = 32 << 20  # the largest threshold that glibc accepts
_MAX_FREE_BYTES: Final = 16 << 20  # at the heap's end


def usable_cpus() -> int:
    """Returns the number of CPUs that affinity and cgroup quota allow this process."""
    if not hasattr(os, "sched_getaffinity"):  # not on Linux
        return os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        with open("/sys/fs/cgroup/cpu.max") as file:  # cgroup v2; "max 100000" means no quota
            quota, period = file.read().split()
        allowed = min(allowed, max(1, round(int(quota) / int(period))))
    return allowed


def limit_malloc_arenas() -> bool:
    """Limits this process and its forks to one malloc arena; returns False without glibc.

    By default glibc creates an arena for each thread. Any free thread builds bodies and responses,
    so each arena grows to the largest of them and keeps that size: of 140 MiB that a worker kept,
    half were unused. Setting the thresholds stops glibc from adapting them; with these values calls
    take as long as before.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {
        _ARENA_MAX: 1,
        _MMAP_THRESHOLD: _MAX_HEAP_BLOCK_BYTES,
        _TRIM_THRESHOLD: _MAX_FREE_BYTES,
    }
    return all(mallopt(name, value) == 1 for name, value in settings.items())
