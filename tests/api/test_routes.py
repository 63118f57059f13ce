"""The routes of the application: they are built before the first request, with FastAPI's hooks."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

import pytest
from fastapi import routing

from qkv.api.app import create_app
from qkv.settings import Settings
from support.paths import ROOT
from support.service import Server


def test_all_routes_are_built_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI would build those of a router in its first request, which takes 0.2 s."""
    app = create_app(Settings(device="cpu", threads=1))

    def refuse(*_: Any) -> Any:
        raise AssertionError("a route is built")

    monkeypatch.setattr(routing.APIRoute, "get_route_handler", refuse)
    assert len(list(routing.iter_route_contexts(app.routes))) > 50


def test_every_test_runs_with_the_oldest_fastapi_that_is_allowed() -> None:
    (oldest,) = re.findall(r'"fastapi>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    installed = version("fastapi")
    assert installed == oldest or installed.startswith(f"{oldest}.")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("DELETE", "/v1/layers", "GET, HEAD, POST"),
        ("GET", "/v1/attention/softmax", "POST"),
        ("POST", "/livez", "GET, HEAD"),
    ],
)
def test_allow_has_the_methods_of_all_routes_of_a_path(
    server: Server, method: str, path: str, allow: str
) -> None:
    response = server.http.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == allow


def test_a_wrong_deadline_is_refused_before_the_body_is_read(server: Server) -> None:
    headers = {"X-Request-Timeout": "soon", "Content-Type": "application/json"}
    response = server.http.post("/v1/convert", content=b"{", headers=headers)
    assert response.status_code == 400
    assert "X-Request-Timeout is invalid" in response.json()["detail"]
