"""Sweeps: events on real sockets, cells that are true, callers who leave, and others meanwhile."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import hypothesis
import numpy as np
import pytest
from cases import DTYPES, explained, refused
from conftest import PATIENCE, Process, Server, serving, until
from hypothesis import strategies
from schemas import fits, kept, renamed

from qkv.errors import NotNow, QkvError, TooLarge
from qkv.fleet import Fleet
from qkv.job import Job, Limits
from qkv.measured import PeakJob, TimedJob
from qkv.routes import events
from qkv.routes.schemas_compare import EVENTS
from qkv.sweep import Crossover, Sweep, Sweeping, crossovers
from qkv.wire import json as wire

SWEEP: Final = "/v1/sweep"
SMALL: Final = {"heads": 2, "width": 8, "repeats": 2}
UNLIMITED: Final = Limits(answer=1 << 62, request=1 << 62)
CELL: Final = {
    "index", "variant", "parameters", "length", "median_ms", "least_ms", "most_ms", "repeats",
    "flops", "bytes", "peak_bytes",
}  # fmt: skip

Event = tuple[str, Any]


def parsed(lines: Iterator[str]) -> Iterator[Event]:
    """Events, as WHATWG's HTML, section 9.2.6, reads them."""
    name, data = "message", list[str]()
    for line in lines:
        if not line:
            if data:
                yield name, json.loads("\n".join(data))
            name, data = "message", []
        elif not line.startswith(":"):
            field, _, value = line.partition(": ")
            assert field in ("event", "data"), line
            if field == "event":
                name = value
            else:
                data.append(value)
    assert not data, "the last event has no end"


def swept(server: Server, **fields: Any) -> list[Event]:
    """All that a sweep says."""
    with server.http.stream("POST", SWEEP, json=SMALL | fields) as response:
        assert response.status_code == 200, response.read()
        return list(parsed(response.iter_lines()))


def asking(server: Server, **fields: Any) -> socket.socket:
    """A socket on which a sweep has been asked for."""
    body = json.dumps(SMALL | fields).encode()
    head = f"POST {SWEEP} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    asked = socket.create_connection(server.address)
    asked.settimeout(PATIENCE)
    asked.sendall(head + body)
    return asked


@pytest.fixture
def counted(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Job, int]]:
    """Every job that is submitted, and its priority."""
    jobs: list[tuple[Job, int]] = []
    submit = server.engine.submit

    def counting(job: Job, *, priority: int = 0, **how: Any) -> Any:
        jobs.append((job, priority))
        return submit(job, priority=priority, **how)

    monkeypatch.setattr(server.engine, "submit", counting)
    return jobs


# ------------------------------------------------------------ where curves cross


def test_a_crossing_lies_on_straight_lines_in_logarithms() -> None:
    """t = n^2 / 4096 and t = n / 4 cross at 1024, where no point is."""
    square = {n: n**2 / 4096 for n in (256, 512, 2048, 4096)}
    line = {n: n / 4 for n in (256, 512, 2048, 4096)}
    (there,), (back,) = crossovers([square, line]), crossovers([line, square])
    assert (there.from_, there.to, back.from_, back.to) == (0, 1, 1, 0)
    assert there.length == back.length == pytest.approx(1024)
    assert crossovers([square, square]) == crossovers([square]) == crossovers([]) == []
    assert crossovers([square, {n: 2 * t for n, t in square.items()}]) == []


def test_curves_are_compared_where_both_have_points() -> None:
    one, other = {1: 1.0, 2: 1.0, 4: 9.0, 8: 9.0}, {1: 2.0, 4: 2.0, 16: 1.0}
    ((from_, to, length),) = crossovers([one, other])
    assert (from_, to) == (0, 1)
    assert 1 < length < 4
    assert crossovers([one, {3: 1.0}]) == crossovers([one, {}]) == []


def test_equal_times_are_a_crossing_only_between_two_sides() -> None:
    flat = dict.fromkeys((1, 2, 4, 8), 1.0)
    assert crossovers([flat, {1: 2.0, 2: 1.0, 4: 1.0, 8: 0.5}]) == [Crossover(0, 1, 2.0)]
    assert crossovers([flat, {1: 2.0, 2: 1.0, 4: 2.0, 8: 2.0}]) == []
    assert crossovers([flat, {1: 1.0, 2: 1.0, 4: 2.0, 8: 2.0}]) == []


