"""Peak memory of a script in a separate process, a fork that need not import torch.

glibc keeps freed large blocks, in amounts that vary between runs by more than the measured memory:
181 to 300 MiB instead of 88. The processes here return such blocks to the system.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Final, NamedTuple

import pytest

from support.processes import Process, killed_at_the_end

needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

# VmHWM, because ru_maxrss of a child starts at the value of its parent
_STATUS: Final = """
import sys, torch

def _status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

def start():
    global _before
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # proc(5): VmHWM begins anew
    _before = _status("VmRSS:")

def say():
    print(_status("VmHWM:"), _status("VmHWM:") - _before, flush=True)

torch.set_num_threads(2)
start()
"""
_LARGE: Final = 1 << 20  # bytes; mallopt(3), M_MMAP_THRESHOLD
_RETURN: Final = f"import ctypes; assert ctypes.CDLL(None).mallopt(-3, {_LARGE})"  # sets it


class Peak(NamedTuple):
    """Peak memory of a process, in bytes.

    Attributes:
        whole: with the interpreter and torch.
        above: beyond the memory at `start()`.
    """

    whole: int
    above: int


def peaks(script: str, *arguments: object) -> list[Peak]:
    """Runs a script in a separate process, torch with two threads; returns each `say()`'s peak.

    Args:
        script: Python code that calls `start()` once its inputs exist, and `say()` after each step.
            Another `start()` begins another peak.
        arguments: `sys.argv[1:]` of the script.
    """
    words = (f"{_RETURN}\n{_STATUS}{script}", *map(str, arguments))
    with tempfile.TemporaryFile("w+") as output:
        process = Process(words, {}, stdout=output, module="support.forked_program")
        with killed_at_the_end(process):
            status = process.popen.wait()
            process.wait()
        output.seek(0)
        return _read(status, output.read(), "\n".join(process.lines))


def peaks_of_a_new_process(script: str, *arguments: object) -> list[Peak]:
    """Returns the same of a new process, which has imported nothing."""
    done = subprocess.run(
        [sys.executable, "-c", _STATUS + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(_LARGE)},
    )
    return _read(done.returncode, done.stdout, done.stderr)


def _read(status: int, stdout: str, stderr: str) -> list[Peak]:
    assert status == 0, stderr
    found = [Peak(*map(int, line.split())) for line in stdout.splitlines()]
    assert found, "the script printed no peak"
    return found
