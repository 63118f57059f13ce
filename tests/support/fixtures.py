"""Fixtures of all tests: services to send requests to, browsers, and replicas of Ray.

`conftest` loads them in the processes that run tests.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch

from support.added_variants import copied_package as copied_package
from support.added_variants import copied_service as copied_service
from support.added_variants import law_results as law_results
from support.browser import browser as browser
from support.browser import end_browser
from support.browser import open_page as open_page
from support.examples import load_profile
from support.javascript import modules as modules
from support.processes import Process, killed_at_the_end, running_command
from support.ray_replicas import cluster as cluster
from support.ray_replicas import end_ray
from support.ray_replicas import ray_url as ray_url
from support.service import Server, running_server

# pytest compiles it when a test first needs it. Python 3.11 counts the depth of a syntax tree for
# all threads together, so that this fails if a thread of a test compiles too (gh-106905).
importlib.import_module("anyio._backends._asyncio")

load_profile()

# pytest gives each logger that does not propagate a handler, several times a test; torch has 40.
for _name in list(logging.root.manager.loggerDict):
    if _name.startswith("torch"):
        logging.getLogger(_name).propagate = True


@pytest.hookimpl(trylast=True)  # after the fixtures of the test
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Ends the Ray and the browser that tests share, after the last one of them."""
    end_ray(nextitem)
    end_browser(nextitem)


def pytest_sessionfinish() -> None:
    """Ends them after Ctrl-C too."""
    end_ray(None)
    end_browser(None)


@pytest.fixture(autouse=True, scope="session")
def _clean_environment() -> Iterator[None]:
    """Removes settings of the user's own environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.upper().startswith(("QKV_", "OTEL_"))]:
            patch.delenv(name)
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_tls_context() -> Iterator[None]:
    """Loads the certificates for clients of httpx once: it takes 20 ms, and few tests need any."""
    with pytest.MonkeyPatch.context() as patch:
        cached = functools.cache(httpx.create_ssl_context)
        patch.setattr("httpx._transports.default.create_ssl_context", cached)
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Uses one thread of torch, beside other test processes: small tensors are slower on more."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Seeds torch, so that random numbers do not depend on earlier tests.

    `torch.manual_seed` takes 1 ms more: it notes a stack for each device that is not in use.
    """
    torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def server(_clean_environment: None) -> Iterator[Server]:
    """Returns a service with default settings, shared by all tests."""
    with running_server() as running:
        yield running


@pytest.fixture(scope="session")
def url(server: Server) -> str:
    """Returns the URL of a service with default settings."""
    return server.url


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts services with other settings: `serve(max_body_bytes=1000)`."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(running_server(**settings))


@pytest.fixture(scope="session")
def shared_process(_clean_environment: None) -> Iterator[Callable[..., Process]]:
    """Starts `qkv serve` once for each set of arguments and settings: `shared_process(QKV_A="b")`.

    Use it in tests that stop and kill no process of it, and expect no absolute counts. SIGTERM
    must end each service with status 0.
    """
    processes: dict[Any, Process] = {}
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, **environment: str) -> Process:
            key = arguments, frozenset(environment.items())
            if key not in processes:
                words = ("serve", "--port", "0", *arguments)
                is_default = not arguments and not environment  # starts as a user starts it
                started = Process(words, environment, is_forked=not is_default)
                processes[key] = stack.enter_context(killed_at_the_end(started))
                assert processes[key].url
            return processes[key]

        yield start
        for process in processes.values():
            process.popen.terminate()
        for process in processes.values():
            assert process.wait() == 0, process.lines


@pytest.fixture(scope="session")
def process(shared_process: Callable[..., Process]) -> Process:
    """Returns a process of `qkv serve --port 0` with default settings, shared by all tests."""
    return shared_process()


@pytest.fixture
def command() -> Iterator[Callable[..., Process]]:
    """Starts `qkv` with arguments and environment: `command("serve", QKV_PORT="0")`."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, **environment: str) -> Process:
            return stack.enter_context(running_command(*arguments, **environment))

        yield start


@pytest.fixture(scope="module")
def nothing_is_logged_as_an_error() -> Iterator[None]:
    """Fails if an error is logged: a response may look right while a traceback is logged."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Keep(logging.ERROR)
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)
    assert [(r.name, r.getMessage(), r.exc_info and r.exc_info[1]) for r in records] == []