def test_curves_may_cross_again_and_each_pair_is_told() -> None:
    wave = {1: 1.0, 2: 3.0, 4: 1.0}
    flat = dict.fromkeys((1, 2, 4), 2.0)
    low = dict.fromkeys((1, 2, 4), 1.5)
    found = crossovers([wave, flat, low])
    assert [(c.from_, c.to) for c in found] == [(0, 1), (1, 0), (0, 2), (2, 0)]
    assert [1 < c.length < 2 for c in found] == [True, False, True, False]


# ------------------------------------------------------------ what is run


def test_numbers_are_drawn_once_for_all_variants() -> None:
    fields = {"variants": ["softmax", "linear", "mean"], "lengths": [5, 7], **SMALL, "seed": 3}
    sweep, again = Sweep(fields, UNLIMITED), Sweep(fields, UNLIMITED)
    drawn = [sweep.drawn(sweep.job(c, 7), 7) for c in sweep.choices]
    for job in drawn:
        for name, tensor in job.inputs.tensors.items():
            assert tensor.shape == (1, 2, 7, 8)
            assert bytes(tensor.data) == bytes(drawn[0].inputs.tensors[name].data)
    twin = again.drawn(again.job(again.choices[0], 7), 7)
    other = Sweep(fields | {"seed": 4}, UNLIMITED)
    apart = other.drawn(other.job(other.choices[0], 7), 7)
    for name, tensor in drawn[0].inputs.tensors.items():
        assert bytes(tensor.data) == bytes(twin.inputs.tensors[name].data)
        assert bytes(tensor.data) != bytes(apart.inputs.tensors[name].data)
    query, key = (drawn[0].inputs.tensors[n].numpy() for n in ("query", "key"))
    assert not np.array_equal(query, key)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_numbers_are_normal_in_every_dtype(dtype: str) -> None:
    fields = {"variants": ["softmax"], "lengths": [512], "dtype": dtype, "batch": 2}
    sweep = Sweep(fields, UNLIMITED)
    query = sweep.drawn(sweep.job(sweep.choices[0], 512), 512).inputs.tensors["query"].numpy()
    assert query.dtype == DTYPES[dtype]
    assert query.shape == (2, 8, 512, 64)
    assert abs(query.astype("f8").mean()) < 0.01
    assert abs(query.astype("f8").std() - 1) < 0.01


def test_every_cell_is_told_in_order_and_true(server: Server) -> None:
    linformer = {"variant": "linformer", "parameters": {"rank": 4}}
    said = swept(server, variants=["softmax", linformer], lengths=[16, 64, 32])
    names = [name for name, _ in said]
    assert names == ["progress", "cell"] * 6 + ["done"]
    progress = [what for name, what in said if name == "progress"]
    assert [p["done"] for p in progress] == list(range(6))
    assert all(p.keys() == {"done", "total", "variant", "length"} for p in progress)
    cells = [what for name, what in said if name == "cell"]
    places = [(c["index"], c["variant"], c["length"]) for c in cells]
    order = [(0, "softmax"), (1, "linformer")]
    assert places == [(i, name, n) for n in (16, 64, 32) for i, name in order]
    for cell, before in zip(cells, progress, strict=True):
        assert cell.keys() == CELL
        assert (before["variant"], before["length"]) == (cell["variant"], cell["length"])
        assert before["total"] == 6
        assert 0 < cell["least_ms"] <= cell["median_ms"] <= cell["most_ms"]
        assert cell["repeats"] == 2
        assert cell["bytes"] == 4 * 4 * 2 * cell["length"] * 8
        assert cell["peak_bytes"] >= cell["bytes"] // 4
    assert [c["flops"] for c in cells if not c["index"]] == [4 * 2 * n**2 * 8 for n in (16, 64, 32)]
    assert cells[1]["parameters"] == {"rank": 4}
    assert said[-1][1]["cells"] == 6
    curves = [{c["length"]: c["median_ms"] for c in cells if c["index"] == i} for i in (0, 1)]
    told = [(c["from"], c["to"], c["length"]) for c in said[-1][1]["crossovers"]]
    assert told == [tuple(c) for c in crossovers(curves)]


