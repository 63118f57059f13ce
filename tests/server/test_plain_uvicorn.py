"""`uvicorn --factory qkv.api.app:create_app` serves the same API in one process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Final

import httpx
import pytest

from support.engines import output_alone
from support.known_requests import assert_problem
from support.ports import free_port
from support.processes import TIMEOUT_S, Process, wait_until
from support.raw_connection import PATH, encode_body, random_inputs
from support.service_processes import TINY_BODY

KEY: Final = "0123456789abcdef0123456789abcdef"
HEADERS: Final = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
RUN: Final = "/v1/attention/softmax"


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[Process, httpx.Client]]:
    """uvicorn with an application of qkv, and a client of it."""
    port = free_port()
    arguments = ("--factory", "qkv.api.app:create_app", "--port", str(port))
    process = Process(arguments, {"QKV_API_KEYS": KEY}, module="uvicorn")
    base_url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=base_url, headers=HEADERS, timeout=TIMEOUT_S) as http:

        def is_serving() -> bool:
            try:
                return http.get("/readyz").status_code == 200
            except httpx.ConnectError:
                return False

        try:
            wait_until(is_serving)
            yield process, http
        finally:
            process.popen.send_signal(signal.SIGTERM)
            process.wait()


@pytest.mark.process
@pytest.mark.slow
def test_requests_have_the_same_bits(plain: tuple[Process, httpx.Client]) -> None:
    _, http = plain
    for shape in ((1, 2, 8, 16), (1, 8, 512, 64)):
        arrays = random_inputs(0, shape)
        body, length = encode_body(arrays)
        headers = {"Inference-Header-Content-Length": str(length)}
        response = http.post(PATH, content=body, headers=headers)
        assert response.status_code == 200, response.text
        head = int(response.headers["inference-header-content-length"])
        assert response.content[head:] == output_alone(arrays)
    chunked = http.post(RUN, content=iter([TINY_BODY[:9], TINY_BODY[9:]]))
    assert chunked.json()["outputs"] == http.post(RUN, content=TINY_BODY).json()["outputs"]
    assert "qkv_requests_total" in http.get("/metrics").text


@pytest.mark.process
@pytest.mark.slow
def test_rules_of_keys_hosts_origins_and_paths_hold(
    plain: tuple[Process, httpx.Client],
) -> None:
    _, http = plain
    for headers, status in (
        ({"Host": "evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Content-Type": "text/csv"}, 415),
    ):
        assert_problem(http.post(RUN, content=TINY_BODY, headers=headers), status)
    assert http.post(RUN, content=TINY_BODY, headers={"Authorization": ""}).status_code == 401
    assert_problem(http.post("/v1/attention%2Fsoftmax", content=TINY_BODY), 404)
    assert_problem(http.post(RUN, content=b"{"), 400)
    head = http.head("/v1/variants")
    assert (head.status_code, head.content) == (200, b"")
    assert http.put("/livez").headers["allow"] == "GET, HEAD"


@pytest.mark.process
@pytest.mark.slow
def test_nothing_was_logged_as_an_error(plain: tuple[Process, httpx.Client]) -> None:
    process, _ = plain
    assert not [line for line in process.lines if "ERROR" in line or "Traceback" in line]
