"""Tests of the commands compare and sweep, with a real service and with a scripted server."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import numpy as np
import pytest

from qkv import Client
from qkv.errors import stopping
from support.commands import error_of, invoke, one_error, stdout_of, target_options, write_tensors
from support.processes import TIMEOUT_S, start_command, wait_until, wait_until_asleep
from support.scripted_server import encode_event, event_reply, problem_reply, scripted_server
from support.sweep_events import CELL_EVENTS, WHOLE_STREAM, progress
from support.terminals import open_terminal

SWEEP: Final = ("sweep", "softmax", "linear", "--lengths", "256,512")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    arrays = {n: draw.normal(size=(1, 2, 6, 4)).astype("f4") for n in ("query", "key", "value")}
    return write_tensors(tmp_path / "in.npz", "inputs", arrays)


def columns(table: str) -> list[str]:
    return table.splitlines()[0].split()


@pytest.mark.parametrize("place", ["service", "local"])
def test_compare_prints_the_result_of_the_client(url: str, source: Path, place: str) -> None:
    """All figures but the times are equal, in JSON to the last bit."""
    chosen = ("compare", "softmax", "linear", "taylor", source, "-p", "causal=true")
    here = target_options(place, url)
    printed = json.loads(stdout_of(*chosen, "--json", *here))
    with Client(url) as client, np.load(source) as arrays:
        expected = client.compare(["softmax", "linear", "taylor"], causal=True, **arrays)
    assert [v["variant"] for v in printed["variants"]] == ["softmax", "linear", "taylor"]
    for by_command, by_client in zip(printed["variants"], expected.variants, strict=True):
        assert by_client.output is not None
        assert by_client.weights is not None
        assert by_client.weights.kl_divergence is not None
        assert by_command["output"]["relative_error"] == by_client.output.relative_error
        assert (
            by_command["weights"]["kl_divergence"]["worst"] == by_client.weights.kl_divergence.worst
        )
        assert by_command["parameters"] == {"causal": True}
        assert by_command["timing"]["repeats"] == 5
    table = stdout_of(*chosen, *here)
    assert columns(table) == ["softmax", "linear", "taylor"]  # the baseline once


def test_compare_takes_anchor_repeats_rows_and_own_parameters(url: str, source: Path) -> None:
    own = '{"variant": "taylor", "parameters": {"causal": true}}'
    printed = json.loads(
        stdout_of(
            "compare", own, "linear", source, "--anchor", "efficient", "--repeats", "2",
            "--rows", "all", "--json", "--url", url,
        )
    )  # fmt: skip
    assert printed["anchor"]["variant"] == "efficient"
    assert printed["anchor"]["timing"]["repeats"] == 2
    assert [v["parameters"] for v in printed["variants"]] == [{"causal": True}, {}]


def test_compare_prints_the_heads_below_the_table(url: str, source: Path) -> None:
    chosen = ("compare", "linear", source, "--per-head", "--local")
    printed = json.loads(stdout_of(*chosen, "--json"))
    with Client(url) as client, np.load(source) as arrays:
        expected = client.compare(["linear"], per_head=True, **arrays)
    assert len(printed["anchor"]["heads"]) == 2
    heads = expected.variants[0].heads
    assert heads is not None
    for by_command, by_client in zip(printed["variants"][0]["heads"], heads, strict=True):
        assert by_client.output is not None
        assert by_command["output"]["relative_error"] == by_client.output.relative_error
    text = stdout_of(*chosen)
    assert text.endswith(f"\n\n{expected.heads_table()}\n")
    assert columns(text) == ["softmax", "linear"]


def test_compare_uses_the_fields_of_the_file(url: str, tmp_path: Path) -> None:
    x = np.ones((4, 3), np.float32)
    arrays = {
        "x": x, "layer.W_query.weight": x[:2], "layer.W_key.weight": x[:2],
        "layer.W_value.weight": x[:2],
    }  # fmt: skip
    file = write_tensors(tmp_path / "in.safetensors", "inputs", arrays, parameters={"causal": True})
    printed = json.loads(
        stdout_of("compare", "linear", file, "--layout", "v2", "--json", "--url", url)
    )
    assert printed["variants"][0]["parameters"] == {"causal": True}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["compare", "nope", "{source}"], "no variant 'nope'"),
        (["compare", "linear", "{source}", "-p", "scale=2"], "(-p scale=2)"),
        (["compare", "linear", "{source}", "--repeats", "0"], "(--repeats)"),
        (
            ["compare", "linear", "{source}", "--rows", "some"],
            "--rows is wrong: got 'some', expected a whole number, or all",
        ),
        (["compare", "{{", "{source}"], "not JSON"),
        (["compare", "{source}"], "Missing argument 'VARIANT...'"),
        (["sweep"], "Missing argument 'VARIANT...'"),
        (["sweep", "softmax", "--lengths", "8,x"], "whole numbers with commas"),
        (["sweep", "softmax", "--lengths", "0"], "(--lengths)"),
        (["sweep", "softmax", "--heads", "0"], "(--heads)"),
        (["sweep", "softmax", "--dtype", "int8"], "'int8' is not one of"),
        (["sweep", "softmax", "-p", "nope=1"], "(-p nope=1)"),
        (["sweep", "softmax", "--csv", "{folder}/out.txt"], "none of the suffixes .csv"),
        (["sweep", "softmax", "--csv", "{folder}/no/out.csv"], "does not exist"),
        (["sweep", "softmax", "--plot", "{folder}/out.gif"], "none of the suffixes .svg, .png"),
    ],
)
def test_error_is_one_line_that_names_the_wrong_word(
    source: Path, tmp_path: Path, words: list[str], error: str
) -> None:
    words_typed = [word.format(source=source, folder=tmp_path) for word in words]
    assert error in error_of(tmp_path, *words_typed, "--local")


@pytest.mark.parametrize("place", ["service", "local"])
def test_sweep_prints_a_table_and_writes_both_files(url: str, tmp_path: Path, place: str) -> None:
    lines, plot = tmp_path / "out.csv", tmp_path / "out.svg"
    printed = stdout_of(
        "sweep", "softmax", "taylor", "--lengths", "8,16", "--repeats", "2", "--heads", "2",
        "--width", "4", "--batch", "2", "--dtype", "float64", "--seed", "1", "-p", "causal=true",
        "--csv", lines, "--plot", plot, *target_options(place, url),
    )  # fmt: skip
    assert columns(printed) == ["length", "softmax", "taylor"]
    assert printed.endswith(f"written to {lines}\nwritten to {plot}\n")
    with lines.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["length"], row["repeats"]) for row in rows] == [
        (name, length, "2") for length in ("8", "16") for name in ("softmax", "taylor")
    ]
    assert all(json.loads(row["parameters"]) == {"causal": True} for row in rows)
    assert all(
        0 < float(r["least_ms"]) <= float(r["median_ms"]) <= float(r["most_ms"]) for r in rows
    )
    assert [int(row["bytes"]) for row in rows] == [2 * 2 * n * 4 * 8 * 4 for n in (8, 8, 16, 16)]
    ElementTree.parse(plot)


def test_sweep_times_the_next_token() -> None:
    printed = stdout_of(
        "sweep", "softmax", "gated", "--lengths", "8", "--repeats", "1", "--heads", "1",
        "--width", "4", "--mode", "decode", "--local",
    )  # fmt: skip
    for word in ("recompute", "cache", "state", f"{2 * 9 * 4 * 4} bytes"):
        assert word in printed


def test_cell_without_enough_memory_is_reported_and_the_sweep_continues() -> None:
    """Each input would have 4 PiB."""
    huge = ("--batch", "4096", "--heads", "4096", "--width", "64", "--lengths", "1048576")
    printed = stdout_of("sweep", "linear", "mean", *huge, "--local")
    for name in ("linear", "mean"):
        assert f"{name} at 1,048,576: there is no memory for its inputs" in printed


@pytest.mark.parametrize(
    ("suffix", "magic"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")]
)
def test_the_crossover_is_in_table_and_plot(tmp_path: Path, suffix: str, magic: bytes) -> None:
    plot = tmp_path / f"out.{suffix}"
    with scripted_server(WHOLE_STREAM) as received:
        printed = stdout_of(*SWEEP, "--plot", plot, "--url", received.url)
    assert "linear becomes faster than softmax between lengths 256 and 512." in printed
    assert "softmax at 512: too many" in printed
    assert plot.read_bytes().startswith(magic)
    if suffix == "svg":
        assert "<!--  linear faster than softmax between 256 and 512 -->" in plot.read_text()


def test_plot_without_matplotlib_names_the_command_to_install_it(tmp_path: Path) -> None:
    """The command fails before the sweep."""
    with scripted_server(WHOLE_STREAM) as received:
        words = [*SWEEP, "--plot", str(tmp_path / "out.svg"), "--url", received.url]
        program = (
            "import sys; sys.modules['matplotlib'] = None; "
            f"from qkv.cli.main import main; main({words})"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
        assert not received.paths
    assert (done.returncode, done.stdout) == (1, "")
    assert "a plot needs it. Run `pip install '.[plot]'`" in one_error(done.stderr)


def test_cells_before_a_failure_are_kept(tmp_path: Path) -> None:
    lines = tmp_path / "out.csv"
    failure = encode_event("error", {"problem": stopping().problem()})
    with scripted_server(event_reply(CELL_EVENTS[0], CELL_EVENTS[1], failure)) as received:
        done = invoke(*SWEEP, "--csv", lines, "--url", received.url)
    assert done.exit_code == 1
    assert one_error(done.stderr) == "Error: the service is stopping"
    assert columns(done.stdout) == ["length", "softmax", "linear"]
    assert len(lines.read_text().splitlines()) == 3


def test_rejected_sweep_writes_no_file(tmp_path: Path) -> None:
    with scripted_server(problem_reply(422, "invalid-content")) as received:
        line = error_of(tmp_path, *SWEEP, "--csv", tmp_path / "out.csv", "--url", received.url)
    assert line == "Error: because"


@pytest.mark.process
def test_ctrl_c_keeps_the_measured_cells_and_ends_the_sweep(tmp_path: Path) -> None:
    lines = tmp_path / "out.csv"
    screen, stderr = open_terminal()
    with (
        scripted_server(
            event_reply(*CELL_EVENTS[:2], progress(2, "softmax", 512), end="held")
        ) as received,
        (tmp_path / "printed").open("w") as stdout,
    ):
        words = (*SWEEP, "--csv", str(lines), "--url", received.url)
        process = start_command(words, {}, stdout.fileno(), stderr)
        os.close(stderr)
        seen = b""
        while "softmax at 512:" not in seen.decode(errors="ignore"):
            seen += os.read(screen, 1024)
        wait_until(lambda: len(received.paths) == 1)
        wait_until_asleep(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
        assert received.disconnected.wait(TIMEOUT_S)
    with contextlib.suppress(OSError):  # the end of a terminal is an OSError
        while more := os.read(screen, 1024):
            seen += more
    os.close(screen)
    assert columns((tmp_path / "printed").read_text()) == ["length", "softmax", "linear"]
    assert len(lines.read_text().splitlines()) == 3
    *_, bar, blank, end = seen.decode().rstrip("\r\n").rsplit("\r", 3)
    assert bar.startswith("softmax at 512:  67%")
    assert "| 2/3 [" in bar
    assert not blank.strip()
    assert end == "Error: interrupted"


@pytest.mark.process
def test_ctrl_c_ends_a_local_sweep(tmp_path: Path) -> None:
    """The sweep ends before its next run."""
    lines = tmp_path / "out.csv"
    words = ("sweep", "mean", "--lengths", "8,16384", "--repeats", "100", "--local")
    screen, stderr = open_terminal()
    with (tmp_path / "printed").open("w") as stdout:
        process = start_command((*words, "--csv", str(lines)), {}, stdout.fileno(), stderr)
    os.close(stderr)
    seen = b""
    while "mean at 16,384:" not in seen.decode(errors="ignore"):
        seen += os.read(screen, 1024)
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 130
    os.close(screen)
    assert columns((tmp_path / "printed").read_text()) == ["length", "mean"]
    assert len(lines.read_text().splitlines()) == 2
