"""Tests of bench/run.py: checks of responses, and complete tables."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import bodies
import explicit_attention
import fair_shares
import load
import numpy as np
import pytest
import run
import tables
import torch
from bodies import FORMATS, build_request, tensors_of
from load import BenchRequest
from service import Service
from workloads import WORKLOADS, Workload

from qkv.settings import Settings
from qkv.tensors import RawTensor
from support.forked_services import forked_service
from support.service import Server

TINY: Final = (1, 2, 3, 4)


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


def test_rejection_is_a_wrong_response(server: Server) -> None:
    invalid = BenchRequest("/v1/attention/softmax", {"Content-Type": "application/json"}, b"{}")
    with pytest.raises(RuntimeError, match=r"has failed: wrong response: b'HTTP/1\.1 422"):
        load.load(server.address, invalid, 0.05)


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


@pytest.mark.rare("bench", "tests/support/forked_services.py")
@pytest.mark.slow
@pytest.mark.process
def test_short_run_has_every_table_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, file = tmp_path / "requests.md", tmp_path / "results.json"
    page.write_text(run.PAGE.read_text())
    monkeypatch.setattr(run, "PAGE", page)
    # 600 shapes take six seconds; `test_workload_has_correct_responses` sends them
    monkeypatch.setattr(run, "WORKLOADS", [w for w in WORKLOADS if not w.name.startswith("600")])
    settings = fair_shares.SERVICES["one worker"]  # the other services differ in settings alone
    monkeypatch.setattr(fair_shares, "SERVICES", {"one worker": settings})
    for module in (run, fair_shares):
        monkeypatch.setattr(module, "running_service", forked_service)
    monkeypatch.setattr(explicit_attention, "usable_cpus", lambda: 1)  # one process, not four
    run.main(["--quick", "--seconds", "0.05", "--json", str(file), "--write"])
    results = tables.read_results(file)
    texts, printed, written = results.texts, capsys.readouterr().out, page.read_text()
    assert len(texts) == len(re.findall("made by `make bench`", written))
    for title, text in texts.items():
        assert text in printed
        assert f"{results.mark(title)}{text}\n{tables.END}" in written
    for name in ("qkv", "torch", "Python", "machine", "variant", "shapes", "warm-up"):
        assert f"{name.replace('-', ' ')} " in texts["about"].replace("-", " ")
    for table in results.tables:
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert not [cell for row in table.rows for cell in row if isinstance(cell, bool)]
