"""Tokens of queries and keys: chooses those of a sequence, checks them, and makes them visible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias
from unicodedata import east_asian_width

Tokens: TypeAlias = Sequence[str] | Sequence[Sequence[str]]
"""A string for each position, or a list of them for each sequence of the batch."""

_MAX_COLUMNS: Final = 14  # columns of a label
_SIGNS: Final = {"\n": "↵", "\t": "⇥"}
_JOINERS: Final = "\u200c\u200d"  # inside Persian words and emoji


def choose_tokens(name: str, tokens: Tokens | None, batch: int, sequences: int) -> list[str] | None:
    """Returns the tokens of a sequence.

    Args:
        name: of the argument, for errors.
        tokens: for all sequences, or a list for each of them; None: no tokens.
        batch: the sequence.
        sequences: in the batch.

    Raises:
        ValueError: a token is no string, or the number of lists is not that of the sequences.
    """
    if tokens is None:
        return None
    if isinstance(tokens, str):
        raise ValueError(f"{name} is one string: got {tokens!r:.60}, expected a list of strings")
    listed: list[Any] = list(tokens)
    if listed and not any(isinstance(token, str) for token in listed):
        if len(listed) != sequences or not all(hasattr(inner, "__iter__") for inner in listed):
            raise ValueError(
                f"{name} does not fit the batch: got {len(listed)} items that are no strings, "
                f"expected a list of strings, or one such list for each of B={sequences} sequences"
            )
        listed = list(listed[batch])
    for n, token in enumerate(listed):
        if not isinstance(token, str):
            raise ValueError(f"{name}[{n}] is no string: got {token!r:.60}, expected a string")
    return listed


def check_count(name: str, tokens: Sequence[str], letter: str, count: int) -> None:
    """Checks the number of tokens.

    Raises:
        ValueError: it is not that of the positions.
    """
    if len(tokens) != count:
        raise ValueError(
            f"{name} has the wrong length: got {len(tokens)} tokens, expected {letter}={count}"
        )


def visible(token: str) -> str:
    """Returns a token with its spaces at both ends and its control characters made visible.

    A token of spaces alone would look empty, and fonts have no control characters.
    """
    if not token:
        return '""'
    inner = token.strip(" ")
    before, _, after = token.partition(inner) if inner else (token, "", "")
    return "␣" * len(before) + "".join(map(_sign, inner)) + "␣" * len(after)


def _sign(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    is_shown = character.isprintable() or character in _JOINERS
    return character if is_shown else repr(character)[1:-1]


def shorten(text: str, limit: int = _MAX_COLUMNS) -> str:
    """Returns a text of at most `limit` columns; an ellipsis shows that it is shorter."""
    if count_columns(text) <= limit:
        return text
    while count_columns(text) > limit - 1:
        text = text[:-1]
    return text + "…"


def count_columns(text: str) -> int:
    """Returns the width of a text in letters; a Chinese character is as wide as two."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)
