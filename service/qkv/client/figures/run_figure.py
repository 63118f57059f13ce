"""Draws the weights of a run in every form of the weights. `Run.figure` uses `draw_run`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkv.client.arrays import to_raw
from qkv.client.figures.heat_maps import Labels, Panel, draw_panels
from qkv.client.figures.scale import Scale
from qkv.client.tokens import Tokens, check_count, choose_tokens

_HEADS: Final = 16  # drawn by default
_MAX_SIDE: Final = 256  # cells a side; a larger matrix is drawn as sums of its cells
_STATISTIC_CELL: Final = (0.25, 0.2)  # inches
_STATISTICS: Final = {
    "entropy": ("entropy, nats", "query"),
    "largest": ("largest weight", "query"),
    "effective_keys": ("effective keys", "query"),
    "received": ("received by a key", "key"),
}


class _Choice(NamedTuple):
    """The chosen heads of a sequence.

    Attributes:
        batch: number of the sequence.
        sequences: in the batch.
        heads: indices of the heads; None: the arrays have no heads.
        head_count: number of all heads.
    """

    batch: int
    sequences: int
    heads: list[int] | None
    head_count: int

    def planes(self, array: np.ndarray, rank: int) -> np.ndarray:
        """Returns the chosen arrays of this rank, (number chosen, ...)."""
        lead = array.ndim - rank
        chosen = array[self.batch] if lead else array
        return chosen[self.heads] if lead > 1 else chosen[None]


def draw_run(
    outputs: Mapping[str, Any],
    form: str | Mapping[str, Any],
    *,
    subject: str,
    tokens: Tokens | None = None,
    key_tokens: Tokens | None = None,
    batch: int = 0,
    heads: Sequence[int] | None = None,
    head_names: Sequence[int] | None = None,
    shared_scale: bool = True,
    title: str | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Returns the figure of a run's weights.

    Args:
        outputs: of a run, with weights; arrays by name.
        form: the form of the weights, as `Run.form`.
        subject: what the title names; the parts that are drawn follow it.
        head_names: the number that labels each chosen head; None: its index.
        tokens, key_tokens, batch, heads, shared_scale, title, ax: as for `Run.figure`.

    Raises:
        ValueError: the arguments do not fit the run, or it has no weights.
    """
    arrays = {name: to_raw(array, name).numpy() for name, array in outputs.items()}
    is_stats = "entropy" in arrays
    drawn = arrays.get("entropy" if is_stats else "weights")
    rank = 1 if is_stats else 2
    if drawn is None or drawn.ndim < rank or not drawn.size:
        raise ValueError(
            f"the run has no matrix of weights to draw: got the outputs {', '.join(arrays)}, "
            "expected a run with weights"
        )
    choice = _choose(drawn.shape[: drawn.ndim - rank], batch, heads)
    queries, keys = (
        choose_tokens(name, given, choice.batch, choice.sequences)
        for name, given in (("tokens", tokens), ("key_tokens", key_tokens))
    )
    names = head_names or choice.heads
    if title is None:
        title = _title(subject, choice)
    if is_stats:
        panels = _statistics(arrays, choice, queries, keys, names)
        scales = [Scale.by_root([panel.matrix]) for panel in panels]
        return draw_panels(panels, scales, title=title, value_name="", ax=ax)
    panels = _matrices(arrays, form, choice, queries, keys, names)
    matrices = [panel.matrix for panel in panels]
    groups = [matrices] if shared_scale else [[matrix] for matrix in matrices]
    scales = [Scale.by_root(group) for group in groups]
    return draw_panels(panels, scales, title=title, value_name="weight", ax=ax)


def _choose(lead: tuple[int, ...], batch: int, heads: Sequence[int] | None) -> _Choice:
    """Returns the chosen heads; `lead` are the sizes of batch and heads, if there are any.

    Raises:
        ValueError: there is no such sequence or head.
    """
    sequences = lead[0] if lead else 1
    if not 0 <= batch < sequences:
        raise ValueError(
            f"batch is out of range: got {batch}, expected 0 to {sequences - 1} (B={sequences})"
        )
    if len(lead) < 2:
        if heads is not None:
            raise ValueError("heads cannot be chosen: the weights of this run have no heads")
        return _Choice(batch, sequences, None, 1)
    count = lead[1]
    chosen = list(range(min(count, _HEADS))) if heads is None else [int(head) for head in heads]
    if not chosen:
        raise ValueError("heads is empty: expected at least one head")
    for head in chosen:
        if not 0 <= head < count:
            raise ValueError(
                f"heads has a head that does not exist: got {head}, expected 0 to {count - 1} "
                f"(H={count})"
            )
    return _Choice(batch, sequences, chosen, count)


def _title(subject: str, choice: _Choice) -> str:
    """Returns the subject, and the parts that are drawn if there are others."""
    parts = [subject]
    if choice.sequences > 1:
        parts.append(f"sequence {choice.batch} of {choice.sequences:,}")
    if choice.heads is not None and len(choice.heads) < choice.head_count:
        chosen, *others = choice.heads
        which = f"{len(choice.heads)} of {choice.head_count:,} heads"
        parts.append(which if others else f"head {chosen} of {choice.head_count:,}")
    return ", ".join(parts)