def test_whole_numbers_may_have_a_point(server: Server) -> None:
    """JSON Schema takes 8.0 for an integer."""
    body = b'{"variants":["mean"],"lengths":[8.0],"heads":1e0,"seed":7.0,"repeats":1.0}'
    assert server.http.post(SWEEP, content=body).is_success


def test_each_repeat_is_a_job_of_its_own_after_all_others(
    server: Server, counted: list[tuple[Job, int]]
) -> None:
    swept(server, variants=["linear"], lengths=[8, 16], repeats=3)
    assert [type(job) for job, _ in counted] == [PeakJob, TimedJob, TimedJob, TimedJob] * 2
    assert {priority for _, priority in counted} == {3}


def test_a_cell_that_cannot_run_is_told_and_the_rest_goes_on(serve: Callable[..., Server]) -> None:
    small = serve(max_scores=2 * 100 * 100, max_queue_bytes=1 << 20, max_answer_bytes=1 << 18)
    said = swept(small, variants=["softmax", "linear"], lengths=[64, 128, 1 << 14])
    cells = [what for name, what in said if name == "cell"]
    problems = {(c["index"], c["length"]): c["problem"] for c in cells if "problem" in c}
    assert problems.keys() == {(0, 128), (0, 1 << 14), (1, 1 << 14)}
    for cell in cells:
        assert cell.keys() == CELL or cell.keys() == {
            "index", "variant", "parameters", "length", "problem",
        }  # fmt: skip
    assert all(p["type"] == "urn:qkv:problem:too-large" for p in problems.values())
    assert problems[0, 128]["limit"] == 20_000
    assert said[-1] == ("done", {"cells": 6, "crossovers": said[-1][1]["crossovers"]})
    huge = swept(small, variants=["mean"], lengths=[1 << 20], batch=4096, heads=4096, width=65536)
    assert huge[1][1]["problem"]["status"] == 413


def test_a_deadline_is_each_runs_own(server: Server) -> None:
    body = SMALL | {"variants": ["mean"], "lengths": [8]}
    headers = {"X-Request-Timeout": "0.05"}
    with (
        server.engine.hold(),
        server.http.stream("POST", SWEEP, json=body, headers=headers) as response,
    ):
        said = list(parsed(response.iter_lines()))
    assert said[1][1]["problem"]["type"] == "urn:qkv:problem:too-late"
    refused(server.http.post(SWEEP, json=body, headers={"X-Request-Timeout": "soon"}), 400)


REFUSED: Final[list[tuple[int, str, dict[str, Any]]]] = [
    (422, "/variants", {"variants": []}),
    (422, "/variants", {"variants": None}),
    (422, "/variants", {"variants": ["mean"] * 17}),
    (404, "/variants/0", {"variants": ["sotfmax"]}),
    (422, "/variants/0", {"variants": ["linear_layer"]}),
    (422, "/variants/1/parameters/scale", {
        "variants": ["mean", {"variant": "taylor", "parameters": {"scale": 2}}],
    }),
    (422, "/variants/0/params", {"variants": [{"variant": "mean", "params": {}}]}),
    (422, "/lengths", {"lengths": []}),
    (422, "/lengths", {"lengths": list(range(1, 66))}),
    (422, "/lengths/1", {"lengths": [8, 8]}),
    (422, "/lengths/1", {"lengths": [8, 0]}),
    (422, "/lengths/0", {"lengths": [(1 << 20) + 1]}),
    (422, "/lengths/0", {"lengths": [8.5]}),
    (422, "/lengths/0", {"lengths": [True]}),
    (422, "/repeats", {"repeats": 0}),
    (422, "/repeats", {"repeats": 101}),
    (422, "/batch", {"batch": 0}),
    (422, "/heads", {"heads": 4097}),
    (422, "/width", {"width": "64"}),
    (422, "/dtype", {"dtype": "int64"}),
    (422, "/seed", {"seed": -1}),
    (422, "/seed", {"seed": 1 << 63}),
    (422, "/inputs", {"inputs": {}}),
]  # fmt: skip


