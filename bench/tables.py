"""Tables of results: the JSON that every benchmark writes, and their Markdown in a page.

    python bench/tables.py results.json bench/results/requests.md

The second form writes a page from results of an earlier run.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

import qkv

DOCS: Final = Path(__file__).parent.parent / "docs"
RESULTS: Final = Path(__file__).parent / "results"
END: Final = "<!-- end -->\n"

Cell = str | float | Sequence[float] | None
"""A text, a number, two numbers such as percentiles, or a median with its limits."""


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
        title: of its mark in the page.
        columns: the header.
        rows: a cell for each column.
        labels: the number of columns of text at the left.
        digits: significant digits of numbers.
        note: a figure that follows from the table, below it.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    labels: int = 1
    digits: int = 3
    note: str = ""

    @property
    def markdown(self) -> str:
        """The table, and its note."""
        separator = ["---"] * self.labels + ["---:"] * (len(self.columns) - self.labels)
        cells = [[format_cell(cell, self.digits) for cell in row] for row in self.rows]
        lines = [f"| {' | '.join(row)} |" for row in (self.columns, separator, *cells)]
        table = "\n".join(lines) if self.rows else ""
        return "\n\n".join(text for text in (table, self.note) if text)


@dataclass(frozen=True)
class Results:
    """The results of a benchmark.

    Attributes:
        command: that measures them.
        header: versions, machine, dtype, shapes and warm-up.
        tables: in the order of the page.
    """

    command: str
    header: Mapping[str, str]
    tables: Sequence[Table]

    @property
    def texts(self) -> dict[str, str]:
        """The header and the tables in Markdown, by their titles."""
        header = "; ".join(f"{name} {value}" for name, value in self.header.items())
        return {"about": f"{header}."} | {table.title: table.markdown for table in self.tables}

    def mark(self, title: str) -> str:
        """Returns the line of a page that is above a text."""
        return f"<!-- made by `{self.command}`: {title} -->\n"


def describe_machine(**others: str) -> dict[str, str]:
    """Returns a header: versions and machine, then the others."""
    versions = {"qkv": qkv.__version__, "torch": str(torch.__version__)}
    machine = {"Python": platform.python_version(), "machine": platform.machine()}
    return versions | machine | {name.replace("_", " "): text for name, text in others.items()}


def quartiles(values: Sequence[float]) -> list[float]:
    """Returns the median and the quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return [median, low, high]


def spread(values: Sequence[float]) -> list[float]:
    """Returns the median, the least and the largest value."""
    return [statistics.median(values), min(values), max(values)]


def percentile(values: Sequence[float], per_cent: int) -> float:
    """Returns a percentile of the values."""
    return statistics.quantiles(values, n=100, method="inclusive")[per_cent - 1]


def format_cell(cell: Cell, digits: int = 3) -> str:
    """Formats a cell for a reader."""
    if cell is None or isinstance(cell, str):
        return cell or ""
    if isinstance(cell, int | float):
        return _format_number(cell, digits)
    first, *others = (_format_number(number, digits) for number in cell)
    return f"{first} / {others[0]}" if len(others) == 1 else f"{first} ({'–'.join(others)})"


def _format_number(x: float, digits: int) -> str:
    """Formats counts with all digits; other numbers with some, or with an exponent."""
    if isinstance(x, int) or x == 0 or not math.isfinite(x):
        return f"{x:,}" if isinstance(x, int) else f"{x:g}"
    if abs(x) >= 100:
        return f"{x:,.0f}"
    if abs(x) < 1e-3:
        mantissa, _, exponent = f"{x:.{max(0, digits - 2)}e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{x:#.{digits}g}".removesuffix(".")


def write_page(page: Path, results: Results) -> None:
    """Writes each text between its marks; the text around them stays.

    Raises:
        ValueError: the page has no place for one of the texts.
    """
    text = page.read_text()
    for title, part in results.texts.items():
        before, mark, rest = text.partition(results.mark(title))
        _, end, after = rest.partition(END)
        if not (mark and end):
            raise ValueError(f"{page.name} has no {results.mark(title).strip()} with an end")
        text = f"{before}{mark}{part}\n{end}{after}"
    page.write_text(text)


def add_options(parser: ArgumentParser) -> None:
    """Adds the options of every benchmark."""
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--write", action="store_true", help="write the tables into the page")


def finish(results: Results, page: Path, options: Namespace) -> None:
    """Prints the tables, and writes them where the options say."""
    print("\n\n".join(f"{title}\n\n{text}" for title, text in results.texts.items()))
    if options.json:
        options.json.write_text(json.dumps(asdict(results), indent=1))
    if options.write:
        write_page(page, results)


def read_results(file: Path) -> Results:
    """Returns the results that a benchmark wrote as JSON."""
    document = json.loads(file.read_text())
    tables = [Table(**table) for table in document["tables"]]
    return Results(document["command"], document["header"], tables)


if __name__ == "__main__":
    write_page(Path(sys.argv[2]), read_results(Path(sys.argv[1])))
