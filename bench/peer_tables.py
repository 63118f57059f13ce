"""Tables of docs/performance.md that compare qkv with other servers, from results of the harness.

python bench/peer_tables.py results.jsonl [--floor floor.json] [--json FILE] [--write]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tables import DOCS, Cell, Results, Table, add_options, finish, format_cell

COMMAND: Final = "bench/peer_tables.py"
COMPARED_ENCODINGS: Final = {"qkv": "oip-bin", "triton": "oip-bin", "bare-uvicorn": "raw-4w"}
"""Encodings of the peers that are compared cell by cell; qkv is first."""
MAX_FOREIGN_CPUS: Final = 0.25  # used by other processes or the host; threshold of the harness

Measured = Mapping[str, Any]
"""A cell of the harness."""


def build_results(lines: str, floor: Mapping[str, Any]) -> Results:
    """Returns both tables, from the latest cell of each peer, encoding, shape and clients.

    Args:
        lines: results of the harness, one JSON object a line.
        floor: the rates of the same work without HTTP by shape; may be empty.
    """
    cells: dict[tuple[Any, ...], Measured] = {}
    for cell in map(json.loads, lines.splitlines()):
        if "skip" not in cell:
            cells[cell["peer"], cell["enc"], cell["wl"], cell["conc"]] = cell
    times = sorted(cell["t"] for cell in cells.values())
    days = dict.fromkeys(datetime.fromtimestamp(t, UTC).date().isoformat() for t in times)
    header = {
        "Measured": " and ".join(days),
        "`!`:": f"other processes used more than {MAX_FOREIGN_CPUS} CPUs meanwhile",
        "`errors`:": "some requests failed",
    }
    loads = sorted({key[2:] for key in cells}, key=lambda k: ("SML".index(k[0]), k[1]))
    rates = [f"{format_cell(floor[s]['best_bytes'])} ({s})" for s in "SML" if s in floor]
    rows = [
        [peer, f"`{encoding}`", *(_rate(cells.get((peer, encoding, *x))) for x in loads)]
        for peer, encoding in dict.fromkeys(key[:2] for key in cells)
    ]
    columns = ["requests/s", "", *(f"{shape}, {clients}" for shape, clients in loads)]
    without_http = "The same work in processes without HTTP, from bytes to bytes: at best "
    note = f"{without_http}{', '.join(rates)} per second." if rates else ""
    every = Table("every server", columns, rows, labels=2, note=note)
    return Results(COMMAND, header, [_compare(cells, loads), every])


def _compare(cells: Mapping[tuple[Any, ...], Measured], loads: Sequence[Any]) -> Table:
    """Returns the rates and latencies of the compared peers side by side."""
    first, *others = COMPARED_ENCODINGS.items()
    columns = ["", "clients", f"{first[0]}, requests/s"]
    for name, _ in others:
        columns += [f"{name}, requests/s", f"{first[0]} / {name}"]
    columns += [f"{name} p50 / p99, ms" for name in COMPARED_ENCODINGS]
    rows: list[list[Cell]] = []
    for shape, clients in loads:
        of_first, *of_others = (cells.get((*p, shape, clients)) for p in (first, *others))
        row: list[Cell] = [shape, clients, _rate(of_first)]
        for cell in of_others:
            is_right = of_first and cell and not (of_first["errors"] or cell["errors"])
            row += [_rate(cell), of_first["rps"] / cell["rps"] if is_right else None]  # type: ignore[index]
        row += [[cell["p50"], cell["p99"]] if cell else None for cell in (of_first, *of_others)]
        rows.append(row)
    return Table("side by side", columns, rows)


def _rate(cell: Measured | None) -> Cell:
    if cell is None:
        return None
    if cell["errors"] or cell["short"]:
        return "errors"
    is_disturbed = max(cell["foreign"], cell.get("steal", 0.0)) >= MAX_FOREIGN_CPUS
    return f"{format_cell(cell['rps'])}!" if is_disturbed else cell["rps"]


def main() -> None:
    """Prints the tables and writes them on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="results of the harness, one JSON object a line")
    parser.add_argument("--floor", type=Path, help="floor.json of the harness")
    add_options(parser)
    options = parser.parse_args()
    floor = json.loads(options.floor.read_text()) if options.floor else {}
    finish(build_results(options.results.read_text(), floor), DOCS / "performance.md", options)


if __name__ == "__main__":
    main()
