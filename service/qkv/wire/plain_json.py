"""Parses JSON at once into Python objects, where `json_document.Document` visits each.

`Document` calls `load_object` first, and visits what that does not parse: long lists of numbers,
and JSON that breaks a limit or a rule, for which `Document` has the error. `load_names` parses
objects of many names, such as the header of a checkpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NoReturn

import numpy as np
import orjson

from qkv.errors import MalformedRequest

__all__ = [
    "MAX_DEPTH",
    "MAX_NAMES",
    "MAX_NAME_LENGTH",
    "RepeatedName",
    "load_names",
    "load_object",
    "refuse_large_number",
]

MAX_DEPTH: Final = 32
"""Objects and lists within one another, outside tensors."""
MAX_NAMES: Final = 256
"""Names in one object: each look-up of simdjson is a scan."""
MAX_NAME_LENGTH: Final = 1024
"""Characters of a name: the pointer to each value below contains it."""

# A string, or a whole number that may exceed float64: of many digits, or with an exponent. The
# quantifiers are possessive, because there are strings of 64 MiB.
_LARGE: Final = re.compile(
    rb'"(?:[^"\\]++|\\.)*+"|(?<![0-9.eE+-])-?'
    rb"(?:[0-9]{200,}+(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+|"
    rb"[0-9]++(?:\.[0-9]++)?+[eE]\+?[0-9]{2,}+)",
    re.DOTALL,
)
_MAX_SEARCHED_BYTES: Final = 1 << 20  # a search holds the GIL
_CONTAINERS: Final = frozenset((dict, list))
_MAX_BYTES: Final = 1 << 18
_SHORT_BYTES: Final = 1 << 13
_MAX_BRACKETS: Final = 256
_MAX_COMMAS: Final = 700  # from about 1,000 numbers on simdjson's buffers are faster


def load_object(text: bytes) -> dict[str, Any] | None:
    """Returns the object that a text is; None if `Document` must parse it.

    A repeated name is such a case: orjson keeps its last value. Each name has a colon behind it, so
    that a text that repeats a name has more colons than the object without the repetition. Escapes
    could hide a colon.
    """
    if len(text) > _MAX_BYTES or (b"\\" in text and b"\\u" in text):
        return None
    count = text.count if len(text) < _SHORT_BYTES else partial(_count, text)
    brackets, colons = count(b"[") + count(b"{"), count(b":")
    if brackets > _MAX_BRACKETS or colons > MAX_NAMES or count(b",") > _MAX_COMMAS:
        return None
    try:
        root = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if type(root) is not dict or orjson.dumps(root).count(b":") != colons:
        return None
    is_short = brackets <= MAX_DEPTH and len(text) <= MAX_NAME_LENGTH
    return root if is_short or _is_within_limits(root, 0) else None


def refuse_large_number(text: bytes) -> None:
    """Checks the numbers of a short text whose strings end, and that a parser refused.

    JSON has numbers of any size (RFC 8259, section 6), but float64 ends at 1.8e308.

    Raises:
        MalformedRequest: a number is too large for float64.
    """
    if len(text) > _MAX_SEARCHED_BYTES:
        return
    for match in _LARGE.finditer(text):
        number = match[0]
        if not number.startswith(b'"') and math.isinf(float(number)):
            raise MalformedRequest(
                f"a number is too large: got {number[:60].decode()}"
                f"{'...' if len(number) > 60 else ''}, expected at most 1.8e308 in size"
            )


class RepeatedName(ValueError):
    """An object has a name twice; `name` is it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name!r:.60} is repeated")
        self.name = name


def load_names(text: bytes, parse_int: Callable[[str], int] | None = None) -> Any:
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
        return json.loads(
            str(text, "utf-8"),
            object_pairs_hook=_unique_names,
            parse_constant=_refuse_constant,
            parse_int=parse_int,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeError:
        raise ValueError("it is not UTF-8") from None


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for name, value in pairs:
        if name in unique:
            raise RepeatedName(name)
        unique[name] = value
    "".join(unique).encode()  # raises if a name has half a surrogate pair
    return unique


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _count(text: bytes, character: bytes) -> int:
    """Returns how often a character occurs, in a long text faster than bytes.count."""
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == character[0]))


def _is_within_limits(node: Any, depth: int) -> bool:
    """Returns True if neither the depth nor a name exceeds its limit."""
    if depth > MAX_DEPTH:
        return False
    if type(node) is dict:
        for name in node:
            if len(name) > MAX_NAME_LENGTH:
                return False
        node = node.values()
    for value in node:  # a loop is faster than all(...)
        if type(value) in _CONTAINERS and not _is_within_limits(value, depth + 1):
            return False
    return True
