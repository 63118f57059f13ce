"""Tests of bench/loaded_layer_cost.py: it checks the bits, and measures every row."""

from __future__ import annotations

import loaded_layer_cost
import pytest

from support.forked_services import forked_service


@pytest.mark.slow
def test_every_row_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_layer_cost, "BURSTS", 2)
    monkeypatch.setattr(loaded_layer_cost, "running_service", forked_service)
    table = loaded_layer_cost.measure(0.2)
    assert [row[0] for row in table.rows] == [
        "queries, keys, values", "x and a loaded layer", "x and the layer's tensors",
        "the four projections alone",
    ]  # fmt: skip
    for _, latency_ms, cpu_ms, ratio in table.rows:
        assert isinstance(latency_ms, list)
        assert min(latency_ms) > 0
        assert isinstance(cpu_ms, float)
        assert isinstance(ratio, float)
        assert min(cpu_ms, ratio) > 0
    assert "the target is 1.15" in table.note
