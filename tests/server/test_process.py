"""A worker has one malloc heap, with any number of threads, and no old objects to collect."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

from support.processes import TIMEOUT_S

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")

HEAPS = """
import ctypes, threading, tempfile
def heaps():
    '''Returns the number of malloc heaps after eight threads have run at the same time.'''
    libc, barrier = ctypes.CDLL(None), threading.Barrier(8)
    libc.fopen.restype = ctypes.c_void_p
    def work():
        barrier.wait()
        blocks = [bytes(10_000) for _ in range(100)]
        barrier.wait()
    threads = [threading.Thread(target=work) for _ in range(8)]
    [t.start() for t in threads], [t.join() for t in threads]
    with tempfile.NamedTemporaryFile() as file:
        opened = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
        libc.malloc_info(0, opened)
        libc.fclose(opened)
        return file.read().count(b"<heap ")
"""
WORKER = """
import gc, json
from qkv import settings
from qkv.server import startup, supervisor
def work(*_):
    frozen, collectable = gc.get_freeze_count(), len(gc.get_objects())
    print(json.dumps({"frozen": frozen, "collectable": collectable, "heaps": heaps()}), flush=True)
supervisor.run_worker = work
startup.serve(settings.Settings(port=0, workers=1))
"""


def run(code: str) -> str:
    """Runs code in a new process that knows `heaps`; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", HEAPS + code],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def worker() -> dict[str, int]:
    """Returns counts of a worker of a service: of its heaps, and of its objects."""
    counts: dict[str, int] = json.loads(run(WORKER))
    return counts


@pytest.mark.process
def test_all_threads_share_one_heap(worker: dict[str, int]) -> None:
    assert int(run("print(heaps())")) > 1  # without the limit
    assert worker["heaps"] == 1


@pytest.mark.process
def test_objects_before_the_fork_are_frozen_for_gc(worker: dict[str, int]) -> None:
    """A full collection would stop a worker for a fifth of a second, and copy shared pages."""
    assert worker["frozen"] > 100_000  # most are torch's
    assert worker["collectable"] < 1000