@pytest.mark.parametrize(("status", "pointer", "fields"), REFUSED)
def test_what_is_wrong_is_said_before_anything_runs(
    server: Server,
    counted: list[tuple[Job, int]],
    status: int,
    pointer: str,
    fields: dict[str, Any],
) -> None:
    body = {"variants": ["mean"], "lengths": [8]} | fields
    assert refused(server.http.post(SWEEP, json=body), status, body)["pointer"] == pointer
    assert counted == []


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    strategies.dictionaries(
        strategies.sampled_from([*Sweeping.model_fields, "no"]),
        strategies.recursive(
            strategies.none() | strategies.integers(-3, 2**65) | strategies.floats()
            | strategies.sampled_from(["mean", "softmax", "float16", "variant", ""]),
            lambda inner: strategies.lists(inner, max_size=3)
            | strategies.dictionaries(strategies.sampled_from(["variant", "parameters"]), inner),
            max_leaves=6,
        ),
    )
)  # fmt: skip
def test_whatever_comes_is_refused_or_has_cells(fields: dict[str, Any]) -> None:
    asked = {"variants": ["mean"], "lengths": [8]} | fields
    limits = Limits(answer=1 << 24, request=1 << 24)
    try:
        sweep = Sweep(wire.plain(json.dumps(asked).encode()), limits)
    except QkvError as error:
        explained(error, asked)
        return
    for length in sweep.lengths:
        for choice in sweep.choices:
            try:
                job = sweep.drawn(sweep.job(choice, length), length)
            except TooLarge:
                continue
            assert job.inputs.nbytes <= 1 << 24


def test_other_faults(server: Server, serve: Callable[..., Server]) -> None:
    body = SMALL | {"variants": ["mean"], "lengths": [8]}
    for text in (b"", b"[]", b"{", b'{"variants": ["mean"], "lengths": [8]} x', b"\xff"):
        refused(server.http.post(SWEEP, content=text), 400)
    refused(server.http.post(SWEEP, content=b"x", headers={"Content-Type": "text/plain"}), 415)
    for accept in ("application/vnd.safetensors", "text/html", "text/event-stream;q=0"):
        refused(server.http.post(SWEEP, json=body, headers={"Accept": accept}), 406)
    for accept in ("text/event-stream", "text/*", "application/json", "*/*"):
        assert server.http.post(SWEEP, json=body, headers={"Accept": accept}).is_success
    refused(server.http.get(SWEEP), 405)
    tight = serve(max_body_bytes=20)
    assert refused(tight.http.post(SWEEP, json=body), 413)["limit"] == 20


# ------------------------------------------------------------ how it is told


def test_headers_and_bytes_on_the_wire(server: Server) -> None:
    with asking(server, variants=["mean"], lengths=[8]) as asked:
        came = b""
        while not came.endswith(b"0\r\n\r\n"):
            piece = asked.recv(1 << 16)
            assert piece, came
            came += piece
    head, _, body = came.partition(b"\r\n\r\n")
    lines = {line.lower() for line in head.split(b"\r\n")}
    assert b"http/1.1 200 ok" in lines
    assert b"content-type: text/event-stream" in lines
    assert b"cache-control: no-store" in lines
    assert b"transfer-encoding: chunked" in lines
    assert not any(line.startswith(b"content-length") for line in lines)
    assert any(line.startswith(b"x-request-id: ") for line in lines)
    assert body.count(b"event: ") == 3
    assert b'event: progress\ndata: {"done":0,' in body


def test_events_come_while_it_runs(server: Server) -> None:
    """The first cell is there before the second runs."""
    with server.engine.hold(), asking(server, variants=["mean"], lengths=[8, 16]) as asked:
        until(lambda: server.waiting == 1)
        came = asked.recv(1 << 16)
        if b"progress" not in came:
            came += asked.recv(1 << 16)
        assert came.count(b"event: progress") == 1
        assert b"event: cell" not in came


def test_silence_is_broken_by_comments(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert events.HEARTBEAT_S == 10
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.02)
    body = SMALL | {"variants": ["mean"], "lengths": [8]}
    with server.engine.hold(), server.http.stream("POST", SWEEP, json=body) as response:
        lines = response.iter_lines()
        came = [next(lines) for _ in range(12)]
        assert came.count(": still at work") >= 3
    assert [name for name, _ in parsed(iter([*came, ""]))] == ["progress"]


