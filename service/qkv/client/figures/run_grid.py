"""Panels for the weights of a run, in every form of the weights.

`Run.figure` and the notebook use `build_grid`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from qkv.client.figures.grid import Grid, Panel, cell_size, grid_columns
from qkv.client.figures.labels import Axis
from qkv.client.figures.planes import choose_planes
from qkv.client.figures.pooling import pool, pool_indexed
from qkv.client.figures.scale import Scale
from qkv.client.figures.token_labels import Tokens, axis, check_count, choose_tokens

__all__ = ["Options", "build_grid"]

Form: TypeAlias = str | Mapping[str, Any]

_MAX_PANELS: Final = 16  # by default
_MAX_ROWS: Final = 32  # heads in a panel of statistics, by default
# (largest number of panels, cells a side): about 100,000 cells in all are 1 MB of SVG
_CELLS: Final = ((1, 160), (4, 112), (16, 80), (math.inf, 48))
_STATISTICS: Final = {
    "entropy": ("entropy, nats", "query"),
    "largest": ("largest weight", "query"),
    "effective_keys": ("effective keys", "query"),
    "received": ("received by a key", "key"),
}


class Options(NamedTuple):
    """The arguments of `Run.figure`.

    Attributes:
        tokens, key_tokens: labels of queries and keys.
        batch: the sequence; None: the first if there are heads, else all.
        heads: the heads; None: the first ones.
        shared_scale: True if all heads have one colour scale.
        title: None: the name of the variant.
        cells: the largest number of panels, and cells a side then; the last is for any number.
        head_numbers: the number that labels each head; None: its index.
    """

    tokens: Tokens | None = None
    key_tokens: Tokens | None = None
    batch: int | None = None
    heads: Sequence[int] | None = None
    shared_scale: bool = True
    title: str | None = None
    cells: Sequence[tuple[float, int]] = _CELLS
    head_numbers: Sequence[int] | None = None

    def labels(self, kind: str, numbers: Sequence[int]) -> Sequence[int]:
        """Returns the numbers that label heads or sequences of these indices."""
        if kind != "head" or self.head_numbers is None:
            return numbers
        return [self.head_numbers[n] for n in numbers]


class _Names(NamedTuple):
    """The tokens of a sequence; None: numbers."""

    queries: list[str] | None
    keys: list[str] | None


def build_grid(
    variant: str,
    weights_are: str | None,
    arrays: Mapping[str, np.ndarray],
    form: Form,
    options: Options,
) -> Grid | None:
    """Returns the panels of a run's weights; None if its outputs have no weights.

    Pools matrices that are too large: a cell is the sum over adjacent keys, and the mean over
    adjacent queries.

    Raises:
        ValueError: the options do not fit the run.
    """
    heading = f"{variant}, {weights_are} weights" if weights_are else variant
    title = heading if options.title is None else options.title
    fallback = f"Attention weights of {variant}"
    if "entropy" in arrays and arrays["entropy"].size:
        panels, notes = _statistics(arrays, options)
        caption = " ".join([*notes, "Colour grows with the square root of a number."])
        return Grid(title, caption, panels, 2, "", False, fallback)
    weights = arrays.get("weights")
    if weights is None or weights.ndim < 2 or not weights.size:
        return None
    panels, notes = _matrices(arrays, form, options)
    scales = {panel.scale for panel in panels}
    notes.append(_colours(len(panels), options.shared_scale, any(s.is_signed for s in scales)))
    shared = options.shared_scale or len(panels) == 1
    columns = grid_columns(len(panels))
    return Grid(title, " ".join(notes), panels, columns, "weight", shared, fallback)


def _colours(panels: int, shared_scale: bool, is_signed: bool) -> str:
    """Returns the sentences about the colours of weights."""
    sentences = ["Colour grows with the square root of a weight; a weight of 0 is empty."]
    if is_signed:
        sentences.append("Negative weights are orange.")
    if panels > 1:
        sentences.append(
            "All panels share one scale." if shared_scale else "Each panel has its own scale."
        )
    return " ".join(sentences)


def _matrices(
    arrays: Mapping[str, np.ndarray], form: Form, options: Options
) -> tuple[list[Panel], list[str]]:
    """Returns a panel for each head, and notes."""
    weights, indices = arrays["weights"], arrays.get("indices")
    planes, kind, numbers, notes = choose_planes(
        weights, 2, options.batch, options.heads, _MAX_PANELS
    )
    rows, columns = weights.shape[-2:]
    if indices is not None:
        notes.append(f"Only the {columns:,} largest weights of each query are shown.")
        columns = _key_count(indices, options)
    names = _names(arrays, form, options, rows, columns)
    most = _most_cells(options, len(planes))
    tall, wide = math.ceil(rows / most), math.ceil(columns / most)
    if indices is None:
        matrices = [pool(plane, tall, wide) for plane in planes]
    else:
        chosen = choose_planes(indices, 2, options.batch, options.heads, _MAX_PANELS).arrays
        matrices = [
            pool_indexed(plane, at, columns, tall, wide)
            for plane, at in zip(planes, chosen, strict=True)
        ]
    row_axis, column_axis = _axes(form, names, (rows, columns), (tall, wide))
    shared = Scale.of_weights(matrices)
    cell = cell_size(len(row_axis.labels), len(column_axis.labels), len(matrices))
    panels = [
        Panel(
            f"{kind} {n}" if kind else "", matrix, row_axis, column_axis,
            shared if options.shared_scale else Scale.of_weights([matrix]), cell,
        )
        for n, matrix in zip(options.labels(kind, numbers), matrices, strict=True)
    ]  # fmt: skip
    if tall * wide > 1:
        queries, keys = _count_label(tall, "query", "queries"), _count_label(wide, "key", "keys")
        notes.append(
            f"A cell is {queries} by {keys}: the sum over the keys, the mean over the queries."
        )
    if not np.isfinite(weights).all():
        notes.append("Numbers that are not finite are left out.")
    return panels, notes


def _most_cells(options: Options, panels: int) -> int:
    """Returns the cells a side of so many panels."""
    return next(cells for most, cells in options.cells if panels <= most)


def _key_count(indices: np.ndarray, options: Options) -> int:
    """Returns the number of keys of the form top_k: of the tokens, or up to the last index."""
    known = int(indices.max()) + 1
    batch, sequences = options.batch or 0, len(indices) if indices.ndim > 2 else 1
    keys = choose_tokens("key_tokens", options.key_tokens, batch, sequences)
    if keys is not None and len(keys) < known:
        raise ValueError(
            f"key_tokens has too few tokens: got {len(keys)}, expected S of at least {known}"
        )
    return known if keys is None else len(keys)


def _names(
    arrays: Mapping[str, np.ndarray], form: Form, options: Options, rows: int, columns: int
) -> _Names:
    """Returns the tokens of the rows and of the columns."""
    weights = arrays["weights"]
    batch, sequences = options.batch or 0, len(weights) if weights.ndim > 2 else 1
    tokens = choose_tokens("tokens", options.tokens, batch, sequences)
    keys = choose_tokens("key_tokens", options.key_tokens, batch, sequences)
    if isinstance(form, Mapping) and "pool" in form:
        if tokens is not None or keys is not None:
            raise ValueError(
                f"tokens cannot label the form {dict(form)}: a cell is a bin of queries by a bin "
                "of keys"
            )
        return _Names(None, None)
    if keys is not None:
        check_count("key_tokens", keys, "S", columns)
    elif tokens is not None and len(tokens) == columns:
        keys = tokens
    if tokens is not None and isinstance(form, Mapping) and "rows" in form:
        tokens = _tokens_of_rows(tokens, form["rows"], arrays.get("output"))
    elif tokens is not None:
        check_count("tokens", tokens, "L", rows)
    return _Names(tokens, keys)


def _tokens_of_rows(
    tokens: Sequence[str], rows: Sequence[int], output: np.ndarray | None
) -> list[str]:
    """Returns the tokens of the requested rows.

    Args:
        tokens: of all L queries.
        rows: their numbers.
        output: (..., L, E), which tells L; None if the run did not return it.
    """
    if output is not None and output.ndim > 1:
        check_count("tokens", tokens, "L", output.shape[-2])
    if max(rows) >= len(tokens):
        raise ValueError(
            f"tokens has too few tokens for row {max(rows)}: got {len(tokens)}, expected one for "
            "each of the L queries"
        )
    return [tokens[int(row)] for row in rows]


def _axes(
    form: Form, names: _Names, sizes: tuple[int, int], steps: tuple[int, int]
) -> tuple[Axis, Axis]:
    """Returns the axes of the rows and of the columns."""
    (rows, columns), (tall, wide) = sizes, steps
    if isinstance(form, Mapping) and "pool" in form:
        bins = (("bin of queries", rows, tall), ("bin of keys", columns, wide))
        row_axis, column_axis = (axis(name, None, count, step) for name, count, step in bins)
        return row_axis, column_axis
    row_axis = axis("query", names.queries, rows, tall)
    if isinstance(form, Mapping) and "rows" in form and names.queries is None:
        row_axis = Axis.of_numbers("query", [int(row) for row in form["rows"]][::tall])
    return row_axis, axis("key", names.keys, columns, wide)


def _statistics(
    arrays: Mapping[str, np.ndarray], options: Options
) -> tuple[list[Panel], list[str]]:
    """Returns a panel for each statistic, with a row for each head, and notes."""
    entropy, most = arrays["entropy"], _most_cells(options, len(_STATISTICS))
    batch, sequences = options.batch or 0, len(entropy) if entropy.ndim > 1 else 1
    tokens = choose_tokens("tokens", options.tokens, batch, sequences)
    keys = choose_tokens("key_tokens", options.key_tokens, batch, sequences)
    counts = {axis: arrays[name].shape[-1] for name, (_, axis) in _STATISTICS.items()}
    if tokens is not None:
        check_count("tokens", tokens, "L", counts["query"])
    if keys is not None:
        check_count("key_tokens", keys, "S", counts["key"])
    elif counts["query"] == counts["key"]:
        keys = tokens
    labels = {"query": tokens, "key": keys}
    panels: list[Panel] = []
    notes: list[str] = []
    steps = {name: math.ceil(count / most) for name, count in counts.items()}
    for name, (title, along) in _STATISTICS.items():
        planes, kind, numbers, notes = choose_planes(
            arrays[name], 1, options.batch, options.heads, _MAX_ROWS
        )
        matrix = pool(planes, 1, steps[along]) / steps[along]
        heads = options.labels(kind, numbers)
        rows = Axis.of_numbers(kind, heads) if kind else Axis.of_tokens("", [" "])
        columns = axis(along, labels[along], counts[along], steps[along])
        scale = Scale.of_weights([matrix])
        panels.append(
            Panel(
                title,
                matrix,
                rows,
                columns,
                scale,
                cell_size(len(rows.labels), len(columns.labels), 4),
                has_empty_zeros=False,
            )
        )
    if max(steps.values()) > 1:
        queries = _count_label(steps["query"], "query", "queries")
        notes.append(
            f"A cell is the mean of {queries}, or of {_count_label(steps['key'], 'key', 'keys')}."
        )
    return panels, notes


def _count_label(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"
