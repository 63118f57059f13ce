"""Processes of the service have one malloc heap, with any number of threads."""

from __future__ import annotations

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
PLAIN = "print(heaps())"
LIMITED = "from qkv.server import process; assert process.limit_malloc_arenas(); print(heaps())"
WORKER = """
from qkv import settings
from qkv.server import startup, supervisor
supervisor.run_worker = lambda *_: print(heaps(), flush=True)
startup.serve(settings.Settings(port=0, workers=1))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "is_one"),
    [(PLAIN, False), (LIMITED, True), (WORKER, True)],
    ids=["plain", "limited", "worker"],
)
def test_all_threads_share_one_heap(code: str, is_one: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEAPS + code],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    count = int(done.stdout)
    assert (count == 1) is is_one, done.stderr
