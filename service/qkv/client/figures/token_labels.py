"""Tokens of queries and keys: checks them, and makes the axes of a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from qkv.client.figures.labels import Axis

__all__ = ["Tokens", "axis", "check_count", "choose_tokens"]

Tokens: TypeAlias = Sequence[str] | Sequence[Sequence[str]]
"""A string for each position, or a list of them for each sequence of the batch."""


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
    found: list[Any] = list(tokens)
    if found and not any(isinstance(token, str) for token in found):
        if len(found) != sequences or not all(hasattr(inner, "__iter__") for inner in found):
            raise ValueError(
                f"{name} does not fit the batch: got {len(found)} items that are no strings, "
                f"expected a list of strings, or one such list for each of B={sequences} sequences"
            )
        found = list(found[batch])
    for n, token in enumerate(found):
        if not isinstance(token, str):
            raise ValueError(f"{name}[{n}] is no string: got {token!r:.60}, expected a string")
    return [str(token) for token in found]


def check_count(name: str, tokens: Sequence[str], letter: str, count: int) -> None:
    """Checks the number of tokens.

    Raises:
        ValueError: it is not that of the positions.
    """
    if len(tokens) != count:
        raise ValueError(
            f"{name} has the wrong length: got {len(tokens)} tokens, expected {letter}={count}"
        )


def axis(name: str, tokens: Sequence[str] | None, count: int, step: int) -> Axis:
    """Returns the axis of some positions: with tokens, else with numbers.

    Args:
        name: of the axis.
        tokens: of the positions.
        count: of the positions.
        step: positions of a cell; its label is that of the first.
    """
    if tokens is None:
        return Axis.of_numbers(name, range(0, count, step))
    return Axis.of_tokens(name, tokens[::step])
