"""Servers to test against: in a thread of this process, and as the command runs them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import hypothesis
import pytest
import torch
import uvicorn
from fastapi import FastAPI

from qkv.api.app import create_app
from qkv.engine.engine import Engine
from qkv.settings import Settings
from support.browser import browser as browser
from support.browser import modules as modules
from support.browser import open_page as open_page

# no test is about time, and other work may run beside them
hypothesis.settings.register_profile(
    "qkv", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("qkv")

PATIENCE: Final = 60.0
"""Seconds after which what should have happened is given up; never a bound on speed."""


@dataclass(frozen=True)
class Server:
    """A service on a real socket of 127.0.0.1.

    Attributes:
        url: where.
        app: the application.
        engine: its engine, whose `hold()` keeps the device from taking jobs.
        http: a client of it, for one thread.
    """

    url: str
    app: FastAPI
    engine: Engine
    http: httpx.Client

    @property
    def address(self) -> tuple[str, int]:
        """For a plain socket."""
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    @property
    def waiting(self) -> int:
        """How many jobs wait for the device."""
        with self.engine._changed:
            return len(self.engine._queue)

    def await_waiting(self, count: int) -> None:
        """Returns once that many jobs wait."""
        until(lambda: self.waiting == count)


class Process:
    """A running `qkv` command.

    Args:
        arguments: of the command.
        environment: beside this process's own.
        stdout: where its standard output goes.

    Attributes:
        popen: the process.
        lines: what it has written on stderr, without line ends.
    """

    def __init__(
        self,
        arguments: tuple[str, ...],
        environment: dict[str, str],
        stdout: Any = None,
        module: str = "qkv",
    ) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=os.environ | {"QKV_DEVICE": "cpu", "QKV_THREADS": "1"} | environment,
            stdout=subprocess.DEVNULL if stdout is None else stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    @property
    def url(self) -> str:
        """Where it serves; waits until it says so."""
        until(lambda: self.serves or self.popen.poll() is not None)
        assert self.serves, self.lines
        (line,) = (line for line in self.lines if line.startswith("curl "))
        return line.split()[1].removesuffix("/v1/attention/softmax")

    @property
    def serves(self) -> bool:
        """Whether the line to paste has come."""
        return any(line.startswith("curl ") for line in self.lines)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal; the exit status."""
        self.popen.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """The exit status, once it has said all there is to say."""
        status = self.popen.wait(PATIENCE)
        self._listener.join(PATIENCE)
        return status

    def _listen(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr as stderr:
            for line in stderr:
                self.lines.append(line.rstrip("\n"))


def until(happened: Callable[[], bool]) -> None:
    """Waits for something that has no event to wait for."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def await_sleep(pid: int) -> None:
    """Returns once a process waits for something, where that can be told: a signal that comes
    after Python's last look at signals and before a system call is not seen until that returns."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")


@contextlib.contextmanager
def serving(**settings: Any) -> Iterator[Server]:
    """Serves from a thread of this process; `settings` are those of `Settings`."""
    settings.setdefault("device", "cpu")
    settings.setdefault("threads", 2)
    app = create_app(Settings(**settings))
    config = uvicorn.Config(
        app.state.front, loop="uvloop", http=app.state.protocol, lifespan="on", log_config=None
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=server.run, args=([listening],), name="server")
        thread.start()
        try:
            until(lambda: server.started or not thread.is_alive())
            assert server.started
            with httpx.Client(base_url=url, timeout=PATIENCE) as http:
                yield Server(url, app, app.state.engine, http)
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()


@contextlib.contextmanager
def running(*arguments: str, module: str = "qkv", **environment: str) -> Iterator[Process]:
    """Runs `qkv` with these arguments, and settings in the environment."""
    process = Process(arguments, environment, module=module)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
        process.wait()


@pytest.fixture(autouse=True, scope="session")
def _settings_of_the_tests_only() -> Iterator[None]:
    """What whoever runs the tests has set for a service of their own is not for these."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.upper().startswith(("QKV_", "OTEL_"))]:
            patch.delenv(name)
        yield


@pytest.fixture(autouse=True, scope="session")
def _two_threads() -> None:
    """On any machine: bits may depend on their number, and other tests run beside these."""
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What torch draws in a test does not depend on the tests before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def server(_settings_of_the_tests_only: None) -> Iterator[Server]:
    """A service with default settings, for every test."""
    with serving() as served:
        yield served


@pytest.fixture(scope="session")
def url(server: Server) -> str:
    """Where a service with default settings is."""
    return server.url


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts a service with other settings: `serve(max_body_bytes=1000)`."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(serving(**settings))


@pytest.fixture(scope="session")
def process(_settings_of_the_tests_only: None) -> Iterator[Process]:
    """`qkv serve --port 0` as it really runs; SIGTERM must end it with status 0."""
    with running("serve", "--port", "0") as ran:
        assert ran.url
        yield ran
        assert ran.end() == 0, ran.lines


@pytest.fixture
def command() -> Iterator[Callable[..., Process]]:
    """Starts `qkv` with arguments and environment: `command("serve", QKV_PORT="0")`."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, **environment: str) -> Process:
            return stack.enter_context(running(*arguments, **environment))

        yield start


@pytest.fixture(scope="module")
def nothing_is_logged_as_an_error() -> Iterator[None]:
    """An answer may look fine while a traceback goes to the log."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Keep(logging.ERROR)
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)
    assert [(r.name, r.getMessage(), r.exc_info and r.exc_info[1]) for r in records] == []
