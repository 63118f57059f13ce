"""Requests by their source: pages of other origins cannot act, and other hosts are not served."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest
from fastapi import FastAPI

from qkv.api.app import create_app
from qkv.settings import Settings
from support.known_requests import assert_problem
from support.service import Server, running_server

RUN: Final = "/v1/attention/softmax"
UNLOAD: Final = "/v2/repository/models/taylor/unload"
ACTING: Final = (
    *(RUN, "/v1/gradients/softmax", "/v1/compare", "/v1/sweep", "/v1/convert", "/v1/layers"),
    *("/v1/verify/softmax", "/v2/models/taylor/infer", "/v2/models/taylor/versions/1/infer"),
    *(UNLOAD, "/v2/repository/models/taylor/load", "/nowhere"),
)
OTHERS: Final[tuple[dict[str, str], ...]] = (
    {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
    {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
)
"""Headers of requests from pages of other origins."""
BODY: Final = {"inputs": {name: [[1, 0], [0, 1]] for name in ("query", "key", "value")}}
PAGE: Final = "https://pages.example"


@pytest.fixture(scope="module")
def local() -> Iterator[Server]:
    """A service on a loopback address, with one allowed origin and one allowed host."""
    with running_server(cors_origins=PAGE, allowed_hosts="attention.example, [fd00::1]") as server:
        yield server


def is_refused(response: httpx.Response) -> bool:
    """Returns True if a response is 403 in the error format of its path."""
    if response.status_code != 403:
        return False
    if response.request.url.path.startswith("/v2"):
        assert list(response.json()) == ["error"]
    else:
        assert_problem(response, 403)
    assert "access-control-allow-origin" not in response.headers
    return True


@pytest.mark.parametrize(
    ("path", "source"),
    [*((path, OTHERS[0]) for path in ACTING)]
    + [(path, other) for path in (RUN, UNLOAD) for other in OTHERS[1:]],
)
def test_page_of_another_origin_acts_on_nothing(
    local: Server, path: str, source: dict[str, str]
) -> None:
    """As with fetch in the mode no-cors, which needs no preflight request."""
    headers = source | {"Content-Type": "text/plain"}
    assert is_refused(local.http.post(path, json=BODY, headers=headers))
    assert local.http.get("/v2/models/taylor/ready").status_code == 200


def test_pages_of_the_service_and_of_allowed_origins_may_send_requests(local: Server) -> None:
    own = f"http://{local.http.base_url.netloc.decode()}"
    for source in (
        {},
        {"Origin": own},
        {"Origin": own, "Sec-Fetch-Site": "same-origin"},
        {"Origin": "https://outer.example", "Sec-Fetch-Site": "same-origin"},  # Host is the proxy's
        {"Sec-Fetch-Site": "none"},
        {"Origin": PAGE, "Sec-Fetch-Site": "cross-site"},
        {"Origin": "https://attention.example", "Host": "attention.example"},
        {"Origin": "https://attention.example", "Host": "attention.example:443"},
        {"Origin": "http://attention.example:9000", "Host": "Attention.example:9000"},
    ):
        assert local.http.post(RUN, json=BODY, headers=source).status_code == 200, source
    for source in (
        {"Origin": "https://attention.example", "Host": "attention.example:80"},
        {"Origin": "http://attention.example", "Host": "attention.example:8000"},
        {"Origin": "attention.example", "Host": "attention.example"},
    ):
        assert is_refused(local.http.post(RUN, json=BODY, headers=source)), source


def test_safe_methods_need_no_origin(local: Server) -> None:
    """Pages of other origins cannot read the response."""
    other = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    for path in ("/", "/v1/variants", "/metrics", "/v2/models/taylor/ready"):
        assert local.http.get(path, headers=other).status_code == 200
        assert local.http.head(path, headers=other).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LocalHost:8000", "127.0.0.1", "127.9.9.9:1", "[::1]:80", "a.localhost"),
        *("[::ffff:127.0.0.1]", "[::FFFF:7f00:1]:8000"),
        *("localhost:", "localhost.", "attention.example.:443"),
        *("attention.example", "attention.example:443", "ATTENTION.example", "[fd00::1]:8000"),
    ],
)
def test_names_of_this_machine_and_allowed_hosts_are_served(local: Server, host: str) -> None:
    assert local.http.get("/metrics", headers={"Host": host}).status_code == 200
    assert local.http.post(RUN, json=BODY, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost"),
        *("10.0.0.1:8000", "[::2]", "[::ffff:10.0.0.1]", ""),
        *("attention.example.evil.example", "x.attention.example"),
        *("127.0.0.1@evil.example", "evil.example:127.0.0.1"),
    ],
)
def test_other_hosts_are_refused_on_every_path(local: Server, host: str) -> None:
    for path in ("/metrics", "/docs", "/livez", "/v1/variants", "/v2/models"):
        assert is_refused(local.http.get(path, headers={"Host": host}))
    for path in ACTING:
        # the origin of a name that resolves to this machine is that of the page
        headers = {"Host": host, "Origin": f"http://{host}", "X-Forwarded-Host": "localhost"}
        assert is_refused(local.http.post(path, json=BODY, headers=headers))


@functools.cache
def application(**settings: Any) -> FastAPI:
    """Returns an application on a CPU, one for all tests of the same settings."""
    return create_app(Settings(device="cpu", **settings))


def status_of_host(app: FastAPI, host: str, address: str | None = "127.0.0.1") -> int:
    """Returns the status of a request whose connection arrives at an address; None: not known."""

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        server = None if address is None else (address, 8000)
        await app({**scope, "server": server}, receive, send)

    async def send() -> int:
        transport = httpx.ASGITransport(asgi)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as http:
            return (await http.get("/v1/variants")).status_code

    return asyncio.run(send())


@pytest.mark.parametrize("address", [None, "10.0.0.1", "::ffff:10.0.0.1", "fd00::1"])
def test_every_name_is_served_at_other_addresses(address: str | None) -> None:
    """Probes by the address of a pod, compose and ingress keep working."""
    for host in ("127.0.0.1", "0.0.0.0", "::"):
        app = application(host=host)
        assert status_of_host(app, "evil.example", address) == 200
        assert status_of_host(app, "10.0.0.1", address) == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1", 403), ("localhost", 403), ("a.name", 403), ("0.0.0.0", 200), ("10.0.0.1", 200)],
)
def test_connection_decides_unless_the_setting_is_another_address(
    address: str, host: str, status: int
) -> None:
    """A proxy of the same machine reaches a service on all addresses by any name."""
    app = application(host=host)
    assert status_of_host(app, "evil.example", address) == status
    assert status_of_host(app, "localhost", address) == 200


def test_allowed_hosts_decide_everywhere() -> None:
    some = application(allowed_hosts="a.example", host="0.0.0.0")
    star = application(allowed_hosts="*")
    for address in (None, "127.0.0.1", "10.1.2.3"):
        assert status_of_host(some, "a.example", address) == 200
        assert status_of_host(some, "localhost", address) == 200
        assert status_of_host(some, "evil.example", address) == 403
        assert status_of_host(star, "evil.example", address) == 200


def test_address_of_the_connection_is_served() -> None:
    """Probes and Prometheus use the address of a pod, which the operator does not know."""
    app = application(allowed_hosts="a.example", host="0.0.0.0")
    assert status_of_host(app, "10.1.2.3:8000", "10.1.2.3") == 200
    assert status_of_host(app, "[::ffff:10.1.2.3]:8000", "10.1.2.3") == 200
    assert status_of_host(app, "10.1.2.4:8000", "10.1.2.3") == 403
