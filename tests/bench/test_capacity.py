"""Tests of bench/capacity.py: costs of a running service, the arithmetic, and its tables."""

from __future__ import annotations

from pathlib import Path

import capacity
import pytest
from capacity_model import FIRST_FORM, UNITS, Cost, Prediction, predict_rate, rate_of
from capacity_tables import build_tables
from tables import END, Results, write_page

from support.forked_services import forked_service

SMALL = Cost("S", FIRST_FORM, "float32", 50_000, 10_000, 10**6, [90e-6, 110e-6, 100e-6], [5e-5])
LARGE = Cost("L", FIRST_FORM, "float32", 6_000_000, 2_000_000, 2 * 10**9, [8.04e-3], [3e-2])
NARROW = LARGE._replace(form="q, k, v in bfloat16", dtype="bfloat16", bytes_in=3_000_000)
COSTS = [SMALL, LARGE, NARROW]
PREDICTIONS = [Prediction("S", 2, 8000.0, [7000.0, 8000.0, 9000.0])]


def test_million_requests_need_units_in_proportion_to_their_costs() -> None:
    counts = {unit.name: unit.count_for(LARGE, 1e6) for unit in UNITS}
    assert counts["HTTP processes"] == 8040
    assert counts["network cards"] == pytest.approx(6e12 / (12.5e9 * 0.9415), rel=0.01)
    assert counts["GPUs"] == pytest.approx(1e6 * (6e6 / 63e9 + 1e-4 / 64), rel=0.02)


def test_gpu_takes_the_longest_of_operations_memory_and_pcie() -> None:
    gpu = next(unit for unit in UNITS if unit.name == "GPUs")
    assert gpu.seconds(LARGE._replace(flops=67 * 10**9)) == pytest.approx(1e-3 + 1e-4 / 64)
    assert gpu.seconds(NARROW._replace(flops=989 * 10**9)) == pytest.approx(1e-3 + 1e-4 / 64)
    many_bytes = LARGE._replace(bytes_in=2**29, bytes_out=2**29)  # a batch of one request
    assert gpu.seconds(many_bytes) == pytest.approx(2**29 / 63.015e9 + 1e-4, rel=1e-3)


def test_part_with_the_least_rate_limits_a_host() -> None:
    rate, parts = rate_of(LARGE)
    assert rate == pytest.approx(4 / (6e6 / (12.5e9 * 0.9415)), rel=0.01)  # network cards
    assert parts == pytest.approx([rate * 8.04e-3 / 64, 1, rate * 9.68e-5 / 8], rel=0.01)


def test_workers_are_limited_by_their_cpu_and_by_all_cpus() -> None:
    assert predict_rate(1, 4, worker_cpu_s=1e-3, client_cpu_s=1e-3) == pytest.approx(1000)
    assert predict_rate(4, 4, worker_cpu_s=1e-3, client_cpu_s=1e-3) == pytest.approx(2000)


def test_tables_have_their_places_in_the_page(tmp_path: Path) -> None:
    results = Results("make capacity", {}, build_tables(COSTS, PREDICTIONS))
    page = tmp_path / "capacity.md"
    page.write_text(capacity.PAGE.read_text())
    write_page(page, results)
    for title, text in results.texts.items():
        assert f"{results.mark(title)}{text}\n{END}" in page.read_text()
    _, one, million, predictions = results.texts.values()
    assert "| S | q, k, v in float32 | 48.8 | 9.77 | 1.00 | 100 (90.0–110) | 50.0" in one
    assert "| L | q, k, v in float32 | 510 | 97 | 7,846 | network cards |" in million
    assert "| S | 2 | 8,000 | 8,000 (7,000–9,000) | 1.00 (0.875–1.12) |" in predictions


@pytest.mark.rare("bench", "tests/support/forked_services.py")
@pytest.mark.slow
@pytest.mark.process
def test_costs_of_a_service_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "running_service", forked_service)
    plan = capacity.QUICK._replace(seconds=0.5)
    costs = list(capacity.measure_costs(plan))
    assert [cost.form for cost in costs] == list(capacity.FORMS)
    plain, narrow, layer, _ = costs
    assert 48 * 1024 < plain.bytes_in < 49 * 1024
    assert narrow.bytes_in < plain.bytes_in < layer.bytes_in
    assert plain.flops == 4 * 64**3
    assert layer.flops == plain.flops + 6 * 64**3
    for cost in costs:
        assert min(*cost.http_cpu_s, *cost.compute_cpu_s) > 0
    (prediction,) = capacity.measure_predictions(plan)
    assert min(prediction.predicted, *prediction.measured) > 0
