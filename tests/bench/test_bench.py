"""Tests of bench/run.py and bench/peers_page.py: checks of responses, and complete tables."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
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
from bodies import FORMATS, build_request, tensors_of
from load import BenchRequest, LoadResult, ResponseTiming
from run_page import (
    BenchResults,
    BodySizeResult,
    ClientsResult,
    ConnectionsResult,
    ExplicitResult,
    OneClientResult,
    SmallBesideLargeResult,
    WeightsResult,
    WorkloadResult,
)
from service import ResidentMemory, Service
from workloads import WORKLOADS, Workload

from qkv.settings import Settings
from qkv.tensors import RawTensor
from support.service import Server

TINY: Final = (1, 2, 3, 4)
PAGE: Final = run_page.PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("wire_format", FORMATS)
def test_load_checks_every_response(server: Server, wire_format: str, weights: bool) -> None:
    request = build_request(server.address, wire_format, tensors_of(TINY), weights)
    result = load.load(server.address, request, 0.05, connections=3)
    assert len(result.timings) >= load.MIN_RESPONSES
    assert result.rate > 0
    for timing in result.timings:
        assert 0 < timing.compute_ms <= timing.total_ms < timing.latency_ms
        assert timing.added_ms == timing.latency_ms - timing.compute_ms
    wrong = dataclasses.replace(request, expected_bytes=request.expected_bytes[:-1] + b"?")
    with pytest.raises(RuntimeError, match="has failed"):
        load.load(server.address, wrong, 0.05)


def test_requests_are_sent_in_turn_with_new_ids(server: Server) -> None:
    shapes = [(1, 1, length, 4) for length in (2, 3, 4)]
    requests = [
        build_request(server.address, "V2 binary", tensors_of(shape), has_new_ids=True)
        for shape in shapes
    ]
    client = load.LoadClient(load.LoadInstructions("127.0.0.1", 0, requests, 1, 1, 1, 0.0))
    sent = [client.next_request() for _ in range(6)]
    assert [request for request, _ in sent] == [*requests[1:], requests[0]] * 2
    assert len({b"".join(chunks) for _, chunks in sent}) == 6
    for request, chunks in sent:
        assert len(b"".join(chunks).partition(b"\r\n\r\n")[2]) == len(request.body)
    result = load.load(server.address, requests, 0.05, connections=2)
    assert len(result.timings) >= load.MIN_RESPONSES
    mixed_up = [
        dataclasses.replace(request, expected_bytes=other.expected_bytes)
        for request, other in zip(requests, [*requests[1:], requests[0]], strict=True)
    ]
    with pytest.raises(RuntimeError, match="has failed"):
        load.load(server.address, mixed_up, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_workload_has_correct_responses(server: Server, workload: Workload) -> None:
    requests = workload.build(server.address)
    assert load.load(server.address, requests, 0.05, connections=4).timings


def test_rejection_is_a_wrong_response(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    invalid = BenchRequest("/v1/attention/softmax", {"Content-Type": "application/json"}, b"{}")
    with pytest.raises(RuntimeError, match="has failed"):
        load.load(server.address, invalid, 0.05)
    assert "wrong response: b'HTTP/1.1 422" in capfd.readouterr().err


def test_idle_connections_are_open_and_used_in_the_warm_up(server: Server) -> None:
    request = build_request(server.address, "V2 binary", tensors_of(TINY))
    result = load.load(server.address, request, 0.0, connections=20, in_flight=1)
    assert len(result.timings) == load.MIN_RESPONSES  # the warm-up used the others


def test_response_with_an_error_is_rejected() -> None:
    tensors = tensors_of(TINY)
    output = torch.nn.functional.scaled_dot_product_attention(*tensors.values()).numpy()  # type: ignore[arg-type]
    correct = {"output": RawTensor.from_numpy(output)}
    bodies.check_outputs(tensors, correct)
    wrong = {"output": RawTensor.from_numpy(output + np.float32(1e-4))}
    with pytest.raises(AssertionError, match="output is wrong: got error"):
        bodies.check_outputs(tensors, wrong)


@pytest.mark.parametrize("size", run.BODY_SIZES[:5])
def test_body_has_the_size_of_its_row(server: Server, size: int) -> None:
    tensors = tensors_of((1, 1, 1, run.QUERY_WIDTH), run.keys_in(size))
    request = build_request(server.address, "V2 binary", tensors, body_bytes=size)
    assert len(request.body) == size


def test_plan_covers_all_sizes_and_connections() -> None:
    plan = run.Plan()
    assert (plan.body_sizes[0], plan.body_sizes[-1]) == (1 << 10, Settings().max_body_bytes)
    assert (plan.connections[0], plan.connections[-1]) == (1, 512)
    assert plan.clients == (1, 16, 64)


def test_memory_is_sampled_before_during_and_after() -> None:
    # in a process of its own: threads of other tests allocate and release memory in this one
    size, program = 1 << 27, "held = b''\nwhile True: held = b'x' * int(input()); print(flush=True)"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], bufsize=1, **pipes) as holder:

        def hold(count: int) -> None:
            assert holder.stdin
            assert holder.stdout
            holder.stdin.write(f"{count}\n")
            holder.stdout.readline()

        hold(0)
        process = Service(("", 0), holder.pid, 1)
        with process.sample_memory() as memory:
            hold(size)
            memory.samples.append(process.resident_bytes)  # independent of the sampling times
            hold(0)
        holder.kill()
    assert memory.peak - memory.before > 0.9 * size
    assert memory.peak - memory.after > 0.9 * size


def build_load(*latencies_ms: float) -> LoadResult:
    return LoadResult([ResponseTiming(ms, 0.1, 0.2, 0.5, 1.0) for ms in latencies_ms], 1234.5)


def build_results(slowest_ms: float, rate: float) -> BenchResults:
    """Returns results of one shape: the slowest of three times, the rate of explicit attention."""
    memory = ResidentMemory(100 << 20, 102 << 20, [300 << 20])
    load = build_load(2.0, 2.0, slowest_ms)
    return BenchResults(
        [
            OneClientResult("S", "bare torch, 1 thread", [1.0, 1.0]),
            OneClientResult("S", "bare torch, 4 threads", [9.0, 9.0]),
            OneClientResult("S", "V2 binary", [3.0, 3.0]),
        ],
        [ClientsResult("S", "V2 binary", clients, load, clients << 20) for clients in (1, 16)]
        + [ClientsResult("L", "JSON, lists", 1, load, 900 << 20)],
        [
            WorkloadResult("the same bytes", 16, load),
            WorkloadResult("a new id each", 16, load._replace(rate=617.0)),
        ],
        [SmallBesideLargeResult(8, load, load._replace(rate=617.0), load, load)],
        [
            ExplicitResult(1, 1, rate / 4),
            ExplicitResult(1, 4, rate),
            ExplicitResult(4, 1, rate / 2),
            WeightsResult("V2 binary", 16, load),
        ],
        [ConnectionsResult(512, build_load(2.0, 2.0, 2.0), load, memory)],
        [BodySizeResult(size, load, memory) for size in (1 << 10, 1 << 28, 1 << 10)],
    )


def test_tables_have_all_figures() -> None:
    tables = run_page.build_tables("about the machine", build_results(4.0, 2000.0))
    text = "\n".join(tables.values())
    assert "about the machine" in text
    assert "| bare torch, 1 thread | 1.00 (1.00–1.00) | 1.00 |" in text
    assert "| bare torch, 4 threads | 9.00 (9.00–9.00) | 9.00 |" in text
    assert "| V2 binary | 3.00 (3.00–3.00) | 3.00 |" in text
    assert "| S | V2 binary | 1,234 | 2.00 / 3.96 | 1,234 | 2.00 / 3.96 | 16 |" in text
    assert "| L | JSON, lists | 1,234 | 2.00 / 3.96 |  |  | 900 |" in text
    assert "All rows meet it." in text
    assert "| a new id each | 617 | 0.50 | 2.00 / 3.96 |" in text
    assert "| 8 | 1,234 | 617 | 0.50 | 2.00 / 3.96 | 1,234 | 1,234 | 1.00 |" in text
    assert "| explicit, 4 × 1 thread |  | 1,000 | 0.50 |" in text
    assert "| V2 binary | 16 | 1,234 | 0.62 | 2.00 | 0.500 | 0.300 | 0.200 | 1.00 |" in text
    summary = "reaches 0.62 of explicit attention's rate on all CPUs, and 2.47 of the rate of one"
    assert summary in text
    assert "| 512 | 1.50 (1.50–1.50) | 1.50 | 1,234 | 2.00 / 3.96 | 100 | 300 | 102 |" in text
    assert "| 256 MiB | 3 | 2.00 | 0.500 | 1.50 (1.50–3.50) | 0.00586 | 100 | 300 | 102 |" in text
    assert text.count("| 1 KiB | 3 |") == text.count("| 1 KiB, again | 3 |") == 1


def test_tables_name_missed_targets() -> None:
    text = "\n".join(run_page.build_tables("", build_results(9.0, 3000.0)).values())
    assert "All rows but S in V2 binary; L in JSON, lists meet it." in text
    assert "with one thread. The target is 0.6." in text


CELL: Final = {
    "rps": 200.0, "p50": 1.0, "p99": 2.0, "errors": 0, "short": False, "foreign": 0.0, "t": 0.0,
}  # fmt: skip


def write_lines(*cells: dict[str, Any]) -> str:
    return "\n".join(json.dumps(CELL | {"wl": "S", "conc": 16} | cell) for cell in cells)


def test_latest_cell_of_each_server_counts() -> None:
    results = write_lines(
        {"peer": "qkv", "enc": "oip-bin", "rps": 1.0},
        {"peer": "qkv", "enc": "oip-bin"},
        {"peer": "triton", "enc": "oip-bin", "rps": 100.0},
        {"peer": "triton", "enc": "json", "foreign": 0.5},
        {"peer": "ray", "enc": "raw", "errors": 1},
        {"peer": "qkv", "enc": "json", "wl": "L", "skip": "too much text"},
    )
    text = peers_page.build_tables(peers_page.parse_results(results), {"S": {"best_bytes": 5000.0}})
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
    texts = run_page.build_tables("about the machine", build_results(4.0, 2000.0))
    texts[peers_page.MARK] = "peers"
    run_page.write_page(texts)
    text = page.read_text()
    assert all(f"<!-- {name} -->\n{x}\n<!-- end -->\n" in text for name, x in texts.items())
    hand_written = [line for line in PAGE.splitlines() if line.startswith(("#", "- ", "<!--"))]
    lines = [line for line in text.splitlines() if line.startswith(("#", "- ", "<!--"))]
    assert lines == hand_written
    run_page.write_page(texts)
    assert page.read_text() == text
