"""Tests of docs/errors.md: the messages that it explains are those that users see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from support.paths import ROOT
from support.service import Server, running_server

PAGE: Final = (ROOT / "docs/errors.md").read_text()
RUN: Final = "/v1/attention/softmax"
INPUTS: Final[dict[str, Any]] = {"query": [[1, 0]], "key": [[1, 0]], "value": [[1]]}


def said(text: str) -> bool:
    """Returns True if the page has the text in bold, as a question of its own."""
    return any(line.startswith("**") and text in line for line in PAGE.splitlines())


@pytest.mark.parametrize(
    ("status", "message", "request_fields"),
    [
        (
            415,
            "Content-Type is not supported: got 'application/x-www-form-urlencoded'",
            {"content": "{}", "headers": {"Content-Type": "application/x-www-form-urlencoded"}},
        ),
        (403, "Origin is not allowed", {"json": {}, "headers": {"Origin": "http://a.example"}}),
        (
            400,
            "the body is not JSON",
            {
                "content": '{"inputs": {"query": [[NaN]]}}',
                "headers": {"Content-Type": "application/json"},
            },
        ),
        (
            422,
            "mask is ambiguous: got only the numbers 0 and 1",
            {"json": {"inputs": {**INPUTS, "mask": [[1]]}}},
        ),
        (
            422,
            "key has D=1 where query has D=2",
            {"json": {"inputs": {**INPUTS, "key": [[1]]}}},
        ),
    ],
)
def test_message_of_a_refused_request_is_on_the_page(
    server: Server, status: int, message: str, request_fields: dict[str, Any]
) -> None:
    response = server.http.post(RUN, **request_fields)
    assert response.status_code == status
    assert response.json()["detail"].startswith(message)
    assert said(f"{status}, `{message}")


def test_message_of_a_foreign_host_is_on_the_page() -> None:
    with running_server(allowed_hosts="attention.example") as server:
        response = server.http.get("/v1/variants", headers={"Host": "other.example"})
    assert response.status_code == 403
    assert response.json()["detail"].startswith("Host is not allowed")
    assert said("403, `Host is not allowed")


def qkv(*arguments: str, **variables: str) -> str:
    """Runs a command that fails; returns its message."""
    program = Path(sys.executable).with_name("qkv")
    done = subprocess.run(
        [program, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    return done.stderr.removeprefix("Error: ").strip()


@pytest.mark.slow
def test_messages_of_a_failed_start_are_on_the_page(server: Server) -> None:
    port = str(httpx.URL(server.url).port)
    message = qkv("serve", "--port", port)
    assert said(message.replace(port, "8000"))
    assert said(qkv("serve", QKV_WORKER="2"))


@pytest.mark.slow
def test_message_without_a_service_is_on_the_page() -> None:
    message = qkv("variants", QKV_URL="http://127.0.0.1:9")
    assert said(message.split(". ")[0].replace(":9'", ":8000'"))
