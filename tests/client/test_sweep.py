"""Tests of sweeps over a real socket, with both clients: cells as they arrive, and errors."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

import httpx
import numpy as np
import pytest
from matplotlib.figure import Figure

from qkv import (
    AsyncClient,
    AsyncSweep,
    Cell,
    Client,
    Crossover,
    QkvError,
    ServiceUnreachable,
    Sweep,
)
from support.clients import delays as delays
from support.processes import TIMEOUT_S
from support.scripted_server import (
    Reply,
    drop_connection,
    encode_event,
    event_reply,
    json_reply,
    problem_reply,
    scripted_server,
)
from support.sweep_events import (
    CELL_EVENTS,
    CELLS,
    DONE_EVENT,
    PROBLEM,
    WHOLE_STREAM,
    cell,
    progress,
)

RunSweep = Callable[..., tuple[list[Cell], Any]]


QUERY: Final = np.eye(2, dtype=np.float32)


def sweep_sync(
    url: str, take: int = 99, retries: int = 3, **options: Any
) -> tuple[list[Cell], Sweep]:
    """Returns the first cells of a sweep by `Client`, and the sweep."""
    with Client(url, retries=retries, timeout=TIMEOUT_S) as client:
        sweep = client.sweep(["softmax", "linear"], [256, 512], progress=False, **options)
        with sweep:
            cells = [found for _, found in zip(range(take), sweep, strict=False)]
        return cells, sweep


def sweep_async(
    url: str, take: int = 99, retries: int = 3, **options: Any
) -> tuple[list[Cell], AsyncSweep]:
    async def run() -> tuple[list[Cell], AsyncSweep]:
        cells: list[Cell] = []
        async with AsyncClient(url, retries=retries, timeout=TIMEOUT_S) as client:
            sweep = client.sweep(["softmax", "linear"], [256, 512], progress=False, **options)
            async with sweep:
                async for found in sweep:
                    cells.append(found)
                    if len(cells) == take:
                        break
            return cells, sweep

    return asyncio.run(run())


@pytest.fixture(params=[sweep_sync, sweep_async])
def run_sweep(request: pytest.FixtureRequest) -> RunSweep:
    run: RunSweep = request.param
    return run


def test_cells_arrive_in_the_order_of_measurement(run_sweep: RunSweep) -> None:
    with scripted_server(WHOLE_STREAM) as received:
        cells, sweep = run_sweep(received.url)
    assert [(c.index, c.variant, c.length, c.median_ms, c.least_ms) for c in cells] == [
        (0, "softmax", 256, 1.0, 0.5), (1, "linear", 256, 2.0, 1.0),
        (0, "softmax", 512, None, None),
    ]  # fmt: skip
    assert cells[2].problem == PROBLEM
    assert sweep.cells == cells
    assert sweep.crossovers == [Crossover(before=0, after=1, length=300.5, between=(256, 512))]
    assert sweep.finished
    assert received.paths == ["/v1/sweep"]
    assert received.headers[0]["accept"] == "text/event-stream"
    assert received.last_json == {
        "variants": [{"variant": name, "parameters": {}} for name in ("softmax", "linear")],
        "lengths": [256, 512],
    }


def test_all_options_are_sent(run_sweep: RunSweep) -> None:
    options = {"batch": 2, "heads": np.int64(4), "width": 8, "dtype": "float16", "seed": 3}
    with scripted_server(WHOLE_STREAM) as received:
        run_sweep(received.url, **options, repeats=7, causal=np.True_, scale=None, window=(2, 0))
    shared = {"causal": True, "window": [2, 0]}
    named = [{"variant": name, "parameters": shared} for name in ("softmax", "linear")]
    assert received.last_json == {**options, "repeats": 7, "variants": named, "lengths": [256, 512]}


def test_own_parameters_of_a_variant_override_shared_ones() -> None:
    chosen: list[Any] = ["mean", {"variant": "taylor", "parameters": {"causal": np.False_}}]
    with scripted_server(WHOLE_STREAM) as received, Client(received.url) as client:
        list(client.sweep(chosen, range(1, 3), progress=False, causal=True))
    assert received.last_json["variants"] == [
        {"variant": "mean", "parameters": {"causal": True}},
        {"variant": "taylor", "parameters": {"causal": False}},
    ]
    assert received.last_json["lengths"] == [1, 2]


def test_request_is_sent_when_the_first_cell_is_read() -> None:
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
        ("softmax", [256], {}, QkvError),  # expected: a list, even with one variant
        ({"variant": "softmax"}, [256], {}, QkvError),
        (["softmax"], [256.5], {}, TypeError),
        (["softmax"], [256], {"query": np.ones((2, 2))}, QkvError),  # the service makes the inputs
        (["softmax"], [256], {"scale": math.inf}, QkvError),
    ],
)
def test_invalid_arguments_are_errors_without_a_request(
    variants: Any, lengths: Any, given: dict[str, Any], error: type[Exception]
) -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(error):
        client.sweep(variants, lengths, **given)


def test_closing_early_closes_the_connection_and_keeps_the_cells(run_sweep: RunSweep) -> None:
    with scripted_server(event_reply(*CELL_EVENTS, end="held")) as received:
        cells, sweep = run_sweep(received.url, take=2)
        assert received.disconnected.wait(TIMEOUT_S)
    assert [c.variant for c in cells] == ["softmax", "linear"]
    assert sweep.cells == cells
    assert not sweep.finished


def test_cancelled_async_sweep_closes_its_connection() -> None:
    async def run(url: str) -> None:
        async with AsyncClient(url) as client:
            sweep = client.sweep(["softmax"], [256], progress=False)
            has_cell = asyncio.Event()

            async def consume() -> None:
                async for _ in sweep:
                    has_cell.set()

            task = asyncio.create_task(consume())
            await asyncio.wait_for(has_cell.wait(), TIMEOUT_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert sweep.cells

    with scripted_server(event_reply(CELL_EVENTS[0], end="held")) as received:
        asyncio.run(run(received.url))
        assert received.disconnected.wait(TIMEOUT_S)


def test_closed_sweep_yields_no_cells() -> None:
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


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize(
    "before",
    [
        [problem_reply(503, "service-unavailable", retry_after="0")] * 3,
        [drop_connection, drop_connection],
        [drop_connection, problem_reply(503, "service-unavailable", retry_after="0")],
        [event_reply(end="cut"), event_reply(b": nothing yet\n\n", end="cut")],
        [json_reply(b"Internal Server Error", 500, kind="text/plain"), drop_connection],
    ],
)
def test_request_is_sent_again_until_the_first_event(
    run_sweep: RunSweep, before: list[Reply]
) -> None:
    with scripted_server(*before, WHOLE_STREAM) as received:
        cells, _ = run_sweep(received.url)
        assert len(cells) == 3
        assert len(received.bodies) == len(before) + 1
        assert len(set(received.bodies)) == 1


@pytest.mark.usefixtures("delays")
def test_retries_are_limited(run_sweep: RunSweep) -> None:
    with scripted_server(problem_reply(503, "service-unavailable", retry_after="0")) as received:
        with pytest.raises(QkvError, match="because"):
            run_sweep(received.url, retries=2)
        assert len(received.paths) == 3


def test_broken_connection_after_the_first_event_is_not_retried(run_sweep: RunSweep) -> None:
    with scripted_server(
        event_reply(progress(0, "softmax", 256), end="cut"), WHOLE_STREAM
    ) as received:
        with pytest.raises(httpx.RemoteProtocolError):
            run_sweep(received.url)
        assert len(received.paths) == 1


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (problem_reply(422, "invalid-content"), 422),
        (
            event_reply(CELL_EVENTS[0], encode_event("error", {"problem": PROBLEM})),
            413,
        ),
        (event_reply(CELL_EVENTS[0]), 400),  # ends early, but whole
        (event_reply(), 400),
        (event_reply(encode_event("cell", {"index": 0})), 400),
        (event_reply(encode_event("cell", [1])), 400),
        (event_reply(encode_event("progress", {"done": 0})), 400),
        (event_reply(encode_event("done", {})), 400),
        (event_reply(encode_event("error", {})), 400),
        (event_reply(b"event: cell\ndata: {\n\n"), 400),
        (json_reply({"cells": []}), 400),
    ],
)
def test_invalid_response_is_a_qkv_error(run_sweep: RunSweep, line: Reply, status: int) -> None:
    with scripted_server(line) as received:
        with pytest.raises(QkvError) as refused:
            run_sweep(received.url)
        assert refused.value.status == status
        assert len(received.paths) == 1


def test_unknown_events_and_fields_are_ignored(run_sweep: RunSweep) -> None:
    events = [
        encode_event("weather", {"rain": True}),
        encode_event("cell", CELLS[0] | {"mood": "good"}),
        DONE_EVENT,
    ]
    with scripted_server(event_reply(*events)) as received:
        cells, _ = run_sweep(received.url)
    assert [c.length for c in cells] == [256]


def test_missing_service_is_named(run_sweep: RunSweep) -> None:
    with pytest.raises(ServiceUnreachable, match=r"http://127\.0\.0\.1:9: .*`qkv serve`"):
        run_sweep("http://127.0.0.1:9", retries=0)


def test_table_csv_and_html_have_all_cells() -> None:
    with scripted_server(WHOLE_STREAM) as received:
        _, sweep = sweep_sync(received.url)
    assert sweep.table().splitlines() == [
        "length        softmax    linear",
        "───────────────────────────────",
        "",
        "milliseconds: median (least–most)",
        "  256       1 (0.5–2)   2 (1–4)",
        "  512    does not run",
        "",
        "linear becomes faster than softmax between lengths 256 and 512.",
        "softmax at 512: too many",
    ]
    lines = sweep.csv().splitlines()
    assert lines[0].startswith("index,variant,parameters,length,median_ms,")
    assert lines[1] == "0,softmax,{},256,1.0,0.5,2.0,5,10,20,30,,,"
    assert lines[3] == "0,softmax,{},512,,,,,,,,too many,,"
    page = sweep._repr_html_()
    assert all(text in page for text in ("does not run", "1 (0.5–2)", "linear becomes faster than"))
    assert "1 (0.5–2)" in sweep.cells[0]._repr_html_()


def test_unstarted_sweep_has_an_empty_table() -> None:
    with Client() as client:
        sweep = client.sweep(["softmax"], [256])
    assert "Nothing is measured yet." in sweep.table()
    assert "Nothing is measured yet." in sweep._repr_html_()


def test_variants_of_the_same_name_are_labelled_by_parameters() -> None:
    cells = [
        cell(i, "softmax", 256) | {"parameters": {"causal": causal, "scale": 1.0}}
        for i, causal in enumerate((True, False))
    ]
    crossover = {"from": 0, "to": 1, "length": 100.0, "between": [64, 256]}
    done = {"cells": 2, "crossovers": [crossover]}
    with scripted_server(
        event_reply(*(encode_event("cell", c) for c in cells), encode_event("done", done))
    ) as received:
        _, sweep = sweep_sync(received.url)
    assert sweep.names == {0: "softmax\ncausal=true", 1: "softmax\ncausal=false"}
    sentence = (
        "softmax causal=false becomes faster than softmax causal=true between lengths 64 and 256."
    )
    assert sentence in sweep.table()


def test_interrupted_sweep_keeps_its_cells_and_ends() -> None:
    """Ctrl-C raises in the middle of reading."""
    with (
        scripted_server(event_reply(*CELL_EVENTS, end="held")) as received,
        Client(received.url) as client,
    ):
        sweep = client.sweep(["softmax"], [256], progress=False)
        found = [next(sweep) for _ in CELL_EVENTS]

        main = threading.main_thread().ident
        assert main is not None
        interruption = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
        interruption.start()
        with pytest.raises(KeyboardInterrupt):
            next(sweep)
        assert received.disconnected.wait(TIMEOUT_S)
        assert sweep.cells == found


def test_cells_of_a_real_service_agree_with_its_runs(url: str, run_sweep: RunSweep) -> None:
    """Flops and bytes of a cell are those of a run."""
    cells, sweep = run_sweep(url, heads=2, width=4, batch=3, repeats=2, causal=True)
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


def test_decoding_has_a_curve_for_each_way(url: str, run_sweep: RunSweep) -> None:
    """In table, CSV and figure: what a token costs, and what is kept for it."""
    cells, sweep = run_sweep(url, heads=2, width=4, repeats=2, mode="decode")
    ways = [("softmax", "recompute"), ("softmax", "cache"), ("linear", "state")]
    assert [(c.variant, c.way) for c in cells] == 2 * ways
    assert sweep.names == {i: "\n".join(way) for i, way in enumerate(ways)}
    kept = sweep.table().split("kept from token to token")[1]
    assert f"{2 * 2 * 257 * 4 * 4:,} bytes" in kept
    assert f"{cells[2].held_bytes:,} bytes" in kept
    *_, line = sweep.csv().splitlines()
    assert line.endswith(f",state,{cells[2].held_bytes}")
    (axes,) = sweep.plot().axes
    assert axes.get_xlabel() == "tokens before the next one"
    assert [text.get_text() for text in axes.get_legend().texts] == [" ".join(w) for w in ways]


def test_sweep_is_plotted(run_sweep: RunSweep) -> None:
    with scripted_server(WHOLE_STREAM) as received:
        _, sweep = run_sweep(received.url)
    (ax,) = sweep.plot().axes
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    lines = {line.get_label(): line.get_xydata().tolist() for line in ax.lines[:2]}
    for name in ("softmax", "linear"):
        cells = [cell for cell in sweep.cells if cell.variant == name and cell.problem is None]
        assert lines[name] == [[cell.length, cell.median_ms] for cell in cells]
    assert "linear faster than softmax between 256 and 512" in ax.texts[0].get_text()
    page = Figure()
    assert sweep.plot(ax=page.subplots()) is page


def test_plot_without_matplotlib_names_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scripted_server(WHOLE_STREAM) as received:
        _, sweep = sweep_sync(received.url)
    for name in [n for n in sys.modules if n.startswith(("matplotlib", "qkv.client.figures"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[plot\]'"):
        sweep.plot()


def test_repr_of_a_sweep_is_one_line(run_sweep: RunSweep) -> None:
    with scripted_server(WHOLE_STREAM) as received:
        _, sweep = run_sweep(received.url)
    kind = type(sweep).__name__
    assert repr(sweep) == f"<{kind} of softmax, linear: 3 cells, finished>"


def test_crossovers_are_in_the_sentences_and_without_one_the_fastest_variant_is() -> None:
    cells = [encode_event("cell", cell(i, name, n, ms)) for n, i, name, ms in (
        (256, 0, "softmax", 1.0), (256, 1, "linear", 2.0),
        (512, 0, "softmax", 2.0), (512, 1, "linear", 3.0),
    )]  # fmt: skip
    done = encode_event("done", {"cells": 4, "crossovers": []})
    with scripted_server(event_reply(*cells, done)) as received:
        _, sweep = sweep_sync(received.url)
    assert sweep.sentences() == [
        "softmax is faster than the others at every length, by the medians."
    ]
