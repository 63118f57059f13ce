"""The forms in which weights are returned: parsing, checks, tensors and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from qkv.attention.signature import Output
from qkv.errors import InvalidContent, format_value, pointer_to

_KNOWN: Final = '"full", "none", "stats", {"rows": [...]}, {"top_k": k} or {"pool": bins}'
SMALLER_FORMS: Final = (
    '"weights" may be "stats", {"rows": [...]}, {"top_k": k} or {"pool": bins}, which are smaller; '
    '"weights": "none" omits them'
)
"""The hint in the error for weights that are too large."""

_HEADS: Final = "BHG"  # letters that never name the query axis


KINDS: Final = ("rows", "top_k", "pool", "stats")
"""The forms that summarize the matrix instead of returning it."""


class WeightForm(NamedTuple):
    """A form in which weights are returned.

    Attributes:
        kind: full, none, stats, rows, top_k or pool.
        size: the k of top_k, or the number of bins of pool.
        rows: the row numbers of the form rows.
    """

    kind: str
    size: int = 0
    rows: tuple[int, ...] = ()

    @property
    def is_summary(self) -> bool:
        """True if the form returns tensors computed from the matrix instead of the matrix."""
        return self.kind in KINDS

    @property
    def as_json(self) -> Any:
        """The value of the field `weights` in a request."""
        if self.kind == "rows":
            return {"rows": list(self.rows)}
        return {self.kind: self.size} if self.kind in ("top_k", "pool") else self.kind


FULL: Final = WeightForm("full")
NONE: Final = WeightForm("none")


class FormTensor(NamedTuple):
    """A tensor of a form.

    Attributes:
        letters: one per axis: letters of the weights, and letters that `form_sizes` adds.
        is_integer: the dtype is int64 instead of the dtype of the weights.
    """

    letters: tuple[str, ...]
    is_integer: bool = False


def parse(value: Any) -> WeightForm:
    """Parses the field `weights` of a request.

    Raises:
        InvalidContent: the value is not a form.
    """
    if isinstance(value, str) and value in ("full", "none", "stats"):
        return WeightForm(value)
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in KINDS[:3]:
        raise InvalidContent(
            f"weights is invalid: got {format_value(value)}, expected {_KNOWN}", pointer="/weights"
        )
    ((kind, content),) = value.items()
    if kind != "rows":
        return WeightForm(
            kind, _parse_integer(content, f"weights.{kind}", pointer_to("weights", kind), 1)
        )
    if not isinstance(content, list) or not content:
        raise InvalidContent(
            f"weights.rows is invalid: got {format_value(content)}, expected a list of at least "
            "one row",
            pointer="/weights/rows",
        )
    rows = (
        _parse_integer(row, f"weights.rows[{i}]", pointer_to("weights", "rows", i), 0)
        for i, row in enumerate(content)
    )
    return WeightForm(kind, rows=tuple(rows))


def _parse_integer(value: Any, name: str, pointer: str, least: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON Schema takes 1.0 for an integer
    if type(value) is not int or not least <= value < 1 << 63:
        raise InvalidContent(
            f"{name} is invalid: got {format_value(value)}, expected an integer, {least} or more",
            pointer=pointer,
        )
    return value


def query_axis(weights: Output) -> str | None:
    """Returns the letter of the weights' query axis; None if each item has a single row."""
    letter = weights.letters[-2] if len(weights.letters) > 1 else "B"
    return None if letter in _HEADS else letter


def check(form: WeightForm, variant: str, weights: Output, sizes: Mapping[str, int]) -> None:
    """Checks a form against the axis sizes of a request.

    Raises:
        InvalidContent: the form names rows or keys that do not exist.
    """
    key, query = weights.letters[-1], query_axis(weights)
    if form.kind == "top_k" and form.size > sizes[key]:
        raise InvalidContent(
            f"weights.top_k is too large: got {form.size}, expected at most {key}={sizes[key]}",
            pointer="/weights/top_k",
        )
    if form.kind != "rows":
        return
    if query is None:
        raise InvalidContent(
            f"weights.rows is not possible: the weights of {variant} are "
            f"({', '.join(weights.letters)}), and each item is one row",
            pointer="/weights/rows",
        )
    for i, row in enumerate(form.rows):
        if row >= sizes[query]:
            raise InvalidContent(
                f"weights.rows[{i}] is too large: got {row}, expected less than "
                f"{query}={sizes[query]}; rows count from 0",
                pointer=pointer_to("weights", "rows", i),
            )


def form_tensors(kind: str, weights: Output) -> dict[str, FormTensor]:
    """Returns the tensors of a form by name.

    Beside the letters of the weights there are R (rows), K (keys), and P and Q (bins of queries and
    of keys).
    """
    key, query = weights.letters[-1], query_axis(weights)
    lead = weights.letters[:-1] if query is None else weights.letters[:-2]
    rows = lead if query is None else (*lead, query)
    if kind == "rows":
        return {"weights": FormTensor((*lead, "R", key))}
    if kind == "top_k":
        return {
            "weights": FormTensor((*rows, "K")),
            "indices": FormTensor((*rows, "K"), is_integer=True),
        }
    if kind == "pool":
        return {"weights": FormTensor((*lead, *(() if query is None else "P"), "Q"))}
    return {
        "entropy": FormTensor(rows),
        "largest": FormTensor(rows),
        "largest_index": FormTensor(rows, is_integer=True),
        "effective_keys": FormTensor(rows),
        "received": FormTensor((*lead, key)),
    }


def form_sizes(form: WeightForm, weights: Output, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the sizes of a request's letters and of the letters that a form adds."""
    keys, query = sizes[weights.letters[-1]], query_axis(weights)
    form_letters = {
        "R": len(form.rows),
        "K": form.size,
        "P": min(form.size, 1 if query is None else sizes[query]),
        "Q": min(form.size, keys),
    }
    return {**sizes, **form_letters}