def test_who_leaves_ends_it(server: Server, counted: list[tuple[Job, int]]) -> None:
    """What is left of its cells never reaches the device."""
    lengths = list(range(8, 40))
    with asking(server, variants=["mean", "linear"], lengths=lengths) as leaver:
        with server.engine.hold():
            until(lambda: server.waiting == 1)
            leaver.close()
            until(lambda: server.waiting == 0)
        seen = len(counted)
    assert server.http.post("/v1/attention/mean", json={"inputs": {"value": [[1]]}}).is_success
    swept(server, variants=["mean"], lengths=[8])
    assert len(counted) == seen + 1 + SMALL["repeats"]
    assert seen < len(lengths)


def test_who_leaves_is_counted_as_that(serve: Callable[..., Server]) -> None:
    own = serve()

    def left() -> bool:
        return 'qkv_other_requests_total{outcome="left"} 1\n' in own.http.get("/metrics").text

    with own.engine.hold(), asking(own, variants=["mean"], lengths=[8]) as leaver:
        until(lambda: own.waiting == 1)
        leaver.close()
        until(lambda: own.waiting == 0)
    until(left)


def test_others_are_answered_meanwhile_and_before_it(
    server: Server, counted: list[tuple[Job, int]]
) -> None:
    """Of what waits, everybody else's goes first; and a sweep never has more than one waiting."""
    value = np.ones((600, 64)).tolist()  # too large to run on the loop
    asked = asking(server, variants=["linear"], lengths=list(range(64, 128)), repeats=100)
    try:
        until(lambda: len(counted) > 3)
        ran: list[int] = []
        with server.engine.hold():
            until(lambda: server.waiting == 1)
            sweeping = counted[-1][0]
            threads = [
                threading.Thread(
                    target=lambda: ran.append(
                        httpx.post(
                            f"{server.url}/v1/attention/softmax",
                            json={
                                "inputs": dict.fromkeys(("query", "key", "value"), value),
                                "weights": "none",
                            },
                            timeout=PATIENCE,
                        ).status_code
                    )
                )
                for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            until(lambda: server.waiting == 5)
            with server.engine._changed:
                first = server.engine._queue.oldest()
            assert first is not None
            assert first.job is not sweeping
        for thread in threads:
            thread.join()
        assert ran == [200] * 4
        assert len(counted) < 64 * 101, "it is not over yet"
    finally:
        asked.close()
        until(lambda: server.waiting == 0)


def test_keys_are_asked_for(serve: Callable[..., Server]) -> None:
    guarded = serve(api_keys="secret")
    body = SMALL | {"variants": ["mean"], "lengths": [8]}
    assert guarded.http.post(SWEEP, json=body).status_code == 401
    headers = {"Authorization": "Bearer secret", "X-Request-ID": "mine"}
    answer = guarded.http.post(SWEEP, json=body, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "mine"


def test_a_fault_of_ours_ends_the_stream(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = serve()

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(own.engine, "submit", broken)
    said = swept(own, variants=["mean"], lengths=[8])
    assert [name for name, _ in said] == ["progress", "error"]
    assert said[-1][1]["problem"]["status"] == 500
    assert "ZeroDivision" not in str(said)


def test_a_service_that_stops_says_so() -> None:
    with serving() as stopping:
        fleet = stopping.app.user_middleware[0].kwargs["fleet"]
        assert isinstance(fleet, Fleet)
        body = SMALL | {"variants": ["mean"], "lengths": [8, 16], "repeats": 100}
        with stopping.http.stream("POST", SWEEP, json=body) as response:
            told = parsed(response.iter_lines())
            assert next(told)[0] == "progress"
            fleet.drain()
            *_, (name, what) = told
        assert name == "error"
        assert what["problem"]["type"] == "urn:qkv:problem:not-now"


def test_sigterm_does_not_wait_for_it(command: Callable[..., Process]) -> None:
    process = command("serve", "--port", "0", "--workers", "1", QKV_DRAIN_S="30")
    body = {"variants": ["softmax"], "lengths": [256, 512], "repeats": 100}
    with httpx.stream("POST", f"{process.url}{SWEEP}", json=body, timeout=PATIENCE) as response:
        told = parsed(response.iter_lines())
        assert next(told)[0] == "progress"
        since = time.monotonic()
        process.popen.send_signal(signal.SIGTERM)
        names = [name for name, _ in told]
    assert names[-1] == "error"
    assert process.wait() == 0, process.lines
    assert time.monotonic() - since < 20


def test_a_device_process_sweeps_too(command: Callable[..., Process]) -> None:
    process = command(
        "serve", "--port", "0", "--workers", "2", QKV_DEVICE_PROCESS="one",
        QKV_MAX_QUEUE_BYTES=str(64 << 20),
    )  # fmt: skip
    body = SMALL | {"variants": ["linear", "mean"], "lengths": [16, 64]}
    with httpx.stream("POST", f"{process.url}{SWEEP}", json=body, timeout=PATIENCE) as response:
        said = list(parsed(response.iter_lines()))
    assert [name for name, _ in said] == ["progress", "cell"] * 4 + ["done"]
    assert all(what.keys() == CELL for name, what in said if name == "cell")
    assert process.end() == 0, process.lines


@pytest.mark.parametrize(
    ("named", "length", "sizes"),
    [
        ({"variant": "mean", "parameters": {"method": "loop"}}, 16384, {"heads": 1, "width": 256}),
        ({"variant": "softmax", "parameters": {"dropout": 0.5}}, 32768, {"heads": 1, "width": 64}),
        ({"variant": "softmax"}, 1 << 18, {"heads": 1, "width": 1}),
    ],
)
def test_few_bytes_do_not_buy_minutes(
    server: Server, named: dict[str, Any], length: int, sizes: dict[str, int]
) -> None:
    """Each held a worker for a minute and more, whoever left."""
    told = swept(server, variants=[named], lengths=[length], **sizes)
    assert told[1][1]["problem"]["status"] == 413


def test_the_documented_example_runs(url: str) -> None:
    page = (Path(__file__).parent.parent / "docs/http.md").read_text()
    (line,) = re.findall(r"^curl -N .*/v1/sweep.*$", page, re.MULTILINE)
    done = subprocess.run(
        ["bash", "-c", line.replace("http://127.0.0.1:8000", url).replace("curl ", "curl -sS ")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [name for name, _ in parsed(iter(done.stdout.split("\n")))][-1] == "done"


# ------------------------------------------------------------ as it is described


def test_requests_and_events_are_as_described(serve: Callable[..., Server]) -> None:
    small = serve(max_scores=2 * 100 * 100)
    document = small.http.get("/openapi.json").json()
    operation, schemas = document["paths"][SWEEP]["post"], document["components"]["schemas"]
    content = operation["requestBody"]["content"]["application/json"]
    assert fits(content["example"], content["schema"], document)
    assert small.http.post(SWEEP, json=content["example"]).is_success
    body = SMALL | {"variants": ["softmax", "linear"], "lengths": [64, 128]}
    assert fits(body, content["schema"], document)
    for _, _, fields in REFUSED:
        assert not fits(
            {"variants": ["mean"], "lengths": [8]} | fields, content["schema"], document
        )
    told = swept(small, **body)
    assert any("problem" in what for _, what in told)
    told.append(("error", {"problem": NotNow("the service is stopping").problem()}))
    answer = operation["responses"]["200"]["content"]["text/event-stream"]
    told += list(parsed(iter(answer["example"].split("\n"))))
    for name, what in told:
        component = schemas[EVENTS[name]]
        assert (
            f"`{name}`, whose data is a `{EVENTS[name]}`"
            in (operation["responses"]["200"]["description"])
        )
        assert fits(what, component, document), what
        for other in renamed(what):
            assert not fits(other, component, document), other


def test_its_faults_are_described(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    for status, how in (
        (400, {"content": b"[]"}),
        (404, {"json": {"variants": ["sotfmax"], "lengths": [1]}}),
        (406, {"json": {}, "headers": {"Accept": "text/html"}}),
        (415, {"content": b"x", "headers": {"Content-Type": "text/plain"}}),
        (422, {"json": {}}),
    ):
        response = server.http.post(SWEEP, **how)
        refused(response, status)
        kept(document, response)
