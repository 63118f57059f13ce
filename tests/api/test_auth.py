"""API keys and origins: requests without a key, and pages of other origins, are rejected on every
path."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

import httpx
import openapi_spec_validator
import pytest
from click.testing import CliRunner

from qkv import AsyncClient, Client
from qkv.api.auth import ApiKeys
from qkv.api_keys import ValidApiKeys, parse_api_keys
from qkv.cli.main import main
from qkv.engine.engine import Engine
from qkv.errors import Unauthorized
from qkv.jobs.job import Job
from support.processes import TIMEOUT_S, Process
from support.raw_connection import PATH, encode_body, encode_request, random_inputs
from support.service import Server, running_server

KEYS: Final = ("first-key.0123456789", "second~key+/0123==")
GOOD: Final = "good-0123456789a"
OPEN: Final = ("/livez", "/readyz", "/v2/health/live", "/v2/health/ready", "/")
SQUARE: Final = [[1, 0], [0, 1]]
RUN: Final = {"inputs": {"query": SQUARE, "key": SQUARE, "value": SQUARE}}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """A service with two keys and one allowed origin."""
    with running_server(api_keys=", ".join(KEYS), cors_origins="https://pages.example") as server:
        yield server


def unauthorized(response: httpx.Response) -> None:
    assert response.status_code == 401, response.text
    assert response.headers["www-authenticate"].startswith("Bearer")
    if response.request.url.path.startswith("/v2"):
        assert list(response.json()) == ["error"]
    else:
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["type"] == "urn:qkv:problem:unauthorized"


WRONG: Final[tuple[dict[str, str], ...]] = (
    {},
    {"Authorization": "Bearer"},
    bearer("wrong"),
    bearer(KEYS[0][:-1]),
    bearer(KEYS[0] + "x"),
    bearer(KEYS[0].upper()),
    bearer(", ".join(KEYS)),
    {"Authorization": KEYS[0]},
    {"Authorization": f"Basic {KEYS[0]}"},
    {"X-API-Key": KEYS[0]},
)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/docs/"), ("GET", "/openapi.json"), ("GET", "/metrics"),
        ("GET", "/playground/"), ("GET", "/playground/nothing.js"),
        ("GET", "/v1/variants"), ("GET", "/nowhere"), ("GET", "/livez/"), ("GET", "//livez"),
        ("OPTIONS", "/v1/convert"), ("HEAD", "/v1/variants"), ("POST", "/v1/attention/softmax"),
        ("POST", "/v1/convert"), ("POST", PATH), ("GET", "/v2"), ("GET", "/v2/models"),
        ("POST", "/v2/repository/models/softmax/unload"), ("GET", "/livez%2f..%2fdocs"),
    ],
)  # fmt: skip
def test_requests_without_a_key_are_rejected(guarded: Server, method: str, path: str) -> None:
    # an absolute URL: httpx reads //livez as a host
    for headers in WRONG:
        response = guarded.http.request(method, guarded.url + path, headers=headers)
        if method == "HEAD":
            assert response.status_code == 401
            assert not response.content
        else:
            unauthorized(response)


@pytest.mark.parametrize("path", OPEN)
def test_probes_need_no_key(guarded: Server, path: str) -> None:
    for method in ("GET", "HEAD"):
        assert guarded.http.request(method, path).status_code == 200
        assert guarded.http.request(method, path, headers=bearer("wrong")).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_each_key_gives_access_to_every_path(guarded: Server, key: str) -> None:
    for headers in (bearer(key), {"Authorization": f"bearer  {key}"}):
        for path in ("/", "/docs", "/openapi.json", "/v1/variants", "/v2", "/v2/models/softmax"):
            assert guarded.http.get(path, headers=headers).status_code == 200
        response = guarded.http.post("/v1/attention/softmax", json=RUN, headers=headers)
        assert response.status_code == 200
    assert guarded.http.get("/nowhere", headers=bearer(key)).status_code == 404


def test_two_authorization_headers_are_rejected() -> None:
    one = (b"authorization", b"Bearer " + KEYS[0].encode())
    keys = ApiKeys(ValidApiKeys(lambda: parse_api_keys(KEYS[0])))
    assert keys.find([one])
    assert not keys.find([one, one])
    assert not keys.find([one, (b"authorization", b"Bearer b")])


def test_key_of_every_request_on_a_connection_is_checked(
    guarded: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the same request with a key on the same connection."""
    run_jobs: list[Job] = []
    submit = Engine.submit

    def counted(engine: Engine, job: Job, **options: Any) -> Any:
        run_jobs.append(job)
        return submit(engine, job, **options)

    monkeypatch.setattr(Engine, "submit", counted)
    body, length = encode_body(random_inputs(0))

    def status(connection: socket.socket, *lines: str) -> bytes:
        connection.sendall(encode_request(body, length, PATH, *lines))
        received = connection.recv(1 << 20)
        head, _, rest = received.partition(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(rest) < size:
            rest += connection.recv(1 << 20)
        return received[9:12]

    with socket.create_connection(guarded.address, TIMEOUT_S) as connection:
        for key in KEYS:
            for _ in range(3):
                assert status(connection, f"Authorization: Bearer {key}") == b"200"
        assert len(run_jobs) == 3 * len(KEYS)
        for line in ((), ("Authorization: Bearer wrong",), ("Authorization: Basic x",)):
            for _ in range(2):
                assert status(connection, *line) == b"401"
        assert len(run_jobs) == 3 * len(KEYS)
        assert status(connection, f"Authorization: Bearer {KEYS[1]}") == b"200"


def test_request_is_rejected_before_its_body(guarded: Server) -> None:
    head = f"POST /v1/convert HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 20}\r\n\r\n"
    with socket.create_connection(guarded.address, TIMEOUT_S) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")


def test_clients_send_the_key(guarded: Server) -> None:
    with Client(guarded.url, api_key=KEYS[1]) as client:
        assert client.variants()
    with Client(guarded.url) as client, pytest.raises(Unauthorized):
        client.variants()

    async def ask() -> int:
        async with AsyncClient(guarded.url, api_key=KEYS[0]) as client:
            return len(await client.variants())

    assert asyncio.run(ask()) > 1
    for bad in ("", "with space", "line\nend", "é"):
        with pytest.raises(ValueError, match="characters other than printable ASCII") as raised:
            Client(guarded.url, api_key=bad)
        assert not bad or bad not in str(raised.value)


@pytest.mark.slow
def test_commands_send_the_key(guarded: Server, command: Callable[..., Process]) -> None:
    process = command("variants", "--url", guarded.url, QKV_API_KEY=KEYS[0])
    assert process.wait() == 0, process.lines
    refused = command("variants", "--url", guarded.url, QKV_API_KEY="a-wrong-one")
    assert refused.wait() == 1
    assert len(refused.lines) == 1
    assert "the API key is missing or wrong" in refused.lines[0]
    assert "a-wrong-one" not in refused.lines[0]


@pytest.mark.parametrize("keys", ["", f"{GOOD},with space"])
def test_invalid_keys_are_rejected_and_not_shown(keys: str) -> None:
    served = CliRunner().invoke(main, ["serve", "--port", "0"], env={"QKV_API_KEYS": keys})
    assert served.exit_code == 1
    (line,) = served.stderr.splitlines()
    assert "QKV_API_KEYS" in line
    assert not any(part in line for part in ("good", "with space"))


@pytest.mark.parametrize("origins", ["", "pages.example", "https://a/path", "https://A", "null"])
def test_invalid_origins_are_rejected(origins: str) -> None:
    served = CliRunner().invoke(main, ["serve", "--port", "0"], env={"QKV_CORS_ORIGINS": origins})
    assert served.exit_code == 1
    assert "QKV_CORS_ORIGINS" in served.stderr.splitlines()[0]


def test_keys_are_in_no_log_and_no_response(
    guarded: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        for path in ("/", "/openapi.json", "/nowhere", "/v2/nothing"):
            for headers in (bearer(KEYS[0]), bearer("a-wrong-one")):
                response = guarded.http.get(path, headers=headers)
                assert KEYS[0] not in response.text + str(response.headers)
                assert "a-wrong-one" not in response.text + str(response.headers)
    ours = [r for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))]
    assert not any(word in r.getMessage() for r in ours for word in (KEYS[0], "a-wrong-one"))
    assert KEYS[0] not in repr(guarded.runtime.settings)


