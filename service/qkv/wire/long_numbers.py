"""Numbers of JSON that parsers treat in their own ways: of many digits, or beyond their types.

JSON has numbers of any size (RFC 8259, section 6). Integers of 64 bits and float64 end before.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np
import orjson

from qkv.errors import PayloadTooLarge

_MAX_LONG_NUMBERS: Final = 4096
_LONG_DIGITS: Final = 19
_MIN_BYTES: Final = _MAX_LONG_NUMBERS * (_LONG_DIGITS + 1)  # no shorter text has too many
_PART_BYTES: Final = 1 << 16  # a part takes eight times as much, in the cache of a core
_KINDS: Final = bytes.maketrans(bytes(range(256)), b" " * 48 + b"0" + b"1" * 9 + b" " * 198)
_MAX_WIDENED: Final = 1 << 20  # strings and integers: each costs a Python object
# A string, or an integer that may exceed 64 bits, between its neighbours in JSON. The quantifiers
# are possessive, because there are strings of 64 MiB.
_WIDE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|(?<=[\[,:\s])-?[0-9]{19,}(?=[\],}\s])', re.DOTALL)
_NUMBER: Final = re.compile(r"[-+.0-9eE]+")


def check_long_numbers(text: bytes) -> None:
    """Checks how many numbers of a text are long, in a quarter of the time of parsing it.

    simdjson needs up to 40 us for a number of 19 digits or more that lies halfway between two
    float64, and 0.02 us for a shorter one. It holds the GIL meanwhile, so that a thread of its own
    would not help the event loop. Digits in strings count too.

    Raises:
        PayloadTooLarge: there are too many.
    """
    if len(text) < _MIN_BYTES:
        return
    count = start = 0
    while start < len(text):
        end = start + _PART_BYTES
        if end < len(text):
            end = text.rfind(b",", start, end) + 1 or end  # behind a number, not in it
        count += _count(text[start:end])
        start = end
        if count > _MAX_LONG_NUMBERS:
            raise PayloadTooLarge(
                f"the JSON has too many long numbers: got more than {_MAX_LONG_NUMBERS} of "
                f"{_LONG_DIGITS} digits or more, expected at most 17 digits, enough for a float64"
            )


def widen_integers(text: bytes) -> bytes:
    """Returns a text with an exponent at each integer that exceeds 64 bits, so that it is a float.

    The number of replaced strings and integers is bounded.
    """
    return _WIDE.sub(_widen, text, count=_MAX_WIDENED)


def too_large(error: orjson.JSONDecodeError) -> str | None:
    """Returns a message with the number that is too large for float64; None: another error."""
    if "infinity" not in error.msg or (match := _NUMBER.match(error.doc, error.pos)) is None:
        return None
    number = match[0] if len(match[0]) <= 60 else f"{match[0][:60]}..."
    return f"a number is too large: got {number}, expected at most 1.8e308 in size"


def _widen(match: re.Match[bytes]) -> bytes:
    text = match[0]
    if text.startswith(b'"') or (len(text) <= 20 and -(2**63) <= int(text) < 2**64):
        return text
    return text + b"e0"


def _count(text: bytes) -> int:
    """Returns how many numbers have 19 digits or more behind their leading zeros."""
    kinds = np.frombuffer(text.translate(_KINDS, b"."), np.uint8)
    digits = kinds != ord(" ")
    two = digits[:-1] & digits[1:]
    four = two[:-2] & two[2:]
    eight = four[:-4] & four[4:]
    sixteen = eight[:-8] & eight[8:]
    nineteen = sixteen[:-3] & two[16:-1] & digits[18:]
    starts = np.flatnonzero(nineteen & (kinds[: len(nineteen)] == ord("1")))
    # two starts in one number are closer than 19, unless it has that many zeros between them
    return int(starts.size > 0) + int(np.count_nonzero(np.diff(starts) > _LONG_DIGITS))
