"""Tests of tests/soak.py: a short run, and the errors that it must find."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import pytest
from service import running_service

import soak
from soak import (
    SoakClient,
    SoakResults,
    compute_medians,
    count_internal_errors,
    fit_trend,
    format_report,
)
from support.service import Server
from support.soak_requests import LENGTHS, SoakRequest, generate_soak_requests

DURATION_S = 20.0


@pytest.fixture(scope="module")
def soak_requests() -> list[SoakRequest]:
    return list(generate_soak_requests([n for n in LENGTHS if n < 100]))


@pytest.mark.slow
def test_short_soak_passes(soak_requests: list[SoakRequest]) -> None:
    limits = {
        "QKV_MAX_BODY_BYTES": str(soak.MAX_BODY_BYTES),
        "QKV_MAX_RESPONSE_BYTES": str(soak.MAX_RESPONSE_BYTES),
    }
    with running_service(QKV_WORKERS="2", **limits) as service:
        results = soak.run_soak(service, soak_requests, DURATION_S)
        text, is_passed = format_report(results, DURATION_S, service.workers)
    assert is_passed, text
    expected = ("valid 200", "malformed 200", "malformed 400", "cancelled by client")
    assert set(results.counts) >= {*expected, "too large 413"}
    assert not [name for name in results.counts if name.endswith(" 500")]
    assert len(results.memory) > DURATION_S / 2
    assert "p99" in text
    assert "not checked, the test was too short" in text


def run_client(server: Server, request: SoakRequest) -> SoakResults:
    """Returns the results of one client that sends one request at least once."""
    client = SoakClient(server.address, [request], 0, time.monotonic() + 0.2)
    return client.run()


@pytest.mark.slow
def test_soak_finds_wrong_responses(server: Server, soak_requests: list[SoakRequest]) -> None:
    """Errors beyond rounding, bytes that differ from earlier ones, and unexpected outputs."""
    for request in soak_requests[:4]:  # one of each format
        wrong = {name: x + 1e-1 for name, x in request.expected.items()}
        empty = dict.fromkeys(request.expected, b"")
        for changed, message in [
            (dataclasses.replace(request, expected=wrong), "has too large an error"),
            (dataclasses.replace(request, first_bytes=empty), "differs from the first response"),
            (dataclasses.replace(request, expected={"output": wrong["output"]}), "outputs are"),
        ]:
            results = run_client(server, changed)
            assert any(message in failure for failure in results.failures), results.failures[:3]
            assert not format_report(results, 1.0, 1)[1]


def test_soak_finds_rejected_requests(server: Server, soak_requests: list[SoakRequest]) -> None:
    misspelt = dataclasses.replace(soak_requests[0], path="/v1/attention/sotfmax")
    results = run_client(server, misspelt)
    assert results.counts["valid 404"]
    text, is_passed = format_report(results, 1.0, 1)
    assert not is_passed
    assert "sotfmax" in text


def test_soak_finds_internal_errors_in_metrics(
    serve: Callable[..., Server], soak_requests: list[SoakRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    server = serve()
    assert count_internal_errors(server.address) == 0
    with monkeypatch.context() as patch:
        patch.setattr(server.engine.batch_runner, "launch", fail)
        results = run_client(server, soak_requests[0])
    assert 0 < results.counts["valid 500"] <= count_internal_errors(server.address)


@pytest.mark.parametrize(("growth", "is_flat"), [(0.0, True), (0.02, True), (0.05, False)])
def test_growing_memory_is_not_flat(growth: float, is_flat: bool) -> None:
    """The warm-up does not count, and neither do short peaks."""
    generator = np.random.default_rng(0)
    results = SoakResults(latencies_s={"safetensors": [0.001]})
    for i in range(1200):
        warm_up, peak = min(1.0, 0.5 + i / 400), generator.exponential(0.02)
        resident = 1 + growth * (i - 400) / 800
        results.memory.append((float(i), int((warm_up * resident + peak) * 2**30)))
    assert fit_trend(results.memory).rise == pytest.approx(growth, abs=0.005)
    text, is_passed = format_report(results, 1200.0, 1)
    assert is_passed is is_flat
    assert ("NOT FLAT" not in text) is is_flat
    _, middle, last = compute_medians(results.memory)
    assert last / middle - 1 == pytest.approx(growth / 2, abs=0.005)
