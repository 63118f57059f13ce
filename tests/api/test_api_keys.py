"""API keys have names and weights: in logs and metrics, for fair shares, from a file."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from pydantic import ValidationError

from qkv.api_keys import ApiKey, parse_api_keys, read_api_keys
from qkv.settings import Settings
from support.processes import TIMEOUT_S, Process, wait_until
from support.service import Server, running_server
from support.service_processes import child_pids, status_of

SQUARE: Final = [[1, 0], [0, 1]]
RUN: Final = {"inputs": {"query": SQUARE, "key": SQUARE, "value": SQUARE}}
PATH: Final = "/v1/attention/softmax"
A, B, C = (f"{name}-key-0123456789" for name in "abc")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """A service whose two keys share a queue of eight requests, three to one."""
    with running_server(api_keys=f"alice:{A}:3,batch:{B}", max_queue=8) as server:
        yield server


def metric(server: Server, name: str, key: str) -> float:
    page = server.http.get("/metrics", headers=bearer(A)).text
    (line,) = [x for x in page.splitlines() if x.startswith(f'qkv_key_{name}{{key="{key}"}}')]
    return float(line.rpartition(" ")[2])


def test_entries_have_names_and_weights() -> None:
    assert parse_api_keys(f"alice:{A}, batch:{B}==:0.2 ,{C}~") == [
        ApiKey("alice", A, 1.0),
        ApiKey("batch", f"{B}==", 0.2),
        ApiKey("key3", f"{C}~", 1.0),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("alice:", "entry 1 is invalid"),
        (":SECRET0123456789", "entry 1 is invalid"),
        (f"{A},a:SECRET0123456789:0", "entry 2 is invalid"),
        ("a:SECRET0123456789:-1", "entry 1 is invalid"),
        ("a:SECRET0123456789:1e3", "entry 1 is invalid"),
        ("a b:SECRET0123456789", "entry 1 is invalid"),
        ("a:SECRET0123456789:1:2", "entry 1 is invalid"),
        (f"{'a' * 65}:SECRET0123456789", "entry 1 is invalid"),
        ("SECRET0123456789:0.2", "entry 1 has no name"),
        ("SECRET0123456789==:0.2", "entry 1 is invalid"),
        ("a:SECRET0123456789:\N{ARABIC-INDIC DIGIT THREE}", "entry 1 is invalid"),
        (
            ",".join(f"SECRET{n:010}" for n in range(1025)),
            "too many keys: got 1025, expected 1024",
        ),
        (
            "a:SECRET012345678",
            "entry 1 has a key that is too short: got 15 characters, expected at",
        ),
        ("a:SECRET012345678==", "entry 1 has a key that is too short: got 15 characters"),
        ("a:S", "entry 1 has a key that is too short: got 1 characters"),
        ("a:SECRET0123456789,a:OTHERS0123456789", "2 entries have the same name a"),
        ("a:SECRET0123456789,b:SECRET0123456789", "2 entries have the same key"),
    ],
)
def test_invalid_entries_are_refused_without_the_key(text: str, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem) as caught:
        Settings(api_keys=text)  # type: ignore[arg-type]
    assert "SECRET" not in caught.value.errors()[0]["msg"]


def test_file_has_a_key_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"\ufeffalice:{A}\n# more people\n\n  batch:{B}:0.2  \r\n")
    assert read_api_keys(path) == [ApiKey("alice", A, 1.0), ApiKey("batch", B, 0.2)]


@pytest.mark.parametrize(
    "content", [None, "", "# none\n", "a b\n", "\xff", "a" * (2 << 20), A, f"{A}\n{B}", "a:1\n"]
)
def test_invalid_file_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValidationError, match="keys"):
        Settings(api_keys_file=path)


def test_file_that_is_cut_short_anywhere_gives_no_other_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    whole = f"alice:{A}\nbatch:{B}:0.25\n"
    for length in range(len(whole)):
        path.write_text(whole[:length])
        if whole[:length].endswith("\n"):
            assert read_api_keys(path) == [ApiKey("alice", A, 1.0)]
            continue
        with pytest.raises(ValueError, match=str(path)) as caught:
            read_api_keys(path)
        assert not any(key in str(caught.value) for key in (A, B))


def test_keys_and_a_file_of_keys_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice:{A}\n")
    with pytest.raises(ValidationError, match="QKV_API_KEYS is set"):
        Settings(api_keys=A, api_keys_file=path)  # type: ignore[arg-type]


def test_metrics_count_the_requests_of_each_key(shared: Server) -> None:
    assert metric(shared, "compute_seconds_total", "batch") == 0.0
    before = metric(shared, "requests_total", "batch")
    for _ in range(3):
        assert shared.http.post(PATH, json=RUN, headers=bearer(B)).status_code == 200
    assert metric(shared, "requests_total", "batch") == before + 3
    assert metric(shared, "compute_seconds_total", "batch") > 0.0
    assert metric(shared, "rejected_total", "batch") == 0.0


def test_key_beyond_its_share_gets_429_and_the_other_is_served(shared: Server) -> None:
    """Although the first has filled the queue while it was alone."""
    responses: list[httpx.Response] = []

    def post(key: str) -> None:
        responses.append(
            httpx.post(f"{shared.url}{PATH}", json=RUN, headers=bearer(key), timeout=TIMEOUT_S)
        )

    def start(key: str) -> threading.Thread:
        thread = threading.Thread(target=post, args=(key,))
        thread.start()
        return thread

    with shared.hold():
        threads = [start(B) for _ in range(8)]
        shared.wait_until_queued(8)
        post(B)  # alone: the queue is full
        assert responses.pop().status_code == 503
        threads += [start(A) for _ in range(6)]
        shared.wait_until_queued(14)
        for key, name, share in ((A, "alice", 6), (B, "batch", 2)):
            post(key)
            refused = responses.pop()
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            problem = refused.json()
            assert problem["type"] == "urn:qkv:problem:too-many-requests"
            assert f"the key {name}" in problem["detail"]
            assert f"the limit is {share}" in problem["detail"]
            assert metric(shared, "rejected_total", name) == 1.0
    for thread in threads:
        thread.join()
    assert [response.status_code for response in responses] == [200] * 14


def test_log_has_the_name_and_never_the_key(
    command: Callable[..., Process], tmp_path: Path
) -> None:
    names = {
        "QKV_API_KEYS": "alice:a-secret-0123456789,another-secret-0123",
        "QKV_REQUEST_LOG": "json",
    }
    log = tmp_path / "log"
    with log.open("wb") as stdout:
        served = Process(("serve", "--port", "0", "--workers", "1"), names, stdout=stdout)
        try:
            for key in ("a-secret-0123456789", "another-secret-0123", "wrong"):
                httpx.post(f"{served.url}{PATH}", json=RUN, headers=bearer(key), timeout=TIMEOUT_S)
        finally:
            assert served.end() == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line.get("key") for line in lines] == ["alice", "key2", None]
    assert "secret" not in log.read_text()
    assert not any("secret" in line for line in served.lines)


def test_sighup_reads_the_file_again(command: Callable[..., Process], tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice:{A}\n")
    served = command("serve", "--port", "0", "--workers", "2", QKV_API_KEYS_FILE=str(path))

    def status(key: str) -> int:
        return status_of(served.url, "/v1/variants", bearer(key), TIMEOUT_S)

    def all_give(key: str, expected: int) -> bool:
        return all(status(key) == expected for _ in range(8))  # each on a new connection

    def says(words: str) -> bool:
        return any(words in line for line in served.lines)

    assert all_give(A, 200)
    path.write_text(f"alice:{B}\nbatch:{C}:0.2\n")
    served.popen.send_signal(signal.SIGHUP)
    wait_until(lambda: all_give(B, 200) and all_give(A, 401))
    assert status(C) == 200
    for problem, text in (
        ("entry 1 is invalid", "not valid\n"),
        ("no end of line", f"alice:{A}"),
        ("too short", "alice:short\n"),
    ):
        path.write_text(text)
        served.popen.send_signal(signal.SIGHUP)
        wait_until(partial(says, problem))
        assert all_give(B, 200)
    assert sum("the API keys stay as they were" in line for line in served.lines) == 3
    workers = child_pids(served.popen.pid)
    os.kill(workers[0], signal.SIGKILL)  # the worker in its place has the last valid keys
    wait_until(lambda: len(set(child_pids(served.popen.pid)) - set(workers)) == 1)
    wait_until(lambda: status_of(served.url, "/readyz") == 200)
    assert all_give(B, 200)
    assert served.end() == 0
    assert not any(key in line for line in served.lines for key in (B, C))


def test_sighup_reads_the_file_under_nohup_too(
    command: Callable[..., Process], tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice:{A}\n")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a child inherits it, as from nohup
    try:
        served = command("serve", "--port", "0", "--workers", "1", QKV_API_KEYS_FILE=str(path))
    finally:
        signal.signal(signal.SIGHUP, before)
    url = served.url
    path.write_text(f"alice:{B}\n")
    served.popen.send_signal(signal.SIGHUP)
    wait_until(lambda: status_of(url, "/v1/variants", bearer(A)) == 401)
