"""Bounds the numbers of many digits in JSON: each may take a thousand times as long as others.

simdjson needs up to 40 us for a number of 19 digits or more that lies halfway between two float64,
and 0.02 us for a shorter one. It holds the GIL meanwhile, so that a thread of its own would not
help the event loop.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from qkv.errors import PayloadTooLarge

__all__ = ["check_long_numbers"]

_MAX_LONG_NUMBERS: Final = 4096
_LONG_DIGITS: Final = 19
_PART_BYTES: Final = 1 << 16  # a part takes eight times as much, in the cache of a core
_KINDS: Final = bytes.maketrans(bytes(range(256)), b" " * 48 + b"0" + b"1" * 9 + b" " * 198)


def check_long_numbers(text: bytes) -> None:
    """Checks how many numbers of a text are long, in a quarter of the time of parsing it.

    Digits in strings count too.

    Raises:
        PayloadTooLarge: there are too many.
    """
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
