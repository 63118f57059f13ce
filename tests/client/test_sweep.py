"""Sweeps over a real socket, of both clients: cells as they come, and whatever may go wrong."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable
from typing import Any, Final

import httpx
import numpy as np
import pytest

from qkv import AsyncClient, AsyncSweep, Cell, Client, Crossover, QkvError, Sweep
from support.processes import TIMEOUT_S, wait_until
from support.scripted_server import (
    Reply,
    drop_connection,
    encode_event,
    event_reply,
    json_reply,
    problem_reply,
    scripted_server,
)
from support.service import Server
from support.sweep_events import (
    CELL_EVENTS,
    CELLS,
    DONE_EVENT,
    PROBLEM,
    WHOLE_STREAM,
    cell,
    progress,
)

Sweeping = Callable[..., tuple[list[Cell], Any]]


QUERY: Final = np.eye(2, dtype=np.float32)


def swept(url: str, take: int = 99, retries: int = 3, **asked: Any) -> tuple[list[Cell], Sweep]:
    """The first cells of a sweep by the plain client, and the sweep."""
    with Client(url, retries=retries, timeout=TIMEOUT_S) as client:
        sweep = client.sweep(["softmax", "linear"], [256, 512], progress=False, **asked)
        with sweep:
            cells = [found for _, found in zip(range(take), sweep, strict=False)]
        return cells, sweep


def sweep_async(
    url: str, take: int = 99, retries: int = 3, **asked: Any
) -> tuple[list[Cell], AsyncSweep]:
    async def run() -> tuple[list[Cell], AsyncSweep]:
        cells: list[Cell] = []
        async with AsyncClient(url, retries=retries, timeout=TIMEOUT_S) as client:
            sweep = client.sweep(["softmax", "linear"], [256, 512], progress=False, **asked)
            async with sweep:
                async for found in sweep:
                    cells.append(found)
                    if len(cells) == take:
                        break
            return cells, sweep

    return asyncio.run(run())


@pytest.fixture(params=[swept, sweep_async])
def sweeping(request: pytest.FixtureRequest) -> Sweeping:
    run: Sweeping = request.param
    return run


def test_cells_come_as_they_are_measured(sweeping: Sweeping) -> None:
    with scripted_server(WHOLE_STREAM) as received:
        cells, sweep = sweeping(received.url)
    assert [(c.index, c.variant, c.length, c.median_ms, c.least_ms) for c in cells] == [
        (0, "softmax", 256, 1.0, 0.5), (1, "linear", 256, 2.0, 1.0),
        (0, "softmax", 512, None, None),
    ]  # fmt: skip
    assert cells[2].problem == PROBLEM
    assert sweep.cells == cells
    assert sweep.crossovers == [Crossover(0, 1, 300.5)]
    assert sweep.finished
    assert received.paths == ["/v1/sweep"]
    assert received.headers[0]["accept"] == "text/event-stream"
    assert received.last_json == {
        "variants": [{"variant": name, "parameters": {}} for name in ("softmax", "linear")],
        "lengths": [256, 512],
    }


def test_all_that_is_asked_for_is_sent(sweeping: Sweeping) -> None:
    asked = {"batch": 2, "heads": np.int64(4), "width": 8, "dtype": "float16", "seed": 3}
    with scripted_server(WHOLE_STREAM) as received:
        sweeping(received.url, **asked, repeats=7, causal=np.True_, scale=None, window=(2, 0))
    shared = {"causal": True, "window": [2, 0]}
    named = [{"variant": name, "parameters": shared} for name in ("softmax", "linear")]
    assert received.last_json == {**asked, "repeats": 7, "variants": named, "lengths": [256, 512]}


def test_a_variants_own_parameters_go_before_those_of_all() -> None:
    chosen: list[Any] = ["mean", {"variant": "taylor", "parameters": {"causal": np.False_}}]
    with scripted_server(WHOLE_STREAM) as received, Client(received.url) as client:
        list(client.sweep(chosen, range(1, 3), progress=False, causal=True))
    assert received.last_json["variants"] == [
        {"variant": "mean", "parameters": {"causal": True}},
        {"variant": "taylor", "parameters": {"causal": False}},
    ]
    assert received.last_json["lengths"] == [1, 2]


def test_nothing_is_asked_before_the_first_cell_is() -> None:
    with scripted_server(WHOLE_STREAM) as received, Client(received.url) as client:
        sweep = client.sweep(["softmax"], [256], progress=False)
        assert not received.paths
        assert next(sweep).variant == "softmax"
        assert received.paths
        assert list(sweep) == sweep.cells[1:]
        assert list(sweep) == []


@pytest.mark.parametrize(
    ("variants", "lengths", "given", "error"),
    [
        ("softmax", [256], {}, QkvError),  # a list, also of one
        ({"variant": "softmax"}, [256], {}, QkvError),
        (["softmax"], [256.5], {}, TypeError),
        (["softmax"], [256], {"query": np.ones((2, 2))}, QkvError),  # it draws its own
        (["softmax"], [256], {"scale": math.inf}, QkvError),
    ],
)
def test_what_makes_no_sense_is_refused_without_asking(
    variants: Any, lengths: Any, given: dict[str, Any], error: type[Exception]
) -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(error):
        client.sweep(variants, lengths, **given)


def test_leaving_early_closes_the_connection_and_keeps_what_came(sweeping: Sweeping) -> None:
    with scripted_server(event_reply(*CELL_EVENTS, end="held")) as received:
        cells, sweep = sweeping(received.url, take=2)
        assert received.disconnected.wait(TIMEOUT_S)
    assert [c.variant for c in cells] == ["softmax", "linear"]
    assert sweep.cells == cells
    assert not sweep.finished


def test_letting_go_of_it_closes_the_connection() -> None:
    with (
        scripted_server(event_reply(*CELL_EVENTS, end="held")) as received,
        Client(received.url) as client,
    ):
        for found in client.sweep(["softmax"], [256], progress=False):
            assert found.length == 256
            break
        gc.collect()
        assert received.disconnected.wait(TIMEOUT_S)


def test_a_twin_that_is_cancelled_closes_the_connection() -> None:
    async def run(url: str) -> None:
        async with AsyncClient(url) as client:
            sweep = client.sweep(["softmax"], [256], progress=False)
            came = asyncio.Event()

            async def consume() -> None:
                async for _ in sweep:
                    came.set()

            task = asyncio.create_task(consume())
            await asyncio.wait_for(came.wait(), TIMEOUT_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert sweep.cells

    with scripted_server(event_reply(CELL_EVENTS[0], end="held")) as received:
        asyncio.run(run(received.url))
        assert received.disconnected.wait(TIMEOUT_S)


def test_after_it_is_closed_there_is_nothing_more() -> None:
    with (
        scripted_server(event_reply(*CELL_EVENTS, end="held")) as received,
        Client(received.url) as client,
    ):
        sweep = client.sweep(["softmax"], [256], progress=False)
        next(sweep)
        sweep.close()
        sweep.close()
        assert list(sweep) == []
        never = client.sweep(["softmax"], [256], progress=False)
        never.close()
        assert list(never) == []
    assert len(received.paths) == 1


@pytest.mark.parametrize(
    "before",
    [
        [problem_reply(503, "not-now", retry_after="0")] * 3,
        [drop_connection, drop_connection],
        [drop_connection, problem_reply(503, "not-now", retry_after="0")],
        [event_reply(end="cut"), event_reply(b": nothing yet\n\n", end="cut")],
    ],
)
def test_until_the_first_event_it_is_sent_again(sweeping: Sweeping, before: list[Reply]) -> None:
    with scripted_server(*before, WHOLE_STREAM) as received:
        cells, _ = sweeping(received.url)
        assert len(cells) == 3
        assert len(received.bodies) == len(before) + 1
        assert len(set(received.bodies)) == 1


def test_only_so_often(sweeping: Sweeping) -> None:
    with scripted_server(problem_reply(503, "not-now", retry_after="0")) as received:
        with pytest.raises(QkvError, match="because"):
            sweeping(received.url, retries=2)
        assert len(received.paths) == 3


def test_what_breaks_after_the_first_event_is_raised_at_once(sweeping: Sweeping) -> None:
    with scripted_server(
        event_reply(progress(0, "softmax", 256), end="cut"), WHOLE_STREAM
    ) as received:
        with pytest.raises(httpx.RemoteProtocolError):
            sweeping(received.url)
        assert len(received.paths) == 1


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (problem_reply(422, "invalid-content"), 422),
        (problem_reply(404, "not-found"), 404),
        (
            event_reply(CELL_EVENTS[0], encode_event("error", {"problem": PROBLEM})),
            413,
        ),  # it began well
        (event_reply(CELL_EVENTS[0]), 400),  # it ended too early, and not by being cut
        (event_reply(), 400),
        (event_reply(encode_event("cell", {"index": 0})), 400),
        (event_reply(encode_event("cell", [1])), 400),
        (event_reply(encode_event("progress", {"done": 0})), 400),
        (event_reply(encode_event("done", {})), 400),
        (event_reply(encode_event("error", {})), 400),
        (event_reply(b"event: cell\ndata: {\n\n"), 400),
        (json_reply({"cells": []}), 400),
        (json_reply(b"<html>", kind="text/html"), 400),
        (json_reply(b"<html>", 502, kind="text/html"), 400),
    ],
)
def test_whatever_may_answer_is_an_error_of_ours(
    sweeping: Sweeping, line: Reply, status: int
) -> None:
    with scripted_server(line) as received:
        with pytest.raises(QkvError) as refused:
            sweeping(received.url)
        assert refused.value.status == status
        assert len(received.paths) == 1


def test_events_of_a_later_service_are_passed_over(sweeping: Sweeping) -> None:
    told = [
        encode_event("weather", {"rain": True}),
        encode_event("cell", CELLS[0] | {"mood": "good"}),
        DONE_EVENT,
    ]
    with scripted_server(event_reply(*told)) as received:
        cells, _ = sweeping(received.url)
    assert [c.length for c in cells] == [256]


def test_where_nothing_listens(sweeping: Sweeping) -> None:
    with pytest.raises(httpx.ConnectError):
        sweeping("http://127.0.0.1:9", retries=0)


def test_the_table_the_lines_and_the_page() -> None:
    with scripted_server(WHOLE_STREAM) as received:
        _, sweep = swept(received.url)
    assert sweep.table().splitlines() == [
        "length        softmax    linear",
        "───────────────────────────────",
        "",
        "milliseconds: median (least–most)",
        "  256       1 (0.5–2)   2 (1–4)",
        "  512    does not run",
        "",
        "From a length of about 300 on, linear is faster than softmax.",
        "softmax at 512: too many",
    ]
    lines = sweep.csv().splitlines()
    assert lines[0].startswith("index,variant,parameters,length,median_ms,")
    assert lines[1] == "0,softmax,{},256,1.0,0.5,2.0,5,10,20,30,"
    assert lines[3] == "0,softmax,{},512,,,,,,,,too many"
    page = sweep._repr_html_()
    assert all(text in page for text in ("does not run", "1 (0.5–2)", "linear is faster than"))
    assert "1 (0.5–2)" in sweep.cells[0]._repr_html_()


def test_what_has_not_begun_shows_as_much() -> None:
    with Client() as client:
        sweep = client.sweep(["softmax"], [256])
    assert "Nothing is measured yet." in sweep.table()
    assert "Nothing is measured yet." in sweep._repr_html_()


def test_namesakes_are_told_apart_by_their_parameters() -> None:
    made = [
        cell(i, "softmax", 256) | {"parameters": {"causal": causal, "scale": 1.0}}
        for i, causal in enumerate((True, False))
    ]
    crossed = {"cells": 2, "crossovers": [{"from": 0, "to": 1, "length": 100.0}]}
    with scripted_server(
        event_reply(*(encode_event("cell", c) for c in made), encode_event("done", crossed))
    ) as received:
        _, sweep = swept(received.url)
    assert sweep.names == {0: "softmax\ncausal=true", 1: "softmax\ncausal=false"}
    assert "100 on, softmax causal=false is faster than softmax causal=true." in sweep.table()


def test_an_interrupted_sweep_keeps_what_came_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is raised wherever the client waits."""
    with (
        scripted_server(event_reply(*CELL_EVENTS, end="held")) as received,
        Client(received.url) as client,
    ):
        sweep = client.sweep(["softmax"], [256], progress=False)
        found = [next(sweep) for _ in CELL_EVENTS]

        def interrupted(chunk: bytes) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(
            "qkv.client.event_parser.EventParser.feed", lambda self, chunk: interrupted(chunk)
        )
        with pytest.raises(KeyboardInterrupt):
            next(sweep)
        assert received.disconnected.wait(TIMEOUT_S)
        assert sweep.cells == found


