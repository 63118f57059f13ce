"""StderrHandler: log records are written in the background, and a slow reader blocks no process."""

from __future__ import annotations

import contextlib
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
from support.processes import TIMEOUT_S, Process, killed_at_the_end, start_command, wait_until
from support.service_processes import JSON, PATH, TINY_BODY, child_pids

FAULTY: Final = """
from qkv import settings
from qkv.server import startup, worker
from qkv.api.job_runner import JobRunner
JobRunner.new_job = lambda *_: 1 / 0
raise SystemExit(startup.serve(settings.Settings(port=0, workers=1, device="cpu", threads=1)))
"""


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="opens a file below /proc")
def test_service_continues_if_stderr_is_not_read() -> None:
    """Errors are logged on the event loop, and exited workers by the supervisor."""
    reader, writer = os.pipe()
    with open(writer, "wb"), open(os.devnull, "wb") as nothing:
        service = start_command((FAULTY,), {}, nothing.fileno(), writer, "support.forked_program")
    with open(reader, "rb") as stderr:
        try:
            while not (line := stderr.readline()).startswith(b"curl "):
                assert line
            url = line.split()[1].decode().removesuffix(PATH)
            stderr_fd = os.open(f"/proc/{service.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(stderr_fd, b"\n")
            os.close(stderr_fd)
            with httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
                for _ in range(100):
                    assert http.post(PATH, content=TINY_BODY, headers=JSON).status_code == 500
                    assert http.get("/livez").status_code == 200
            (worker,) = child_pids(service.pid)
            os.kill(worker, signal.SIGKILL)
            wait_until(lambda: child_pids(service.pid) not in ([], [worker]))
            assert httpx.post(
                url + PATH, content=TINY_BODY, headers=JSON, timeout=TIMEOUT_S
            ).is_error
            with ThreadPoolExecutor(1) as pool:
                rest = pool.submit(stderr.read)
                service.terminate()
                assert service.wait(TIMEOUT_S) == 0
                assert b"a request to '/v1/attention/softmax' failed" in rest.result(TIMEOUT_S)
        finally:
            service.kill()
            service.wait()


@pytest.mark.process
def test_failing_worker_logs_its_error() -> None:
    broken = FAULTY.replace("JobRunner.new_job = ", "worker.create_app = ").replace(
        "1, device", "2, device"
    )
    process = Process((broken,), {}, module="support.forked_program")
    with killed_at_the_end(process):
        assert process.wait() == 1
    stderr = "\n".join(process.lines)
    assert "ZeroDivisionError" in stderr
    assert re.search("^[0-9T:.+-]+ ERROR worker [01] failed$", stderr, re.MULTILINE)


MANY: Final = """
import logging, sys
from qkv.telemetry.log_writer import StderrHandler
handler, log = StderrHandler(), logging.getLogger("qkv.test")
handler.start()
for i in range(20_000):
    log.warning("%d %s", i, "x" * 1000)
print("logged", flush=True)
sys.stdin.read()
log.warning("20000 last")
handler.stop()
"""


def test_number_of_dropped_messages_is_logged() -> None:
    """Logs 20 MB before the reader reads."""
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
        assert process.stdout.readline() == b"logged\n"
        future = pool.submit(process.stderr.readlines)
        process.stdin.close()
        lines = future.result(TIMEOUT_S)
    numbers = [int(line.split()[0]) for line in lines if not line.startswith(b"(")]
    matches = [re.match(rb"\((\d+) earlier messages were dropped\)$", line) for line in lines]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 20_000
    assert len(numbers) + sum(int(match[1]) for match in matches if match) == 20_001
    assert any(matches)


def test_control_characters_are_escaped(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A message keeps its own line ends; other control characters are escaped, C1 ones too."""
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
