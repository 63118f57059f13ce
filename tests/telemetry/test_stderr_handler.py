"""What a process says of itself is written by and by, in lines of its own, and stops nobody."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import httpx
import pytest

from qkv.telemetry.log_writer import StderrHandler
from support.processes import TIMEOUT_S, wait_until
from support.service_processes import JSON, PATH, TINY_BODY, child_pids

FAULTY: Final = """
from qkv import settings
from qkv.server import supervisor, worker
from qkv.api.job_runner import JobRunner
JobRunner.new_job = lambda *_: 1 / 0
raise SystemExit(supervisor.serve(settings.Settings(port=0, workers=1, device="cpu", threads=1)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="opens what /proc names")
def test_a_service_whose_standard_error_nobody_reads_goes_on() -> None:
    """Faults are logged on the event loop, and workers that end by the parent."""
    service = subprocess.Popen([sys.executable, "-c", FAULTY], stderr=subprocess.PIPE)
    assert isinstance(service.stderr, io.BufferedReader)
    try:
        while not (line := service.stderr.readline()).startswith(b"curl "):
            assert line
        url = line.split()[1].decode().removesuffix(PATH)
        again = os.open(f"/proc/{service.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(again, b"\n")
        os.close(again)
        with httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
            for _ in range(100):
                assert http.post(PATH, content=TINY_BODY, headers=JSON).status_code == 500
                assert http.get("/livez").status_code == 200
        (worker,) = child_pids(service.pid)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: child_pids(service.pid) not in ([], [worker]))
        assert httpx.post(url + PATH, content=TINY_BODY, headers=JSON, timeout=TIMEOUT_S).is_error
        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(service.stderr.read)
            service.terminate()
            assert service.wait(TIMEOUT_S) == 0
            assert b"a request to '/v1/attention/softmax' failed" in rest.result(TIMEOUT_S)
    finally:
        service.kill()
        service.wait()
        service.stderr.close()


def test_a_worker_that_fails_says_why() -> None:
    broken = FAULTY.replace("JobRunner.new_job = ", "worker.create_app = ").replace(
        "1, device", "2, device"
    )
    ran = subprocess.run(
        [sys.executable, "-c", broken],
        stderr=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 1
    assert "ZeroDivisionError" in ran.stderr
    assert re.search("^worker [01] failed$", ran.stderr, re.MULTILINE)


MANY: Final = """
import logging, sys
from qkv.telemetry.log_writer import StderrHandler
handler, log = StderrHandler(), logging.getLogger("qkv.test")
handler.start()
for i in range(20_000):
    log.warning("%d %s", i, "x" * 1000)
print("said", flush=True)
sys.stdin.read()
log.warning("20000 last")
handler.stop()
"""


def test_how_much_was_dropped_is_said() -> None:
    """20 MB, of which nobody reads any for a while."""
    process = subprocess.Popen(
        [sys.executable, "-c", MANY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process, ThreadPoolExecutor(1) as pool:
        assert process.stdout.readline() == b"said\n"
        kept = pool.submit(process.stderr.readlines)
        process.stdin.close()
        lines = kept.result(TIMEOUT_S)
    numbers = [int(line.split()[0]) for line in lines if not line.startswith(b"(")]
    told = [re.match(rb"\((\d+) messages before this were dropped\)$", line) for line in lines]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 20_000
    assert len(numbers) + sum(int(match[1]) for match in told if match) == 20_001
    assert any(told)


def test_what_a_stranger_is_called_makes_no_lines_or_colours(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A message keeps its own lines; controls are shown, of a terminal of eight bits too."""
    handler, log = StderrHandler(), logging.getLogger("qkv.test")
    handler.start()
    try:
        log.warning("first\nsecond %s", "\x1b[31m \x9b31m \x85 \u2028 \x00 \r é")
        log.info("not this")
    finally:
        handler.stop()
    assert capfd.readouterr().err == (
        "first\nsecond \\u001b[31m \\u009b31m \\u0085 \\u2028 \\u0000 \\u000d é\n"
    )