def test_the_service_is_swept(url: str, sweeping: Sweeping) -> None:
    """What it says of a run, it says of a cell; what cannot run is a cell too."""
    cells, sweep = sweeping(url, heads=2, width=4, batch=3, repeats=2, causal=True)
    assert sweep.finished
    assert [(c.index, c.variant, c.length) for c in cells] == [
        (i, name, length) for length in (256, 512) for i, name in enumerate(("softmax", "linear"))
    ]
    x = np.ones((3, 2, 256, 4), np.float32)
    with Client(url) as client:
        for found in cells[:2]:
            assert found.parameters == {"causal": True}
            run = client.attend(found.variant, query=x, key=x, value=x, causal=True, weights="none")
            assert (found.flops, found.bytes) == (run.timing["flops"], run.timing["bytes"])
            assert found.least_ms is not None
            assert found.median_ms is not None
            assert found.most_ms is not None
            assert 0 < found.least_ms <= found.median_ms <= found.most_ms
            assert found.repeats == 2
            assert found.peak_bytes


def test_what_the_service_cannot_run_is_a_cell(serve: Callable[..., Server]) -> None:
    server = serve(max_scores=300_000)
    with Client(server.url) as client:
        sweep = client.sweep(["softmax"], [256, 1024], heads=1, progress=False)
        ran, refused = sweep
    assert ran.problem is None
    assert refused.problem is not None
    assert refused.problem["status"] == 413
    assert "does not run" in sweep.table()


def test_who_leaves_the_service_takes_nobody_s_time(server: Server) -> None:
    """The rest of a sweep of minutes does not run."""
    with Client(server.url) as client:
        lengths = [16, *range(2048, 4096, 64)]
        with client.sweep(["softmax"], lengths, repeats=100, progress=False) as sweep:
            assert next(sweep).length == 16
        wait_until(lambda: server.queued_count == 0)
        assert client.attend("softmax", query=QUERY, key=QUERY, value=QUERY).output.shape == (2, 2)
