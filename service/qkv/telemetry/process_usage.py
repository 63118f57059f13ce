"""CPU time, memory and open files of the processes of the service, from Linux's /proc.

The names and meanings are those of Prometheus for `process_*`, for the service as a whole.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["ProcessUsage", "read_usage"]

# fields of /proc/PID/stat after the command's name: man page proc_pid_stat(5)
_CPU_TIMES: Final = slice(11, 13)
_CPU_TIMES_OF_EXITED: Final = slice(13, 15)
_START, _VIRTUAL_BYTES, _RESIDENT_PAGES = 19, 20, 21


class ProcessUsage(NamedTuple):
    """The usage of all processes of the service together.

    Attributes:
        cpu_seconds: user and system time, with that of processes that have exited.
        resident_bytes: memory; each process counts the pages that it shares with others.
        virtual_bytes: address space.
        open_files: the most that one process has open.
        max_files: the most that one process may have open.
        start_time: of the first process, in seconds since 1970.
    """

    cpu_seconds: float
    resident_bytes: int
    virtual_bytes: int
    open_files: int
    max_files: int
    start_time: float


def read_usage(first: int, others: Iterable[int]) -> ProcessUsage | None:
    """Returns the usage of processes; None without /proc.

    Args:
        first: id of the process that has started the others.
        others: ids of the others; one may have exited.
    """
    if (stat := _read_stat(first)) is None:
        return None
    started_after_boot_s = int(stat[_START]) / os.sysconf("SC_CLK_TCK")
    ticks = sum(map(int, stat[_CPU_TIMES_OF_EXITED]))
    stats = [stat, *filter(None, map(_read_stat, others))]
    ticks += sum(int(n) for each in stats for n in each[_CPU_TIMES])
    return ProcessUsage(
        cpu_seconds=ticks / os.sysconf("SC_CLK_TCK"),
        resident_bytes=sum(int(each[_RESIDENT_PAGES]) for each in stats) * resource.getpagesize(),
        virtual_bytes=sum(int(each[_VIRTUAL_BYTES]) for each in stats),
        open_files=max(map(_count_files, [first, *others])),
        max_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        start_time=_boot_time() + started_after_boot_s,
    )


def _read_stat(pid: int) -> list[str] | None:
    """Returns the fields after the name of a process; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _count_files(pid: int) -> int:
    """Returns the number of files that a process has open; 0 if it has exited."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def _boot_time() -> int:
    """Returns the start of the machine, in seconds since 1970."""
    lines = Path("/proc/stat").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("btime ")))
