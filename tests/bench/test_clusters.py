"""Tests of bench/clusters.py: complete tables, and their places in docs/ray.md."""

from __future__ import annotations

from pathlib import Path

import clusters
from clusters import RateResult, RouterResult
from tables import END, Results, write_page

RATES = [
    RateResult(clusters.SERVE, "S", [3000.0, 4000.0, 3500.0]),
    RateResult("Ray, 1 replica", "S", [200.0, 100.0, 150.0]),
]
ROUTERS = [
    RouterResult(by_flops, [1.0] * 98 + [99.0 if by_flops else 990.0] * 2, 3)
    for by_flops in (False, True) * 2
]


RESULTS = Results("make clusters", {}, clusters.build_tables(RATES, ROUTERS))


def test_tables_have_medians_and_ranges() -> None:
    _, rates, routers = RESULTS.texts.values()
    assert "| `qkv serve`, 2 workers | 3,500 (3,000–4,000) |" in rates
    assert "| Ray, 1 replica | 150 (100–200) |" in rates
    assert "| numbers of requests (Ray) | 1.00 (1.00–1.00) | 990 (990–990) | 200 / 6 |" in routers
    assert "| ratio |  | 0.100 (0.100–0.100) |  |" in routers


def test_page_has_a_place_for_each_table(tmp_path: Path) -> None:
    page = tmp_path / "ray.md"
    page.write_text(clusters.PAGE.read_text())
    write_page(page, RESULTS)
    for title, text in RESULTS.texts.items():
        assert f"{RESULTS.mark(title)}{text}\n{END}" in page.read_text()
