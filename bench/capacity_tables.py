"""Tables of bench/results/capacity.md from the costs that bench/capacity.py measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from capacity_model import UNITS, Cost, Prediction, rate_of
from tables import Cell, Table, spread

_RATE: Final = 1_000_000


def build_tables(costs: Sequence[Cost], predictions: Sequence[Prediction]) -> list[Table]:
    """Returns the tables in the order of the page."""
    _, *shared = UNITS
    return [
        _of_costs(
            "one request",
            ["KiB in", "KiB out", "Mflop", "HTTP process, µs", "compute, µs"],
            costs,
            lambda cost: [
                cost.bytes_in / 1024, cost.bytes_out / 1024, cost.flops / 1e6,
                spread([each * 1e6 for each in cost.http_cpu_s]),
                spread([each * 1e6 for each in cost.compute_cpu_s]),
            ],
        ),
        _of_costs(
            "a million",
            [f"{unit.name} ({unit.source})" for unit in shared]
            + ["a host: requests/s", "saturated first"],
            costs,
            lambda cost: [*(unit.count_for(cost, _RATE) for unit in shared), *_saturation(cost)],
        ),
        Table(
            "predictions",
            ["", "workers", "predicted, requests/s", "measured", "measured / predicted"],
            [
                [each.shape, each.workers, each.predicted, spread(each.measured),
                 spread([rate / each.predicted for rate in each.measured])]
                for each in predictions
            ],
        ),
    ]  # fmt: skip


def _of_costs(
    title: str,
    columns: Sequence[str],
    costs: Sequence[Cost],
    cells: Callable[[Cost], list[Cell]],
) -> Table:
    """Returns a table with a row for each kind of request."""
    rows = [[cost.shape, cost.form, *cells(cost)] for cost in costs]
    return Table(title, ["", "request", *columns], rows, labels=2)


def _saturation(cost: Cost) -> list[Cell]:
    """Returns the rate of a host, and what limits it."""
    rate, parts = rate_of(cost)
    return [rate, UNITS[parts.index(1)].name]