def _matrices(
    arrays: Mapping[str, np.ndarray],
    form: str | Mapping[str, Any],
    choice: _Choice,
    queries: list[str] | None,
    keys: list[str] | None,
    names: Sequence[int] | None,
) -> list[Panel]:
    """Returns a panel for each head. A weight of 0 is an empty cell."""
    planes = choice.planes(arrays["weights"], 2)
    rows, columns = planes.shape[1:]
    indices = None
    if "indices" in arrays:
        indices = choice.planes(arrays["indices"], 2)
        columns = _key_count(indices, keys)
    size = rows, columns
    row_labels, column_labels = Labels("query"), Labels("key")
    if isinstance(form, Mapping) and "pool" in form:
        if queries is not None or keys is not None:
            raise ValueError(
                f"tokens cannot label the form {dict(form)}: a cell is a bin of queries by a bin "
                "of keys"
            )
        row_labels, column_labels = Labels("bin of queries"), Labels("bin of keys")
    if keys is not None:
        check_count("key_tokens", keys, "S", columns)
    elif queries is not None and len(queries) == columns:
        keys = queries
    if isinstance(form, Mapping) and "rows" in form:
        numbers = [int(row) for row in form["rows"]]
        queries = _texts_of_rows(queries, numbers, arrays.get("output"))
    elif queries is not None:
        check_count("tokens", queries, "L", rows)
    return [
        Panel(
            "" if names is None else f"head {names[n]}",
            np.ma.masked_equal(_fit(plane, None if indices is None else indices[n], size), 0.0),
            row_labels._replace(texts=queries),
            column_labels._replace(texts=keys),
            size,
        )
        for n, plane in enumerate(planes)
    ]


def _key_count(indices: np.ndarray, keys: Sequence[str] | None) -> int:
    """Returns the number of keys of the form top_k: of the tokens, or up to the last index."""
    known = int(indices.max()) + 1
    if keys is not None and len(keys) < known:
        raise ValueError(
            f"key_tokens has too few tokens: got {len(keys)}, expected S of at least {known}"
        )
    return max(known, 1) if keys is None else len(keys)


def _texts_of_rows(
    queries: Sequence[str] | None, rows: Sequence[int], output: np.ndarray | None
) -> list[str]:
    """Returns the tokens of the requested rows, or their numbers.

    Args:
        queries: tokens of all L queries.
        rows: their numbers.
        output: (..., L, E), which tells L; None if the run did not return it.
    """
    if queries is None:
        return [f"{row:,}" for row in rows]
    if output is not None and output.ndim > 1:
        check_count("tokens", queries, "L", output.shape[-2])
    if max(rows) >= len(queries):
        raise ValueError(
            f"tokens has too few tokens for row {max(rows)}: got {len(queries)}, expected one for "
            "each of the L queries"
        )
    return [queries[row] for row in rows]


def _fit(plane: np.ndarray, indices: np.ndarray | None, size: tuple[int, int]) -> np.ndarray:
    """Returns a matrix of at most 256 cells a side.

    A cell of a larger matrix is the sum over adjacent keys, and the mean over adjacent queries.

    Args:
        plane: (rows, columns), or (rows, K) of the form top_k.
        indices: (rows, K), the column of each weight, negative for none; None: all are there.
        size: (rows, columns) of the whole matrix.
    """
    rows, columns = size
    tall, wide = math.ceil(rows / _MAX_SIDE), math.ceil(columns / _MAX_SIDE)
    exact = plane.astype(np.float64)
    if indices is None and tall == wide == 1:
        return exact
    exact = np.where(np.isfinite(exact), exact, 0.0)
    total = np.zeros((math.ceil(rows / tall), math.ceil(columns / wide)))
    if indices is None:
        summed = np.add.reduceat(exact, np.arange(0, columns, wide), axis=1)
        np.add.reduceat(summed, np.arange(0, rows, tall), axis=0, out=total)
    else:
        row = np.broadcast_to(np.arange(rows)[:, None] // tall, plane.shape)
        np.add.at(total, (row[indices >= 0], indices[indices >= 0] // wide), exact[indices >= 0])
    cells: np.ndarray = total / np.diff([*range(0, rows, tall), rows])[:, None]
    return cells


def _statistics(
    arrays: Mapping[str, np.ndarray],
    choice: _Choice,
    queries: list[str] | None,
    keys: list[str] | None,
    names: Sequence[int] | None,
) -> list[Panel]:
    """Returns a panel for each statistic, with a row for each head."""
    L, S = (arrays[name].shape[-1] for name in ("entropy", "received"))
    if queries is not None:
        check_count("tokens", queries, "L", L)
    if keys is not None:
        check_count("key_tokens", keys, "S", S)
    elif L == S:
        keys = queries
    texts = {"query": queries, "key": keys}
    rows = Labels("", ()) if names is None else Labels("head", [str(n) for n in names])
    return [
        Panel(
            title,
            choice.planes(arrays[name], 1).astype(np.float64),
            rows,
            Labels(along, texts[along]),
            cell=_STATISTIC_CELL,
        )
        for name, (title, along) in _STATISTICS.items()
    ]
