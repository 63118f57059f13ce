"""What a process of its own holds at most: for tests of what is never held.

glibc keeps large blocks that were freed, in pieces that differ from run to run by more than what is
held: 181 to 300 MiB were seen where 88 were. Its processes here give them back.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final, NamedTuple

import pytest

needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

# VmHWM, because ru_maxrss of a child starts at what its parent had
_STATUS: Final = """
import sys, torch

def _status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

def start():
    global _before
    _before = _status("VmRSS:")

def say():
    print(_status("VmHWM:"), _status("VmHWM:") - _before, flush=True)

torch.set_num_threads(2)
start()
"""
_LARGE: Final = 1 << 20  # bytes; mallopt(3), M_MMAP_THRESHOLD


class Peak(NamedTuple):
    """Bytes that a process held at most, so far.

    Attributes:
        whole: the interpreter and torch included.
        above: what `start` found.
    """

    whole: int
    above: int


def peaks(script: str, *arguments: object) -> list[Peak]:
    """Runs Python in a process of its own, torch with two threads; the peak at each `say()`.

    Args:
        script: it may call `start()` where its inputs are there, and `say()` after each step.
        arguments: what it finds in `sys.argv`.
    """
    done = subprocess.run(
        [sys.executable, "-c", _STATUS + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(_LARGE)},
    )
    assert done.returncode == 0, done.stderr
    found = [Peak(*map(int, line.split())) for line in done.stdout.splitlines()]
    assert found, "the script said nothing"
    return found
