"""The CPUs of this machine that are ours."""

from __future__ import annotations

import contextlib
import os

__all__ = ["usable_cpus"]


def usable_cpus() -> int:
    """The CPUs that this process may use, by affinity and by the cgroup's quota."""
    if not hasattr(os, "sched_getaffinity"):  # not on Linux
        return os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        with open("/sys/fs/cgroup/cpu.max") as file:  # cgroup v2; "max 100000": no quota
            quota, period = file.read().split()
        allowed = min(allowed, max(1, round(int(quota) / int(period))))
    return allowed
