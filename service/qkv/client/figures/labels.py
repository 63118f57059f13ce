"""The labels of rows and columns: visible, short, and as many as there is room for."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final, NamedTuple

__all__ = ["Axis", "Label", "shorten", "text_width", "visible"]

_MOST: Final = 14  # columns of a fixed-width font
_EM: Final = 0.61  # width of a letter by the size of the font, in DejaVu and in Menlo
_SPACES: Final = {"\n": "↵", "\r": "␍", "\t": "⇥"}
_JOINERS: Final = "\u200c\u200d"  # inside Persian words and emoji
_INVISIBLE: Final = {"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"}  # Unicode categories


class Label(NamedTuple):
    """A label of a row or column.

    Attributes:
        text: visible and short.
        whole: the text before it was shortened.
    """

    text: str
    whole: str


class Axis(NamedTuple):
    """The rows or the columns of a panel.

    Attributes:
        name: such as "query".
        labels: one for each row or column.
        are_numbers: True if the labels are numbers in order, which are thinned to round steps.
    """

    name: str
    labels: Sequence[Label]
    are_numbers: bool = False

    @classmethod
    def of_tokens(cls, name: str, tokens: Sequence[str], most: int = _MOST) -> Axis:
        """Returns an axis with tokens, shortened to `most` columns of a fixed-width font."""
        texts = [visible(token) for token in tokens]
        return cls(name, tuple(Label(shorten(text, most), text) for text in texts))

    @classmethod
    def of_numbers(cls, name: str, numbers: Sequence[int]) -> Axis:
        """Returns an axis with numbers."""
        labels = tuple(Label(text := f"{number:,}", text) for number in numbers)
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        even = list(numbers) == list(range(0, step * len(numbers), step)) if step > 0 else False
        return cls(name, labels, even)

    def shown(self, pitch: float, size: float) -> range:
        """Returns the indices of the labels that fit.

        Args:
            pitch: pixels from one label to the next.
            size: pixels that a label needs.
        """
        least = max(1, math.ceil(size / pitch))
        step = next(n for n in _round_steps() if n >= least) if self.are_numbers else least
        return range(0, len(self.labels), step)


def _round_steps() -> Iterator[int]:
    """Yields 1, 2, 5, 10, 20, 50 and so on."""
    for power in count():
        yield from (n * 10**power for n in (1, 2, 5))


def visible(token: str) -> str:
    """Returns a token with its spaces at both ends and its control characters made visible.

    XML and fonts have no control characters, and a token of spaces alone would look empty.
    """
    if not token:
        return '""'
    inner = token.strip()
    start = token.find(inner) if inner else len(token)
    found = []
    for n, character in enumerate(token):
        kind = unicodedata.category(character)
        if character in _SPACES:
            found.append(_SPACES[character])
        elif kind == "Zs":
            found.append(" " if start <= n < start + len(inner) else "␣")
        elif kind in _INVISIBLE and not (character in _JOINERS and len(token) > 1):
            found.append(repr(character)[1:-1] if kind != "Co" else "\N{REPLACEMENT CHARACTER}")
        else:
            found.append(character)
    return "".join(found)


def shorten(text: str, most: int = _MOST) -> str:
    """Returns a text that is at most `most` columns wide; an ellipsis shows that it is shorter.

    Marks stay with their letter.
    """
    if sum(map(_columns, text)) <= most:
        return text
    kept, used = 0, 0
    for n, character in enumerate(text):
        used += _columns(character)
        if used > most - 1:
            break
        kept = n + 1
    return text[:kept] + "…"


def text_width(text: str, size: float) -> float:
    """Returns the width of a text, in pixels, for a font of this size. Most texts are narrower."""
    return sum(map(_columns, text)) * _EM * size


def _columns(character: str) -> int:
    """Returns the columns of a character in a fixed-width font."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
