"""Tables of docs/performance.md that compare qkv with other servers, from results of the harness.

python bench/peers_page.py results.jsonl [--floor floor.json] [--write]
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from run_page import format_number, format_table, write_page

MARK: Final = "made by `bench/peers_page.py`"
COMPARED_ENCODINGS: Final = {"qkv": "oip-bin", "triton": "oip-bin", "bare-uvicorn": "raw-4w"}
"""Encodings of the peers that are compared cell by cell; qkv is first."""
MAX_FOREIGN_CPUS: Final = 0.25  # used by other processes or the host; threshold of the harness

CellKey = tuple[str, str, str, int]
Cell = dict[str, Any]


def parse_results(results: str) -> dict[CellKey, Cell]:
    """Returns the latest measured cell of each peer, encoding, shape and number of clients."""
    cells: dict[CellKey, Cell] = {}
    for line in results.splitlines():
        cell = json.loads(line)
        if "skip" not in cell:
            cells[cell["peer"], cell["enc"], cell["wl"], cell["conc"]] = cell
    return cells


def build_tables(cells: dict[CellKey, Cell], floor: dict[str, Any] | None) -> str:
    """Returns both tables, and the rate of the same work without HTTP."""
    times = sorted(cell["t"] for cell in cells.values())
    days = dict.fromkeys(datetime.fromtimestamp(t, UTC).date().isoformat() for t in times)
    legend = (
        f"Measured {' and '.join(days)}. `!`: other processes used more than {MAX_FOREIGN_CPUS} "
        "CPUs meanwhile. `errors`: some requests failed."
    )
    loads = sorted({key[2:] for key in cells}, key=lambda k: ("SML".index(k[0]), k[1]))
    parts = [legend, _build_comparison(cells, loads), _build_all_rates(cells, loads)]
    if floor:
        rates = [
            f"{format_number(floor[shape]['best_bytes'])} ({shape})"
            for shape in "SML"
            if shape in floor
        ]
        parts.append(
            "The same work in processes without HTTP, from bytes to bytes: at best "
            f"{', '.join(rates)} per second."
        )
    return "\n\n".join(parts)


def _build_comparison(cells: dict[CellKey, Cell], loads: list[tuple[str, int]]) -> str:
    measured = {key[:2] for key in cells}
    first, *others = [peer for peer in COMPARED_ENCODINGS.items() if peer in measured]
    header = ["", "clients", f"{first[0]}, requests/s"]
    for name, _ in others:
        header += [f"{name}, requests/s", f"{first[0]} / {name}"]
    header += [f"{name} p50 / p99, ms" for name, _ in (first, *others)]
    rows = []
    for shape, clients in loads:
        first_cell = cells.get((*first, shape, clients))
        row = [shape, str(clients), _format_rate(first_cell)]
        for other in others:
            cell = cells.get((*other, shape, clients))
            ratio = ""
            if first_cell and cell and not (first_cell["errors"] or cell["errors"]):
                ratio = f"{first_cell['rps'] / cell['rps']:.2g}"
            row += [_format_rate(cell), ratio]
        for peer in (first, *others):
            cell = cells.get((*peer, shape, clients))
            row.append(_format_latencies(cell))
        rows.append(row)
    return format_table(header, rows)


def _build_all_rates(cells: dict[CellKey, Cell], loads: list[tuple[str, int]]) -> str:
    header = ["requests/s", "", *(f"{shape}, {clients}" for shape, clients in loads)]
    rows = [
        [peer, f"`{encoding}`", *(_format_rate(cells.get((peer, encoding, *x))) for x in loads)]
        for peer, encoding in dict.fromkeys(key[:2] for key in cells)
    ]
    return format_table(header, rows, labels=2)


def _format_latencies(cell: Cell | None) -> str:
    return f"{format_number(cell['p50'])} / {format_number(cell['p99'])}" if cell else ""


def _format_rate(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell["errors"] or cell["short"]:
        return "errors"
    foreign_cpus = max(cell["foreign"], cell.get("steal", 0.0))
    return f"{format_number(cell['rps'])}{'!' if foreign_cpus >= MAX_FOREIGN_CPUS else ''}"


def main() -> None:
    """Prints the tables and writes them on request."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="results of the harness, one JSON object a line")
    parser.add_argument("--floor", type=Path, help="floor.json of the harness")
    parser.add_argument("--write", action="store_true", help="write docs/performance.md")
    arguments = parser.parse_args()
    floor = json.loads(arguments.floor.read_text()) if arguments.floor else None
    text = build_tables(parse_results(arguments.results.read_text()), floor)
    print(text)
    if arguments.write:
        write_page({MARK: text})


if __name__ == "__main__":
    main()
