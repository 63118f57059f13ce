"""What a sweep measures: a cell for each variant at each length, and where their times cross."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from typing import Any, Final

from qkv.client.event_parser import Event
from qkv.client.tables import Table, format_number, variant_labels
from qkv.errors import MalformedRequest, from_problem

__all__ = ["Cell", "Crossover", "Progress", "SweepResults"]

_COLUMNS: Final = (
    "index", "variant", "parameters", "length", "median_ms", "least_ms", "most_ms", "repeats",
    "flops", "bytes", "peak_bytes", "problem",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One variant at one length: times, or why there are none.

    Attributes:
        index: of the variant in the request.
        variant: its name.
        parameters: as it ran.
        length: of queries and keys.
        median_ms, least_ms, most_ms: milliseconds of compute over the repeats.
        repeats: how many.
        flops, bytes: as a run has them.
        peak_bytes: memory beside inputs and answer; None where it is not known.
        problem: the problem document of what does not run here; None where it ran.
    """

    index: int
    variant: str
    parameters: Mapping[str, Any]
    length: int
    median_ms: float | None = None
    least_ms: float | None = None
    most_ms: float | None = None
    repeats: int | None = None
    flops: int | None = None
    bytes: int | None = None
    peak_bytes: int | None = None
    problem: Mapping[str, Any] | None = None

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Cell:
        """Builds it from the service's JSON; ignores other fields."""
        return cls(**{name: fields[name] for name in _COLUMNS if name in fields})

    @property
    def why_not(self) -> str:
        """In words, what keeps it from running; "" where it ran."""
        return "" if self.problem is None else str(self.problem.get("detail", "it does not run"))

    def _repr_html_(self) -> str:
        results = SweepResults()
        results.cells.append(self)
        return results._repr_html_()


@dataclass(frozen=True, slots=True)
class Crossover:
    """A length at which another variant becomes the faster one of two.

    Attributes:
        before: index of the variant that is faster below.
        after: index of the variant that is faster above.
        length: between two that were measured, where the lines through their medians cross on
            logarithmic axes.
    """

    before: int
    after: int
    length: float


@dataclass(frozen=True, slots=True)
class Progress:
    """What is measured next.

    Attributes:
        done, total: cells.
        variant, length: the next one's.
    """

    done: int
    total: int
    variant: str
    length: int


class SweepResults:
    """What a sweep has measured so far.

    Attributes:
        cells: in the order measured.
        crossovers: known once all is measured.
        finished: whether all is.
    """

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.crossovers: list[Crossover] = []
        self.finished = False

    def add_event(self, event: Event) -> Cell | Progress | None:
        """Adds what an event says. Returns its cell or progress; None for other events.

        Raises:
            QkvError: the sweep ended in a problem, or this is no event of one.
        """
        try:
            return self._add(event.name, json.loads(event.data))
        except (ValueError, KeyError, TypeError) as error:
            raise MalformedRequest(
                f"the event {event.name!r:.60} is not that of a sweep: {error}"
            ) from None

    def _add(self, name: str, fields: dict[str, Any]) -> Cell | Progress | None:
        if name == "progress":
            return Progress(*(fields[n] for n in ("done", "total", "variant", "length")))
        if name == "cell":
            cell = Cell.from_json(fields)
            self.cells.append(cell)
            return cell
        if name == "error":
            raise from_problem(int(fields["problem"]["status"]), fields["problem"])
        if name == "done":
            self.crossovers = [
                Crossover(c["from"], c["to"], c["length"]) for c in fields["crossovers"]
            ]
            self.finished = True
        return None

    def table(self, width: int | None = None) -> str:
        """Medians as text: a line for each length, a column for each variant.

        Args:
            width: letters that a line has room for; None: any number.
        """
        return self._table().text(width)

    def csv(self) -> str:
        """Every cell as a line, parameters and problems in JSON and in words."""
        buffer = StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for cell in self.cells:
            texts = {"parameters": json.dumps(dict(cell.parameters)), "problem": cell.why_not}
            writer.writerow([texts.get(name, getattr(cell, name)) for name in _COLUMNS])
        return buffer.getvalue()

    def _repr_html_(self) -> str:
        return self._table().html()

    @property
    def names(self) -> dict[int, str]:
        """Returns the label of each measured variant, by its index."""
        variants = {cell.index: (cell.variant, cell.parameters) for cell in self.cells}
        indices = sorted(variants)
        return dict(zip(indices, variant_labels([variants[i] for i in indices]), strict=True))

    def sentences(self) -> list[str]:
        """Returns one sentence for each crossover."""
        names = {index: " ".join(name.split("\n")) for index, name in self.names.items()}
        crossings = [
            f"From a length of about {c.length:,.0f} on, {names[c.after]} is faster than "
            f"{names[c.before]}."
            for c in sorted(self.crossovers, key=lambda c: c.length)
        ]
        return crossings or self._fastest_sentence(names)

    def _fastest_sentence(self, names: Mapping[int, str]) -> list[str]:
        """Who is the fastest at every length; nobody where not all is measured, or it depends."""
        lengths = {cell.length for cell in self.cells}
        times = {(c.index, c.length): c.median_ms for c in self.cells if c.median_ms is not None}
        if not self.finished or len(names) < 2 or len(times) < len(names) * len(lengths):
            return []
        first, *others = {min(names, key=lambda i: times[i, n]) for n in lengths}
        return [] if others else [f"At every length measured {names[first]} is the fastest."]

    def _table(self) -> Table:
        names = self.names
        found = {(cell.length, cell.index): cell for cell in self.cells}
        rows = [
            [f"{length:,}", *(_cell_text(found.get((length, index))) for index in names)]
            for length in sorted({cell.length for cell in self.cells})
        ]
        refused = [cell for cell in self.cells if cell.problem is not None]
        why = dict.fromkeys(f"{c.variant} at {c.length:,}: {c.why_not}" for c in refused)
        notes = [*self.sentences(), *why] if self.cells else ["Nothing is measured yet."]
        return Table(
            ["length", *names.values()], [("milliseconds: median (least–most)", rows)], notes
        )


def _cell_text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.problem is not None:
        return "does not run"
    least, median, most = map(format_number, (cell.least_ms, cell.median_ms, cell.most_ms))
    return f"{median} ({least}–{most})"
