"""Prints the output of commands. Text from files and services cannot control the terminal."""

from __future__ import annotations

import re
from typing import Final

import click

# all controls but tab and line feed, and those that change the order or the lines of text
# (Unicode 15.0, section 23.2, and Unicode Standard Annex 9, table 1)
_CONTROLS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def echo(text: str | bytes, *, err: bool = False) -> None:
    """Prints text or JSON on stdout, or on stderr, without control characters."""
    click.echo(escape_controls(text.decode() if isinstance(text, bytes) else text), err=err)


def escape_controls(text: str) -> str:
    r"""Returns text with escapes, such as \u001b, for its control characters.

    Strings of JSON stay the same strings: these are escapes of JSON too.
    """
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
