"""The forms in which weights are returned: parsing, checks, tensors and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from qkv.attention.catalogue import Output
from qkv.errors import InvalidContent, format_value, pointer_to

__all__ = [
    "FULL",
    "KINDS",
    "NONE",
    "SMALLER_FORMS",
    "FormTensor",
    "WeightForm",
    "check",
    "form_sizes",
    "form_tensors",
    "parse",
    "query_axis",
    "schema",
]

_KNOWN: Final = '"full", "none", "stats", {"rows": [...]}, {"top_k": k} or {"pool": bins}'
SMALLER_FORMS: Final = (
    '"weights" may be "stats", {"rows": [...]}, {"top_k": k} or {"pool": bins}, which hold less; '
    '"weights": "none" leaves them out'
)
"""A hint for the error about weights that are too large."""

_HEADS: Final = "BHG"  # axes that are no query axis


KINDS: Final = ("rows", "top_k", "pool", "stats")
"""The forms that summarize the matrix instead of returning it."""


class WeightForm(NamedTuple):
    """A form in which weights are returned.

    Attributes:
        kind: full, none, stats, rows, top_k or pool.
        size: the k of top_k, the bins of pool.
        rows: the row numbers of rows.
    """

    kind: str
    size: int = 0
    rows: tuple[int, ...] = ()

    @property
    def is_summary(self) -> bool:
        """True if tensors computed from the matrix are returned instead of the matrix."""
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
        letters: one per axis: those of the weights, and those that `form_sizes` adds.
        is_integer: its dtype is int64; otherwise it is that of the weights.
    """

    letters: tuple[str, ...]
    is_integer: bool = False


def parse(value: Any) -> WeightForm:
    """Parses the field `weights` of a request.

    Raises:
        InvalidContent: the value is no form.
    """
    if isinstance(value, str) and value in ("full", "none", "stats"):
        return WeightForm(value)
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in KINDS[:3]:
        raise InvalidContent(
            f"weights came as {format_value(value)}; it must be {_KNOWN}", pointer="/weights"
        )
    ((kind, content),) = value.items()
    if kind != "rows":
        return WeightForm(
            kind, _parse_integer(content, f"weights.{kind}", pointer_to("weights", kind), 1)
        )
    if not isinstance(content, list) or not content:
        raise InvalidContent(
            f"weights.rows came as {format_value(content)}; it must be a list of at least one row",
            pointer="/weights/rows",
        )
    rows = (
        _parse_integer(row, f"weights.rows[{i}]", pointer_to("weights", "rows", i), 0)
        for i, row in enumerate(content)
    )
    return WeightForm(kind, rows=tuple(rows))


def _parse_integer(value: Any, name: str, pointer: str, least: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # as JSON Schema has it
    if type(value) is not int or not least <= value < 1 << 63:
        raise InvalidContent(
            f"{name} came as {format_value(value)}; it must be a whole number, {least} or more",
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
        InvalidContent: the form asks for rows or keys that do not exist.
    """
    key, query = weights.letters[-1], query_axis(weights)
    if form.kind == "top_k" and form.size > sizes[key]:
        raise InvalidContent(
            f"weights.top_k is {form.size} where there are {key}={sizes[key]} keys",
            pointer="/weights/top_k",
        )
    if form.kind != "rows":
        return
    if query is None:
        raise InvalidContent(
            f"the weights of {variant} are ({', '.join(weights.letters)}): each item is one row, "
            "and there are none to choose from",
            pointer="/weights/rows",
        )
    for i, row in enumerate(form.rows):
        if row >= sizes[query]:
            raise InvalidContent(
                f"weights.rows[{i}] is {row} where there are {query}={sizes[query]} rows, counted "
                "from 0",
                pointer=pointer_to("weights", "rows", i),
            )


def form_tensors(kind: str, weights: Output) -> dict[str, FormTensor]:
    """Returns the tensors of a form by name.

    Their letters may be R (rows), K (keys), P and Q (bins of queries and of keys).
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
    own = {
        "R": len(form.rows),
        "K": form.size,
        "P": min(form.size, 1 if query is None else sizes[query]),
        "Q": min(form.size, keys),
    }
    return {**sizes, **own}


def schema(weights: Output) -> dict[str, Any]:
    """Returns the JSON schema of the field `weights` of a request."""
    count = {"type": "integer", "minimum": 1, "maximum": (1 << 63) - 1}
    row = {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}
    fields = {"top_k": count, "pool": count}
    if query_axis(weights) is not None:
        fields = {"rows": {"type": "array", "minItems": 1, "items": row}} | fields
    objects = (
        {
            "type": "object",
            "properties": {name: field},
            "required": [name],
            "additionalProperties": False,
        }
        for name, field in fields.items()
    )
    return {
        "anyOf": [{"type": "string", "enum": ["full", "none", "stats"]}, *objects],
        "default": "full",
        "description": "In what form the weights are answered: whole; not at all; chosen rows; the "
        "k largest of each row; the mean over each bin of queries of what they give to each bin of "
        "keys together; or statistics of each row and key, instead of weights.",
    }
