"""The measured cells of a sweep, the lengths between which curves cross, and their table.

`Sweep` and `AsyncSweep` are `SweepResults`; the command line uses them too.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from io import StringIO
from typing import Any, Final

from qkv.client.event_source import ServerSentEvent
from qkv.client.tables import Table, format_number, variant_labels
from qkv.errors import MalformedRequest, from_problem
from qkv.wire import responses
from qkv.wire.responses import Crossover, Done, Progress

__all__ = ["Cell", "Crossover", "Progress", "SweepResults"]

_COLUMNS: Final = (
    "index", "variant", "parameters", "length", "median_ms", "least_ms", "most_ms", "repeats",
    "flops", "bytes", "peak_bytes", "problem", "way", "held_bytes",
)  # fmt: skip


class Cell(responses.Cell):
    """A variant at a length: its times, or the problem why it could not run.

    Attributes:
        index: of the variant in the request, or of the curve if a token is timed.
        variant: its name.
        parameters: as it ran.
        length: of queries and keys, or of the tokens before the timed one.
        way: how a token is computed: "state", "cache" or "recompute"; None: a whole call.
        median_ms, least_ms, most_ms: milliseconds of compute over the repeats.
        repeats: timed runs.
        flops, bytes: as for a run.
        peak_bytes: memory beside the inputs.
        held_bytes: of the cache or the state, kept from token to token; None: a whole call.
        problem: a problem document if the cell could not run, else None.
    """

    @property
    def why_not(self) -> str:
        """The reason why the cell could not run; "" if it ran."""
        return "" if self.problem is None else str(self.problem.get("detail", "it does not run"))

    def _repr_html_(self) -> str:
        results = SweepResults()
        results.cells.append(self)
        return results._repr_html_()


class SweepResults:
    """The measured cells of a sweep.

    Attributes:
        cells: in the order of measurement.
        crossovers: empty until all cells are measured.
        finished: True if all cells are measured.
    """

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.crossovers: list[Crossover] = []
        self.finished = False

    def add_event(self, event: ServerSentEvent) -> Cell | Progress | None:
        """Adds the data of an event. Returns its cell or progress; None for other events.

        Raises:
            QkvError: the service ended the sweep with a problem, or the event is not valid.
        """
        try:
            return self._add(event.event, json.loads(event.data))
        except (ValueError, KeyError, TypeError) as error:
            raise MalformedRequest(
                f"the event {event.event!r:.60} is not that of a sweep: {error}"
            ) from None

    def _add(self, name: str, fields: dict[str, Any]) -> Cell | Progress | None:
        if name == "progress":
            return Progress.parse(fields)
        if name == "cell":
            cell = Cell.parse(fields)
            self.cells.append(cell)
            return cell
        if name == "error":
            raise from_problem(int(fields["problem"]["status"]), fields["problem"])
        if name == "done":
            self.crossovers = list(Done.parse(fields).crossovers)
            self.finished = True
        return None

    def table(self, width: int | None = None) -> str:
        """Returns the results as text: a line for each length, a column for each variant.

        Args:
            width: characters a line; further columns follow below. None: no limit.
        """
        return self._table().text(width)

    def csv(self) -> str:
        """Returns a line for each cell, with parameters as JSON and the reason of a problem."""
        buffer = StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for cell in self.cells:
            texts = {"parameters": json.dumps(dict(cell.parameters)), "problem": cell.why_not}
            writer.writerow([texts.get(name, getattr(cell, name)) for name in _COLUMNS])
        return buffer.getvalue()

    def __repr__(self) -> str:
        names = ", ".join(name.replace("\n", " ") for name in self.names.values()) or "no variant"
        state = "finished" if self.finished else "not finished"
        return f"<{type(self).__name__} of {names}: {len(self.cells)} cells, {state}>"

    def _repr_html_(self) -> str:
        return self._table().html()

    @property
    def names(self) -> dict[int, str]:
        """The label of each measured curve, by its index: its variant, and how it decodes."""
        variants = {cell.index: (cell.variant, cell.parameters) for cell in self.cells}
        ways = {cell.index: cell.way for cell in self.cells}
        indices = sorted(variants)
        labels = variant_labels([variants[i] for i in indices])
        return {
            i: label if (way := ways[i]) is None else f"{label}\n{way}"
            for i, label in zip(indices, labels, strict=True)
        }

    def sentences(self) -> list[str]:
        """Returns one sentence for each crossover, or one about the fastest variant."""
        names = {index: " ".join(name.split("\n")) for index, name in self.names.items()}
        crossings = [
            f"{names[c.after]} becomes faster than {names[c.before]} between lengths "
            f"{c.between[0]:,} and {c.between[1]:,}."
            for c in sorted(self.crossovers, key=lambda c: c.length)
        ]
        return crossings or self._fastest_sentence(names)

    def _fastest_sentence(self, names: Mapping[int, str]) -> list[str]:
        """Returns a sentence if one variant has the smallest median at every length.

        Returns none if a cell has no time.
        """
        lengths = {cell.length for cell in self.cells}
        times = {(c.index, c.length): c.median_ms for c in self.cells if c.median_ms is not None}
        if not self.finished or len(names) < 2 or len(times) < len(names) * len(lengths):
            return []
        first, *others = {min(names, key=lambda i: times[i, n]) for n in lengths}
        return (
            []
            if others
            else [f"{names[first]} is faster than the others at every length, by the medians."]
        )

    def _table(self) -> Table:
        names = self.names
        sections = [("milliseconds: median (least–most)", self._rows(_cell_text))]
        if any(cell.held_bytes is not None for cell in self.cells):
            sections.append(("kept from token to token", self._rows(_held_text)))
        failed = [cell for cell in self.cells if cell.problem is not None]
        reasons = dict.fromkeys(f"{c.variant} at {c.length:,}: {c.why_not}" for c in failed)
        notes = [*self.sentences(), *reasons] if self.cells else ["Nothing is measured yet."]
        return Table(["length", *names.values()], sections, notes)

    def _rows(self, text_of: Callable[[Cell | None], str]) -> list[list[str]]:
        """Returns a line for each length, with a text for each curve."""
        cell_at = {(cell.length, cell.index): cell for cell in self.cells}
        return [
            [f"{length:,}", *(text_of(cell_at.get((length, index))) for index in self.names)]
            for length in sorted({cell.length for cell in self.cells})
        ]


def _held_text(cell: Cell | None) -> str:
    return "" if cell is None or cell.held_bytes is None else f"{cell.held_bytes:,} bytes"


def _cell_text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.problem is not None:
        return "does not run"
    least, median, most = map(format_number, (cell.least_ms, cell.median_ms, cell.most_ms))
    return f"{median} ({least}–{most})"
