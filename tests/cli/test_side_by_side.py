"""The commands compare and sweep, against a real service, and against one that fails."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import numpy as np
import pytest

from qkv import Client
from support.commands import error_of, invoke, one_error, stdout_of, target_options, write_tensors
from support.processes import TIMEOUT_S, wait_until, wait_until_asleep
from support.scripted_server import encode_event, event_reply, problem_reply, scripted_server
from support.sweep_events import CELL_EVENTS, WHOLE_STREAM, progress

SWEEP: Final = ("sweep", "softmax", "linear", "--lengths", "256,512")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    arrays = {n: draw.normal(size=(1, 2, 6, 4)).astype("f4") for n in ("query", "key", "value")}
    return write_tensors(tmp_path / "in.npz", "inputs", arrays)


def columns(table: str) -> list[str]:
    return table.splitlines()[0].split()


@pytest.mark.parametrize("place", ["service", "local"])
def test_compare_prints_what_the_client_answers(url: str, source: Path, place: str) -> None:
    """All but the times: bit for bit where it is JSON."""
    chosen = ("compare", "softmax", "linear", "taylor", source, "-p", "causal=true")
    here = target_options(place, url)
    said = json.loads(stdout_of(*chosen, "--json", *here))
    with Client(url) as client, np.load(source) as arrays:
        wanted = client.compare(["softmax", "linear", "taylor"], causal=True, **arrays)
    assert [v["variant"] for v in said["variants"]] == ["softmax", "linear", "taylor"]
    for mine, theirs in zip(said["variants"], wanted.variants, strict=True):
        assert theirs.output is not None
        assert theirs.weights is not None
        assert theirs.weights.kl_divergence is not None
        assert mine["output"]["relative_error"] == theirs.output.relative_error
        assert mine["weights"]["kl_divergence"]["worst"] == theirs.weights.kl_divergence.worst
        assert mine["parameters"] == {"causal": True}
        assert mine["timing"]["repeats"] == 5
    table = stdout_of(*chosen, *here)
    assert columns(table) == ["softmax", "linear", "taylor"]  # the anchor once


def test_compare_takes_an_anchor_repeats_rows_and_a_variants_own(url: str, source: Path) -> None:
    own = '{"variant": "taylor", "parameters": {"causal": true}}'
    said = json.loads(
        stdout_of(
            "compare", own, "linear", source, "--anchor", "efficient", "--repeats", "2",
            "--rows", "all", "--json", "--url", url,
        )
    )  # fmt: skip
    assert said["anchor"]["variant"] == "efficient"
    assert said["anchor"]["timing"]["repeats"] == 2
    assert [v["parameters"] for v in said["variants"]] == [{"causal": True}, {}]


def test_compare_reads_what_a_file_says(url: str, tmp_path: Path) -> None:
    x = np.ones((4, 3), np.float32)
    arrays = {
        "x": x, "layer.W_query.weight": x[:2], "layer.W_key.weight": x[:2],
        "layer.W_value.weight": x[:2],
    }  # fmt: skip
    file = write_tensors(tmp_path / "in.safetensors", "inputs", arrays, parameters={"causal": True})
    said = json.loads(
        stdout_of("compare", "linear", file, "--layout", "v2", "--json", "--url", url)
    )
    assert said["variants"][0]["parameters"] == {"causal": True}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["compare", "nope", "{source}"], "no variant 'nope'"),
        (["compare", "linear", "{source}", "--anchor", "nope"], "no variant 'nope'"),
        (["compare", "linear", "{source}", "-p", "scale=2"], "(/variants/0/parameters/scale)"),
        (["compare", "linear", "{source}", "--repeats", "0"], "(/repeats)"),
        (["compare", "linear", "{source}", "--rows", "some"], "a whole number, or all"),
        (["compare", "linear", "{source}", "-p", "x"], "NAME=VALUE"),
        (["compare", "{{", "{source}"], "not JSON"),
        (["compare", "linear", "{source}.npz"], "No such file"),
        (["compare", "{source}"], "Missing argument 'VARIANT...'"),
        (["sweep"], "Missing argument 'VARIANT...'"),
        (["sweep", "nope"], "no variant 'nope'"),
        (["sweep", "linear_layer"], "(/variants/0)"),
        (["sweep", "softmax", "--lengths", "8,x"], "whole numbers with commas"),
        (["sweep", "softmax", "--lengths", "0"], "(/lengths/0)"),
        (["sweep", "softmax", "--heads", "0"], "(/heads)"),
        (["sweep", "softmax", "--dtype", "int8"], "'int8' is not one of"),
        (["sweep", "softmax", "-p", "nope=1"], "(/variants/0/parameters/nope)"),
        (["sweep", "softmax", "--csv", "{folder}/out.txt"], "none of the suffixes .csv"),
        (["sweep", "softmax", "--csv", "{folder}/no/out.csv"], "not there"),
        (["sweep", "softmax", "--plot", "{folder}/out.gif"], "none of the suffixes .svg, .png"),
    ],
)
@pytest.mark.parametrize("place", ["service", "local"])
def test_what_is_wrong_is_one_line(
    url: str, source: Path, tmp_path: Path, words: list[str], error: str, place: str
) -> None:
    asked = [word.format(source=source, folder=tmp_path) for word in words]
    assert error in error_of(tmp_path, *asked, *target_options(place, url))


@pytest.mark.parametrize("place", ["service", "local"])
def test_parameters_in_a_file_must_be_an_object(url: str, tmp_path: Path, place: str) -> None:
    file = tmp_path / "in.json"
    file.write_text(
        '{"inputs": {"query": [[1.0]], "key": [[1.0]], "value": [[1.0]]}, "parameters": 3}'
    )
    line = error_of(tmp_path, "compare", "linear", file, *target_options(place, url))
    assert "parameters came as 3; it must be an object" in line


@pytest.mark.parametrize("words", [("compare", "linear", "{source}"), ("sweep", "linear")])
def test_no_service_there(source: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    asked = [word.format(source=source) for word in words]
    assert "no answer from" in error_of(tmp_path, *asked, "--url", "http://127.0.0.1:9")
    assert "no answer from" in error_of(tmp_path, *asked, "--url", "nonsense")


@pytest.mark.parametrize("place", ["service", "local"])
def test_sweep_prints_a_table_and_writes_both_files(url: str, tmp_path: Path, place: str) -> None:
    lines, plot = tmp_path / "out.csv", tmp_path / "out.svg"
    said = stdout_of(
        "sweep", "softmax", "taylor", "--lengths", "8,16", "--repeats", "2", "--heads", "2",
        "--width", "4", "--batch", "2", "--dtype", "float64", "--seed", "1", "-p", "causal=true",
        "--csv", lines, "--plot", plot, *target_options(place, url),
    )  # fmt: skip
    assert columns(said) == ["length", "softmax", "taylor"]
    assert said.endswith(f"written to {lines}\nwritten to {plot}\n")
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


def test_a_cell_that_no_memory_holds_is_said_and_the_others_are_measured() -> None:
    """4 PiB of each input."""
    huge = ("--batch", "4096", "--heads", "4096", "--width", "64", "--lengths", "1048576")
    said = stdout_of("sweep", "softmax", "mean", *huge, "--local")
    for name in ("softmax", "mean"):
        assert f"{name} at 1,048,576: there is no memory for its inputs" in said


@pytest.mark.parametrize(
    ("suffix", "magic"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")]
)
def test_the_crossover_is_in_table_and_plot(tmp_path: Path, suffix: str, magic: bytes) -> None:
    plot = tmp_path / f"out.{suffix}"
    with scripted_server(WHOLE_STREAM) as received:
        said = stdout_of(*SWEEP, "--plot", plot, "--url", received.url)
    assert "From a length of about 300 on, linear is faster than softmax." in said
    assert "softmax at 512: too many" in said
    assert plot.read_bytes().startswith(magic)
    if suffix == "svg":
        assert "<!--  linear under softmax from 300 -->" in plot.read_text()


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path: Path) -> None:
    """Before anything is measured."""
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
    assert "a plot needs `pip install 'qkv[plot]'`" in one_error(done.stderr)


def test_what_came_before_a_failure_is_kept(tmp_path: Path) -> None:
    lines = tmp_path / "out.csv"
    failure = encode_event("error", {"problem": {"status": 503, "type": "urn:qkv:problem:not-now",
                                        "detail": "the service is stopping"}})  # fmt: skip
    with scripted_server(event_reply(CELL_EVENTS[0], CELL_EVENTS[1], failure)) as received:
        done = invoke(*SWEEP, "--csv", lines, "--url", received.url)
    assert done.exit_code == 1
    assert one_error(done.stderr) == "Error: the service is stopping"
    assert columns(done.stdout) == ["length", "softmax", "linear"]
    assert len(lines.read_text().splitlines()) == 3


def test_a_refusal_writes_nothing(tmp_path: Path) -> None:
    with scripted_server(problem_reply(422, "invalid-content")) as received:
        line = error_of(tmp_path, *SWEEP, "--csv", tmp_path / "out.csv", "--url", received.url)
    assert line == "Error: because"


def test_ctrl_c_keeps_what_was_measured_and_ends_it(tmp_path: Path) -> None:
    lines = tmp_path / "out.csv"
    mine, its = pty.openpty()
    with scripted_server(
        event_reply(*CELL_EVENTS[:2], progress(2, "softmax", 512), end="held")
    ) as received:
        words = [sys.executable, "-m", "qkv", *SWEEP, "--csv", str(lines), "--url", received.url]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=its, text=True)
        os.close(its)
        seen = b""
        while "2/3 softmax at 512" not in seen.decode(errors="ignore"):
            seen += os.read(mine, 1024)
        wait_until(lambda: len(received.paths) == 1)
        wait_until_asleep(process.pid)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=TIMEOUT_S)
        assert received.disconnected.wait(TIMEOUT_S)
    with contextlib.suppress(OSError):  # how the end of a terminal is told
        while more := os.read(mine, 1024):
            seen += more
    os.close(mine)
    assert process.returncode == 130
    assert columns(out) == ["length", "softmax", "linear"]
    assert len(lines.read_text().splitlines()) == 3
    *_, bar, blank, end = seen.decode().split("\r", seen.decode().count("\r") - 1)
    assert "2/3 softmax at 512" in bar
    assert not blank.strip()
    assert end.strip() == "Error: interrupted"


def test_ctrl_c_ends_one_that_runs_here(tmp_path: Path) -> None:
    """Before its next run."""
    lines = tmp_path / "out.csv"
    words = ["sweep", "mean", "--lengths", "8,16384", "--repeats", "100", "--local"]
    mine, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "qkv", *words, "--csv", str(lines)],
        stdout=subprocess.PIPE,
        stderr=its,
        text=True,
    )
    os.close(its)
    seen = b""
    while "1/2 mean at 16,384" not in seen.decode(errors="ignore"):
        seen += os.read(mine, 1024)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    os.close(mine)
    assert process.returncode == 130
    assert columns(out) == ["length", "mean"]
    assert len(lines.read_text().splitlines()) == 2
