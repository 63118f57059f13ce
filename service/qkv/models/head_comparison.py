"""The result of a comparison on a model: a row for each layer, head and variant."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from qkv.client.head_map import head_maps
from qkv.client.notebook import picture
from qkv.client.tables import Table, format_number
from qkv.errors import InvalidContent
from qkv.models.head_row import FIGURES, HeadRow
from qkv.models.model_call import Missed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS: Final = tuple(each.name for each in fields(HeadRow))
_SHOWN: Final = 10  # rows in a notebook, below the map
_MAX_CELLS: Final = 1 << 18
"""The most cells of all maps in a figure. 126 layers of 128 heads with 16 variants have fewer."""
_NAMES: Final = {
    "relative_error": "relative error",
    "largest_error": "largest error",
    "cosine": "cosine",
    "total_variation": "total\nvariation",
    "kl_divergence": "KL, nats",
    "js_divergence": "Jensen-\nShannon, nats",
    "rank_correlation": "rank\ncorrelation",
    "entropy": "entropy,\nnats",
    "baseline_entropy": "baseline's\nentropy, nats",
}


@dataclass(frozen=True, repr=False)
class HeadComparison:
    """Variants compared with a baseline in each head of a model.

    Attributes:
        rows: one for each layer, head and variant.
        anchor: the baseline.
        missed: layers that were not captured and have no rows, with the reason.
        layer_order: names of the layers in the order of their first calls; empty: that of the rows.
    """

    rows: tuple[HeadRow, ...]
    anchor: str
    missed: tuple[Missed, ...] = ()
    layer_order: tuple[str, ...] = field(default=(), compare=False)

    def sorted(self, by: str = "relative_error", *, reverse: bool = False) -> HeadComparison:
        """Returns the same rows in another order.

        Args:
            by: name of a column, such as "relative_error" or "head". "layer" is the order of the
                layers' first calls.
            reverse: True puts the largest first. Rows without a value come last in both orders.

        Raises:
            InvalidContent: there is no such column.
        """
        _check_column(by, _COLUMNS)
        having = [row for row in self.rows if getattr(row, by) is not None]
        missing = [row for row in self.rows if getattr(row, by) is None]
        order = self.layer_order or tuple(self.layers)
        places = {layer: place for place, layer in enumerate(order)}
        ordered = sorted(
            having,
            key=lambda row: places[row.layer] if by == "layer" else getattr(row, by),
            reverse=reverse,
        )
        return replace(self, rows=(*ordered, *missing), layer_order=order)

    def records(self) -> list[dict[str, Any]]:
        """Returns a dictionary for each row, as `pandas.DataFrame` takes them."""
        return [asdict(row) for row in self.rows]

    def csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the rows as text of comma-separated values, with the names of the columns.

        Args:
            path: the file to write too; None: no file.

        Raises:
            OSError: the file cannot be written.
        """
        buffer = StringIO()
        writer = csv.DictWriter(buffer, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.records())
        if path is not None:
            Path(path).write_text(buffer.getvalue(), encoding="utf-8", newline="\n")
        return buffer.getvalue()

    def table(self, limit: int | None = None, *, width: int | None = None) -> str:
        """Returns the rows as text.

        Args:
            limit: number of rows, the first ones; None: all.
            width: characters a line; further columns follow below. None: no limit.
        """
        return self._table(limit).text(width)

    def figure(
        self,
        *,
        value: str = "relative_error",
        variants: Sequence[str] | None = None,
        title: str | None = None,
        limits: tuple[float, float] | None = None,
        shared_scale: bool = True,
        ax: Axes | None = None,
    ) -> Figure:
        """Draws a figure of each head as a heat map of layers by heads, one map for each variant.

        Args:
            value: name of the figure, such as "total_variation".
            variants: as the rows name them; None: all.
            title: above the maps; None: the baseline, "": none.
            limits: the ends of the colour scale; None: those of the numbers.
            shared_scale: True gives all maps one colour scale, False each map its own.
            ax: axes of matplotlib to draw the map of one variant into; None: a new figure.

        Raises:
            InvalidContent: there is no such figure or variant, or the map is too large.
            ValueError: the limits are invalid, or `ax` is for one map and there are more.
            ModuleNotFoundError: matplotlib is not installed.
        """
        _check_column(value, FIGURES)
        known = list(dict.fromkeys(row.variant for row in self.rows))
        for name in variants or ():
            if name not in known:
                raise InvalidContent(
                    f"variants is invalid: got {name!r:.60}, expected some of {', '.join(known)}"
                )
        layers = self.layers
        cells = self._cells() * len(variants or known)
        if cells > _MAX_CELLS:
            raise InvalidContent(
                f"the map is too large: got {cells:,} cells, one for each variant, layer and "
                f"number of a head, expected at most {_MAX_CELLS:,}"
            )
        maps = {name: self._map(name, value, layers) for name in variants or known}
        label = _NAMES[value].replace("-\n", "-").replace("\n", " ")
        title = f"{label}, compared with {self.anchor}" if title is None else title
        return head_maps(
            layers, maps, title=title, value_name=label, limits=limits, shared_scale=shared_scale,
            ax=ax,
        )  # fmt: skip

    @property
    def layers(self) -> list[str]:
        """The names of the layers, in the order of their first rows."""
        return list(dict.fromkeys(row.layer for row in self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        """Returns one line: the numbers of layers and rows, and the variants."""
        variants = ", ".join(dict.fromkeys(row.variant for row in self.rows))
        return (
            f"HeadComparison({len(self.rows)} rows of {len(self.layers)} layers, "
            f"anchor={self.anchor!r}, {variants})"
        )

    def _repr_html_(self) -> str:
        """Returns the map of relative errors, above the heads with the least error."""
        best = self.sorted()._table(_SHOWN).html()
        variants = {row.variant for row in self.rows}
        if not self.rows or self._cells() * len(variants) > _MAX_CELLS:
            return best
        return picture(self.figure) + best

    def _cells(self) -> int:
        """Returns the number of cells in the map of a variant."""
        return len(self.layers) * (1 + max((row.head for row in self.rows), default=-1))

    def _map(self, variant: str, value: str, layers: Sequence[str]) -> list[list[float | None]]:
        """Returns the values of each layer by the numbers of its heads; None: there is none."""
        values: dict[str, dict[int, float | None]] = {layer: {} for layer in layers}
        for row in self.rows:
            if row.variant == variant:
                values[row.layer][row.head] = getattr(row, value)
        return [
            [of_head.get(head) for head in range(max(of_head, default=-1) + 1)]
            for of_head in values.values()
        ]

    def _table(self, limit: int | None) -> Table:
        shown = self.rows[:limit]
        cells = [
            [f"{row.layer} {row.head}", row.variant, *(_text(row, name) for name in FIGURES)]
            for row in shown
        ]
        notes = [
            f"Figures are distances to {self.anchor}, without padding.",
            *self._problems(),
            *self._missed_layers(),
        ]
        if len(shown) < len(self.rows):
            notes.append(f"{len(self.rows) - len(shown):,} more rows are not shown.")
        head = ["layer and head", "variant", *_NAMES.values()]
        return Table(head, [(f"{len(self.layers)} layers", cells)], notes)

    def _problems(self) -> list[str]:
        """Returns a sentence for each problem, with the number of its heads."""
        counts: dict[tuple[str, str], int] = {}
        for row in self.rows:
            if row.problem is not None:
                key = row.variant, row.problem
                counts[key] = counts.get(key, 0) + 1
        return [
            f"{variant} has no figures in {n:,} {'head' if n == 1 else 'heads'}: {problem}."
            for (variant, problem), n in counts.items()
        ]

    def _missed_layers(self) -> list[str]:
        """Returns a sentence for each reason, with the layers that were not captured."""
        layers_of: dict[str, list[str]] = {}
        for layer, reason in self.missed:
            layers_of.setdefault(reason, []).append(layer or "the model")
        return [
            f"{', '.join(layers)} {'was' if len(layers) == 1 else 'were'} not captured: {reason}."
            for reason, layers in layers_of.items()
        ]


def _text(row: HeadRow, name: str) -> str:
    value = getattr(row, name)
    # all digits of a cosine matter: it is close to 1
    return f"{value:.7f}" if value is not None and name == "cosine" else format_number(value)


def _check_column(name: str, expected: Sequence[str]) -> None:
    if name not in expected:
        raise InvalidContent(
            f"the column is invalid: got {name!r:.60}, expected {', '.join(expected)}"
        )