@pytest.mark.slow
def test_document_lists_operations_that_need_a_key(guarded: Server, server: Server) -> None:
    document = guarded.http.get("/openapi.json", headers=bearer(KEYS[0])).json()
    openapi_spec_validator.validate(document)
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["security"] == [{"key": []}]
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert (operation.get("security") == []) is (path in OPEN)
            assert ("401" in operation["responses"]) is (path not in OPEN)
    plain = server.http.get("/openapi.json").json()
    assert "security" not in plain
    assert not any("401" in o["responses"] for m in plain["paths"].values() for o in m.values())


ASKS: Final = {
    "Origin": "https://pages.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,inference-header-content-length",
}


@pytest.mark.parametrize("path", ["/v1/attention/softmax", "/v1/convert", PATH])
def test_pages_of_an_allowed_origin_may_send_requests(guarded: Server, path: str) -> None:
    origin = {"Origin": "https://pages.example"}
    may = guarded.http.options(path, headers=ASKS)
    assert may.status_code == 200
    assert may.headers["access-control-allow-origin"] == "https://pages.example"
    assert "authorization" in may.headers["access-control-allow-headers"].lower()
    refused = guarded.http.post(path, headers=origin)
    assert refused.status_code == 401
    for response in (refused, guarded.http.post(path, headers=origin | bearer(KEYS[0]))):
        assert response.headers.get_list("access-control-allow-origin") == ["https://pages.example"]
        assert "Origin" in response.headers["vary"]
        assert "access-control-allow-credentials" not in response.headers
    other = {"Origin": "https://other.example"}
    assert guarded.http.options(path, headers=ASKS | other).status_code == 400
    response = guarded.http.post(path, headers=other | bearer(KEYS[0]))
    assert "access-control-allow-origin" not in response.headers


def test_page_of_an_allowed_origin_can_read_the_headers(guarded: Server) -> None:
    """Also after the same request without an origin."""
    body, length = encode_body(random_inputs(0))
    plain = {"Inference-Header-Content-Length": str(length)} | bearer(KEYS[0])
    for _ in range(3):
        assert guarded.http.post(PATH, content=body, headers=plain).status_code == 200
        response = guarded.http.post(
            PATH, content=body, headers=plain | {"Origin": "https://pages.example"}
        )
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://pages.example"
        shown = {"Inference-Header-Content-Length", "Retry-After", "X-Request-ID"}
        assert shown <= set(response.headers["access-control-expose-headers"].split(", "))


def test_pages_are_rejected_without_allowed_origins(server: Server) -> None:
    for path in ("/", "/v1/convert", PATH):
        preflight = server.http.options(path, headers=ASKS)
        assert preflight.status_code == 405
        post_response = server.http.post(path, headers={"Origin": "https://pages.example"})
        for response in (preflight, post_response):
            assert not [name for name in response.headers if name.startswith("access-control")]
