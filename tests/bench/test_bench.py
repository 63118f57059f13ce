"""Tests of bench/run.py and bench/peers_page.py: checks of responses, and complete tables."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Final

import bodies
import load
import numpy as np
import peers_page
import pytest
import run
import run_page
import torch
from bodies import FORMATS, asked, tensors_of
from load import Answer, Asked, Load
from run_page import Bare, Clients, Connections, Explicit, Figures, Size, Weights
from service import Memory, Service

from qkv.settings import Settings
from qkv.tensors import RawTensor
from support.service import Server

TINY: Final = (1, 2, 3, 4)
PAGE: Final = run_page.PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_load_checks_every_response(server: Server, form: str, weights: bool) -> None:
    request = asked(server.address, form, tensors_of(TINY), weights)
    came = load.load(server.address, request, 0.05, connections=3)
    assert len(came.answers) >= load.LEAST
    assert came.rate > 0
    for answer in came.answers:
        assert 0 < answer.compute <= answer.total < answer.ms
        assert answer.added == answer.ms - answer.compute
    wrong = dataclasses.replace(request, right=request.right[:-1] + b"?")
    with pytest.raises(RuntimeError, match="has failed"):
        load.load(server.address, wrong, 0.05)


def test_rejection_is_a_wrong_response(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    missing = Asked("/v1/attention/softmax", {"Content-Type": "application/json"}, b"{}")
    with pytest.raises(RuntimeError, match="has failed"):
        load.load(server.address, missing, 0.05)
    assert "wrong response: b'HTTP/1.1 422" in capfd.readouterr().err


def test_idle_connections_are_open_and_used_in_the_warm_up(server: Server) -> None:
    request = asked(server.address, "V2 binary", tensors_of(TINY))
    came = load.load(server.address, request, 0.0, connections=20, at_once=1)
    assert len(came.answers) == load.LEAST  # the warm-up used the others


def test_response_with_an_error_is_rejected() -> None:
    tensors = tensors_of(TINY)
    found = torch.nn.functional.scaled_dot_product_attention(*tensors.values()).numpy()  # type: ignore[arg-type]
    right = {"output": RawTensor.from_numpy(found)}
    bodies._check(tensors, right)
    off = {"output": RawTensor.from_numpy(found + np.float32(1e-4))}
    with pytest.raises(AssertionError, match="off by"):
        bodies._check(tensors, off)


@pytest.mark.parametrize("size", run.SIZES[:5])
def test_body_has_the_size_of_its_row(server: Server, size: int) -> None:
    tensors = tensors_of((1, 1, 1, run.WIDTH), run.keys_in(size))
    assert len(asked(server.address, "V2 binary", tensors, size=size).body) == size


def test_plan_covers_all_sizes_and_connections() -> None:
    plan = run.Plan()
    assert (plan.sizes[0], plan.sizes[-1]) == (1 << 10, Settings().max_body_bytes)
    assert (plan.connections[0], plan.connections[-1]) == (1, 512)
    assert plan.clients == (1, 16, 64)


def test_memory_is_sampled_before_during_and_after() -> None:
    mine, size = Service(("", 0), os.getpid(), 1), 1 << 27
    with mine.watched() as memory:
        held = np.ones(size, np.uint8)
        memory.seen.append(mine.resident)  # independent of the sampling times
        del held
    assert memory.most - memory.before > 0.9 * size
    assert memory.most - memory.after > 0.9 * size


def answers(*ms: float) -> Load:
    return Load([Answer(x, 0.1, 0.2, 0.5, 1.0) for x in ms], 1234.5)


def figures(slowest: float, rate: float) -> Figures:
    """Returns figures of one shape: the slowest of three times, the rate of explicit attention."""
    memory = Memory(100 << 20, 102 << 20, [300 << 20])
    came = answers(2.0, 2.0, slowest)
    return Figures(
        [
            Bare("S", "bare torch, 1 thread", [1.0, 1.0]),
            Bare("S", "bare torch, 4 threads", [9.0, 9.0]),
            Bare("S", "V2 binary", [3.0, 3.0]),
        ],
        [Clients("S", "V2 binary", callers, came, callers << 20) for callers in (1, 16)]
        + [Clients("L", "JSON, lists", 1, came, 900 << 20)],
        [
            Explicit(1, 1, rate / 4),
            Explicit(1, 4, rate),
            Explicit(4, 1, rate / 2),
            Weights("V2 binary", 16, came),
        ],
        [Connections(512, answers(2.0, 2.0, 2.0), came, memory)],
        [Size(size, came, memory) for size in (1 << 10, 1 << 28, 1 << 10)],
    )


def test_tables_have_all_figures() -> None:
    made = run_page.tables("about the machine", figures(4.0, 2000.0))
    text = "\n".join(made.values())
    assert "about the machine" in text
    assert "| bare torch, 1 thread | 1.00 (1.00–1.00) | 1.00 |" in text
    assert "| bare torch, 4 threads | 9.00 (9.00–9.00) | 9.00 |" in text
    assert "| V2 binary | 3.00 (3.00–3.00) | 3.00 |" in text
    assert "| S | V2 binary | 1,234 | 2.00 / 3.96 | 1,234 | 2.00 / 3.96 | 16 |" in text
    assert "| L | JSON, lists | 1,234 | 2.00 / 3.96 |  |  | 900 |" in text
    assert "All rows meet it." in text
    assert "| explicit, 4 × 1 thread |  | 1,000 | 0.50 |" in text
    assert "| V2 binary | 16 | 1,234 | 0.62 | 2.00 | 0.500 | 0.300 | 0.200 | 1.00 |" in text
    best = "reaches 0.62 of explicit attention's rate on all CPUs, and 2.47 of the rate of one"
    assert best in text
    assert "| 512 | 1.50 (1.50–1.50) | 1.50 | 1,234 | 2.00 / 3.96 | 100 | 300 | 102 |" in text
    assert "| 256 MiB | 3 | 2.00 | 0.500 | 1.50 (1.50–3.50) | 0.00586 | 100 | 300 | 102 |" in text
    assert text.count("| 1 KiB | 3 |") == text.count("| 1 KiB, again | 3 |") == 1


def test_tables_name_missed_targets() -> None:
    text = "\n".join(run_page.tables("", figures(9.0, 3000.0)).values())
    assert "All rows but S in V2 binary; L in JSON, lists meet it." in text
    assert "with one thread. The target is 0.6." in text


CELL: Final = {
    "rps": 200.0, "p50": 1.0, "p99": 2.0, "errors": 0, "short": False, "foreign": 0.0, "t": 0.0,
}  # fmt: skip


def lines(*cells: dict[str, Any]) -> str:
    return "\n".join(json.dumps(CELL | {"wl": "S", "conc": 16} | cell) for cell in cells)


def test_latest_cell_of_each_server_counts() -> None:
    results = lines(
        {"peer": "qkv", "enc": "oip-bin", "rps": 1.0},
        {"peer": "qkv", "enc": "oip-bin"},
        {"peer": "triton", "enc": "oip-bin", "rps": 100.0},
        {"peer": "triton", "enc": "json", "foreign": 0.5},
        {"peer": "ray", "enc": "raw", "errors": 1},
        {"peer": "qkv", "enc": "json", "wl": "L", "skip": "too much text"},
    )
    text = peers_page.tables(peers_page.read(results), {"S": {"best_bytes": 5000.0}})
    assert "Measured 1970-01-01." in text
    assert "| S | 16 | 200 | 100 | 2 | 1.00 / 2.00 | 1.00 / 2.00 |" in text
    assert "| triton | `json` | 200! |" in text
    assert "| ray | `raw` | errors |" in text
    assert "too much" not in text
    assert "at best 5,000 (S) per second." in text


def test_page_keeps_its_hand_written_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has every mark once."""
    page = tmp_path / "performance.md"
    page.write_text(PAGE)
    monkeypatch.setattr(run_page, "PAGE", page)
    made = run_page.tables("about the machine", figures(4.0, 2000.0)) | {peers_page.MARK: "peers"}
    run_page.write(made)
    once = page.read_text()
    assert all(f"<!-- {name} -->\n{text}\n<!-- end -->\n" in once for name, text in made.items())
    by_hand = [line for line in PAGE.splitlines() if line.startswith(("#", "- ", "<!--"))]
    assert [line for line in once.splitlines() if line.startswith(("#", "- ", "<!--"))] == by_hand
    run_page.write(made)
    assert page.read_text() == once
