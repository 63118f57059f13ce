"""Parses JSON of many names, such as the header of a checkpoint, and refuses repeated ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn


class RepeatedName(ValueError):
    """An object has a name twice; `name` is it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name!r:.60} is repeated")
        self.name = name


def load_names(text: bytes, parse_int: Callable[[str], float] | None = None) -> Any:
    """Parses JSON whose objects may have any number of names, with the standard library's parser.

    Other parsers do not report repeated names, or search all names for each. No message has a part
    of a text that is not JSON: it may be any file.

    Args:
        text: UTF-8.
        parse_int: parses an integer; None: as Python does.

    Raises:
        RepeatedName: an object has a name twice.
        ValueError: the text is not JSON, or nested too deeply.
    """
    try:
        return _decoder(parse_int).decode(str(text, "utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeError:
        raise ValueError("it is not UTF-8") from None


@cache
def _decoder(parse_int: Callable[[str], float] | None) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_unique_names, parse_constant=_refuse_constant, parse_int=parse_int
    )


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise RepeatedName(counts.most_common(1)[0][0])
    "".join(unique).encode()  # raises if a name has half a surrogate pair
    return unique


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")
