"""Tables of docs/performance.md that compare qkv with other servers, from results of the harness.

python bench/peers_page.py results.jsonl [--floor floor.json] [--write]
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from run_page import digits, table, write

MARK: Final = "made by `bench/peers_page.py`"
BYTES: Final = {"qkv": "oip-bin", "triton": "oip-bin", "bare-uvicorn": "raw-4w"}
"""Encodings of the peers that are compared cell by cell; qkv is first."""
DISTURBED: Final = 0.25  # CPUs used by other processes or the host; threshold of the harness

Key = tuple[str, str, str, int]
Cell = dict[str, Any]


def read(results: str) -> dict[Key, Cell]:
    """Returns the latest measured cell of each peer, encoding, shape and number of clients."""
    cells: dict[Key, Cell] = {}
    for line in results.splitlines():
        cell = json.loads(line)
        if "skip" not in cell:
            cells[cell["peer"], cell["enc"], cell["wl"], cell["conc"]] = cell
    return cells


def tables(cells: dict[Key, Cell], floor: dict[str, Any] | None) -> str:
    """Returns both tables, and the rate of the same work without HTTP."""
    times = sorted(cell["t"] for cell in cells.values())
    days = dict.fromkeys(datetime.fromtimestamp(t, UTC).date().isoformat() for t in times)
    legend = (
        f"Measured {' and '.join(days)}. `!`: other processes used more than {DISTURBED} CPUs "
        "meanwhile. `errors`: some requests failed."
    )
    every = sorted({key[2:] for key in cells}, key=lambda k: ("SML".index(k[0]), k[1]))
    parts = [legend, _side_by_side(cells, every), _all(cells, every)]
    if floor:
        best = [
            f"{digits(floor[shape]['best_bytes'])} ({shape})" for shape in "SML" if shape in floor
        ]
        parts.append(
            "The same work in processes without HTTP, from bytes to bytes: at best "
            f"{', '.join(best)} per second."
        )
    return "\n\n".join(parts)


def _side_by_side(cells: dict[Key, Cell], every: list[tuple[str, int]]) -> str:
    ours, *others = [(p, e) for p, e in BYTES.items() if any(k[:2] == (p, e) for k in cells)]
    head = ["", "clients", f"{ours[0]}, requests/s"]
    for name, _ in others:
        head += [f"{name}, requests/s", f"{ours[0]} / {name}"]
    head += [f"{name} p50 / p99, ms" for name, _ in (ours, *others)]
    rows = []
    for shape, clients in every:
        own = cells.get((*ours, shape, clients))
        row = [shape, str(clients), _rate(own)]
        for other in others:
            its = cells.get((*other, shape, clients))
            both = own and its and not (own["errors"] or its["errors"])
            row += [_rate(its), f"{own['rps'] / its['rps']:.2g}" if own and its and both else ""]
        for peer in (ours, *others):
            found = cells.get((*peer, shape, clients))
            row.append(f"{digits(found['p50'])} / {digits(found['p99'])}" if found else "")
        rows.append(row)
    return table(head, rows)


def _all(cells: dict[Key, Cell], every: list[tuple[str, int]]) -> str:
    head = ["requests/s", "", *(f"{shape}, {clients}" for shape, clients in every)]
    rows = [
        [peer, f"`{form}`", *(_rate(cells.get((peer, form, *which))) for which in every)]
        for peer, form in dict.fromkeys(key[:2] for key in cells)
    ]
    return table(head, rows, labels=2)


def _rate(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell["errors"] or cell["short"]:
        return "errors"
    taken = max(cell["foreign"], cell.get("steal", 0.0))
    return f"{digits(cell['rps'])}{'!' if taken >= DISTURBED else ''}"


def main() -> None:
    """Prints the tables and writes them on request."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="results of the harness, one JSON object a line")
    parser.add_argument("--floor", type=Path, help="floor.json of the harness")
    parser.add_argument("--write", action="store_true", help="write docs/performance.md")
    given = parser.parse_args()
    floor = json.loads(given.floor.read_text()) if given.floor else None
    text = tables(read(given.results.read_text()), floor)
    print(text)
    if given.write:
        write({MARK: text})


if __name__ == "__main__":
    main()
