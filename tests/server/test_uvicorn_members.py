"""The undocumented members of uvicorn that the server folder uses.

pyproject.toml pins uvicorn below its next minor version. When the pin moves, these tests name each
missing member.
"""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import uvicorn
from uvicorn.protocols.http import flow_control, httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from support.paths import PACKAGE, ROOT

USED: Final[dict[str, tuple[str, ...]]] = {
    "HttpToolsProtocol": (
        "app", "config", "connection_lost", "connection_made", "connections", "cycle",
        "data_received", "expect_100_continue", "flow", "headers", "loop", "on_body",
        "on_headers_complete", "on_message_begin", "on_message_complete", "on_response_complete",
        "parser", "resume_writing", "scope", "server_state", "shutdown", "tasks",
        "timeout_keep_alive", "transport", "url",
    ),
    "FlowControl": ("drain", "pause_reading", "read_paused", "resume_reading", "write_paused"),
    "flow_control": ("FlowControl", "HIGH_WATER_LIMIT"),
    "ServerState": ("connections", "default_headers", "total_requests"),
    "Server": (
        "capture_signals", "config", "handle_exit", "lifespan", "on_tick", "run", "server_state",
        "should_exit", "shutdown", "started", "startup",
    ),
    "Config": ("http_protocol_class", "load", "loaded"),
    "httptools_impl": ("HttpToolsProtocol", "STATUS_LINE"),
}  # fmt: skip


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("no request is sent")


@pytest.fixture(scope="module")
def holders() -> dict[str, Any]:
    """Returns an object of each uvicorn class, created as uvicorn does."""

    async def start(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def make() -> dict[str, Any]:
        config = uvicorn.Config(_no_app, http="httptools", log_config=None)
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        listening = await asyncio.start_server(start, "127.0.0.1", 0)
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.create_connection(
            lambda: httptools_impl.HttpToolsProtocol(config, server.server_state, {}),
            *listening.sockets[0].getsockname(),
        )
        protocol.on_message_begin()
        protocol.on_url(b"/")
        protocol.app = _no_app
        instances = {
            "HttpToolsProtocol": protocol,
            "FlowControl": FlowControl(transport), "ServerState": ServerState(), "Server": server,
            "Config": config, "httptools_impl": httptools_impl, "flow_control": flow_control,
        }  # fmt: skip
        transport.close()
        listening.close()
        return instances

    return asyncio.run(make())


@pytest.mark.parametrize(
    ("holder", "member"), [(h, m) for h, members in USED.items() for m in members]
)
def test_uvicorn_still_has_the_member(holders: dict[str, Any], holder: str, member: str) -> None:
    assert hasattr(holders[holder], member), f"uvicorn {uvicorn.__version__}: {holder}.{member}"


def test_every_member_that_the_server_uses_is_in_the_table(holders: dict[str, Any]) -> None:
    """A member counts as used if a subclass of a uvicorn class names it on `self` or `super()`."""
    listed = set().union(*USED.values())
    missing = set()
    for path in (PACKAGE / "server").rglob("*.py"):
        for name in _members_on_self(path):
            for holder in ("HttpToolsProtocol", "Server"):
                if name in dir(holders[holder]) and name not in dir(object) and name not in listed:
                    missing.add(f"{path.name}: {name}")
    assert not missing


def _members_on_self(path: Path) -> Iterator[str]:
    text = path.read_text()
    if "uvicorn" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()"):
            yield node.attr


def test_uvicorn_is_pinned_below_the_next_minor_version() -> None:
    pin = re.search(r'"uvicorn>=0\.(\d+),<0\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert pin is not None
    least, next_minor = map(int, pin.groups())
    assert next_minor == least + 1
    assert uvicorn.__version__.startswith(f"0.{least}.")
