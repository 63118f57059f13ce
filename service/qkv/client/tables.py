"""Tables of results: as text for a terminal, as HTML for a notebook.

`Comparison` and `SweepResults` use `Table`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import zip_longest
from textwrap import wrap
from typing import Any, Final, NamedTuple

_NOTE_WIDTH: Final = 96  # characters
_SEPARATOR: Final = " " * 3
_RULE: Final = "border-bottom:1px solid rgba(128,128,128,.5)"


class Table(NamedTuple):
    """A table of texts.

    Attributes:
        head: a heading for each column; the first is above the names of the rows.
        sections: a title and rows each; a row is a name and a text for each other column.
        notes: sentences below the table.
    """

    head: Sequence[str]
    sections: Sequence[tuple[str, Sequence[Sequence[str]]]]
    notes: Sequence[str] = ()

    def text(self, width: int | None = None) -> str:
        """Returns the table for a terminal or a log, without colour.

        Args:
            width: characters a line; further columns follow below. None: no limit.
        """
        head = list(zip_longest(*(name.split("\n") for name in self.head), fillvalue=""))
        inset = [[f"  {n}", *cells] for _, rows in self.sections for n, *cells in rows]
        widths = [max(map(len, column)) for column in zip(*head, *inset, strict=True)]
        blocks = [
            "\n".join(self._lines(head, widths, [0, *some]))
            for some in _group_columns(widths, width)
        ]
        room = _NOTE_WIDTH if width is None else min(_NOTE_WIDTH, width)
        if notes := [line for note in self.notes for line in wrap(note, room)]:
            blocks.append("\n".join(notes))
        return "\n\n".join(blocks)

    def _lines(
        self, head: Sequence[Sequence[str]], widths: Sequence[int], columns: Sequence[int]
    ) -> Iterator[str]:
        """Yields the lines of a table with some of the columns."""

        def line(cells: Sequence[str]) -> str:
            aligned = (
                f"{cells[n]:>{widths[n]}}" if n else f"{cells[n]:{widths[n]}}" for n in columns
            )
            return _SEPARATOR.join(aligned).rstrip()

        yield from map(line, head)
        yield "─" * _total_width(widths, columns)
        for title, rows in self.sections:
            yield from ("", title)
            yield from (line([f"  {name}", *cells]) for name, *cells in rows)

    def html(self) -> str:
        """Returns the table for a notebook. It uses the page's colours, light or dark."""
        head = "".join(
            f'<th scope="col" style="{_cell_style(n)}">{_html_lines(h)}</th>'
            for n, h in enumerate(self.head)
        )
        lines = [
            '<table style="border-collapse:collapse;font-variant-numeric:tabular-nums">',
            f'<thead><tr style="{_RULE}">{head}</tr></thead>',
        ]
        for title, rows in self.sections:
            lines += [
                f'<tbody><tr><th scope="rowgroup" colspan="{len(self.head)}" '
                f'style="text-align:left;padding-top:.8em">{escape(title)}</th></tr>'
            ]
            for name, *cells in rows:
                inner = "".join(f'<td style="{_cell_style(1)}">{escape(c)}</td>' for c in cells)
                lines.append(
                    f'<tr><th scope="row" style="{_cell_style(0)};font-weight:normal">'
                    f"{escape(name)}</th>{inner}</tr>"
                )
            lines.append("</tbody>")
        lines.append("</table>")
        lines += [f"<p>{escape(note)}</p>" for note in self.notes]
        return "\n".join(lines)


def _group_columns(widths: Sequence[int], width: int | None) -> list[list[int]]:
    """Splits the columns into groups that fit the width beside the first column."""
    groups: list[list[int]] = [[]]
    for n in range(1, len(widths)):
        if groups[-1] and width is not None and _total_width(widths, [0, *groups[-1], n]) > width:
            groups.append([])
        groups[-1].append(n)
    return groups


def _total_width(widths: Sequence[int], columns: Sequence[int]) -> int:
    return sum(widths[n] for n in columns) + len(_SEPARATOR) * (len(columns) - 1)


def _cell_style(column: int) -> str:
    side = "right;padding-left:1.5em" if column else "left"
    return f"text-align:{side};vertical-align:bottom"


def _html_lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def format_number(number: float | None) -> str:
    """Returns the number in three digits; a dash for None."""
    if number is None:
        return "–"
    if number == 0 or 1e-4 <= abs(number) < 1e5:
        return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
    return f"{number:.2e}"


def format_scaled(number: float | None, units: Sequence[str], step: int) -> str:
    """Returns the number in three digits with the largest unit that fits; a dash for None.

    Args:
        number: in the first of the units.
        units: each is `step` of the unit before it.
        step: 1000 or 1024.
    """
    if number is None:
        return "–"
    unit = 0
    while abs(number) >= step and unit < len(units) - 1:
        number, unit = number / step, unit + 1
    return f"{format_number(number)} {units[unit]}"


def variant_labels(named: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Returns a label for each variant with its parameters.

    A label is the name. Variants of the same name get a line for each parameter that differs.
    """
    labels = []
    for name, parameters in named:
        others = [p for other, p in named if other == name]
        distinguishing = [
            n for n in parameters if any(n not in p or p[n] != parameters[n] for p in others)
        ]
        labels.append(
            "\n".join([name, *(f"{n}={json.dumps(parameters[n])}" for n in distinguishing)])
        )
    return labels
