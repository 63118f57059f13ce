"""The forms that weights are answered in: what a request says for each, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from qkv.attention.catalogue import Output
from qkv.errors import InvalidContent, pointer_to, shown

__all__ = [
    "FULL",
    "KINDS",
    "LESS",
    "NONE",
    "Form",
    "Part",
    "check",
    "extents",
    "parse",
    "parts",
    "query_axis",
    "schema",
]

_KNOWN: Final = '"full", "none", "stats", {"rows": [...]}, {"top_k": k} or {"pool": bins}'
LESS: Final = (
    '"weights" may be "stats", {"rows": [...]}, {"top_k": k} or {"pool": bins}, which hold less; '
    '"weights": "none" leaves them out'
)
"""What to ask for instead of weights that are too large."""

_HEADS: Final = "BHG"  # axes that are no query axis


KINDS: Final = ("rows", "top_k", "pool", "stats")
"""Of digests: what is made of the matrix, and is not the matrix itself."""


class Form(NamedTuple):
    """A form.

    Attributes:
        kind: full, none, stats, rows, top_k or pool.
        size: the k of top_k, the bins of pool.
        rows: those of rows.
    """

    kind: str
    size: int = 0
    rows: tuple[int, ...] = ()

    @property
    def is_digest(self) -> bool:
        """Whether it is made of the matrix, and is not the matrix itself, or nothing."""
        return self.kind in KINDS

    @property
    def asked(self) -> Any:
        """What a request says for it."""
        if self.kind == "rows":
            return {"rows": list(self.rows)}
        return {self.kind: self.size} if self.kind in ("top_k", "pool") else self.kind


FULL: Final = Form("full")
NONE: Final = Form("none")


class Part(NamedTuple):
    """A tensor that a form is answered as.

    Attributes:
        letters: one per axis: the weights' own, and of what `extents` says.
        is_whole: its numbers are whole ones: int64; else the weights' dtype.
    """

    letters: tuple[str, ...]
    is_whole: bool = False


def parse(asked: Any) -> Form:
    """The form that a request's `weights` asks for.

    Raises:
        InvalidContent: there is none such.
    """
    if isinstance(asked, str) and asked in ("full", "none", "stats"):
        return Form(asked)
    if not isinstance(asked, dict) or len(asked) != 1 or next(iter(asked)) not in KINDS[:3]:
        raise InvalidContent(
            f"weights came as {shown(asked)}; it must be {_KNOWN}", pointer="/weights"
        )
    ((kind, value),) = asked.items()
    if kind != "rows":
        return Form(kind, _whole(value, f"weights.{kind}", pointer_to("weights", kind), 1))
    if not isinstance(value, list) or not value:
        raise InvalidContent(
            f"weights.rows came as {shown(value)}; it must be a list of at least one row",
            pointer="/weights/rows",
        )
    rows = (
        _whole(row, f"weights.rows[{i}]", pointer_to("weights", "rows", i), 0)
        for i, row in enumerate(value)
    )
    return Form(kind, rows=tuple(rows))


def _whole(value: Any, name: str, pointer: str, least: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # as JSON Schema has it
    if type(value) is not int or not least <= value < 1 << 63:
        raise InvalidContent(
            f"{name} came as {shown(value)}; it must be a whole number, {least} or more",
            pointer=pointer,
        )
    return value


def query_axis(weights: Output) -> str | None:
    """The letter of the weights' query axis; None where each item is one row."""
    letter = weights.letters[-2] if len(weights.letters) > 1 else "B"
    return None if letter in _HEADS else letter


def check(form: Form, variant: str, weights: Output, sizes: Mapping[str, int]) -> None:
    """Holds a form against the sizes of a request.

    Raises:
        InvalidContent: it asks for rows or keys that there are not.
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


def parts(kind: str, weights: Output) -> dict[str, Part]:
    """The tensors that a form is answered as, by name: R rows, K keys, P and Q bins of queries and
    of keys."""
    key, query = weights.letters[-1], query_axis(weights)
    lead = weights.letters[:-1] if query is None else weights.letters[:-2]
    rows = lead if query is None else (*lead, query)
    if kind == "rows":
        return {"weights": Part((*lead, "R", key))}
    if kind == "top_k":
        return {"weights": Part((*rows, "K")), "indices": Part((*rows, "K"), is_whole=True)}
    if kind == "pool":
        return {"weights": Part((*lead, *(() if query is None else "P"), "Q"))}
    return {
        "entropy": Part(rows),
        "largest": Part(rows),
        "largest_index": Part(rows, is_whole=True),
        "effective_keys": Part(rows),
        "received": Part((*lead, key)),
    }


def extents(form: Form, weights: Output, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of a request's letters, and of those that a form brings."""
    keys, query = sizes[weights.letters[-1]], query_axis(weights)
    own = {
        "R": len(form.rows),
        "K": form.size,
        "P": min(form.size, 1 if query is None else sizes[query]),
        "Q": min(form.size, keys),
    }
    return {**sizes, **own}


def schema(weights: Output) -> dict[str, Any]:
    """What JSON schema says of a request's `weights`."""
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
