"""API keys, with names and weights, as settings and a file give them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

MAX_KEYS: Final = 1024
"""The largest number of keys of a service."""
LEAST_LENGTH: Final = 16
"""The least number of characters of a key: a guess must be hopeless, and a part of a key no key."""
_WEIGHT: Final = r"[0-9]{1,6}(\.[0-9]{1,6})?"
_ENTRY: Final = re.compile(
    r"((?P<name>[A-Za-z0-9._-]{1,64}):)?"
    r"(?P<key>[A-Za-z0-9._~+/-]+=*)"  # token68 of RFC 9110, section 11.2
    rf"(?(name):(?P<weight>{_WEIGHT})|(?!))?"
)
_MAX_FILE_BYTES: Final = 1 << 20
_EXPECTED: Final = (
    "expected KEY, NAME:KEY or NAME:KEY:WEIGHT; a key has letters, digits and ._~+/-, and may end "
    "in =; a name has at most 64 letters, digits and ._-; a weight is a number above 0"
)


class ApiKey(NamedTuple):
    """A key that clients send.

    Attributes:
        name: in the log, in metrics and in traces.
        key: the secret.
        weight: its share of a busy service, relative to those of the other keys.
    """

    name: str
    key: str
    weight: float


class ValidApiKeys:
    """The keys that were last read without an error.

    Args:
        read: reads them.

    Attributes:
        keys: those that clients may send.

    Raises:
        ValueError: from `read`.
    """

    def __init__(self, read: Callable[[], list[ApiKey]]) -> None:
        self._read = read
        self.keys = read()

    def reload(self) -> None:
        """Reads the keys again.

        Raises:
            ValueError: from `read`; the keys stay as they were.
        """
        self.keys = self._read()


def parse_api_keys(text: str) -> list[ApiKey]:
    """Returns the keys of a text with commas between them; a key without a name is key1, key2, and
    so on, by its place.

    Raises:
        ValueError: an entry is invalid, or two have one name or key; the message has no key.
    """
    return _named([entry.strip() for entry in text.split(",")])


def read_api_keys(path: Path) -> list[ApiKey]:
    """Returns the keys of a file with one on each line, as for `parse_api_keys`.

    Ignores empty lines, and those that begin with #. The last line has an end too: without one, the
    file may be cut short, as while it is written.

    Raises:
        ValueError: the file cannot be read, is too large or cut short, has no key, or is invalid.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if len(text) > _MAX_FILE_BYTES:
        raise ValueError(f"{path} is larger than {_MAX_FILE_BYTES} bytes")
    if text and not text.endswith("\n"):
        raise ValueError(f"{path} has no end of line behind its last entry: it may be cut short")
    lines = [line.strip() for line in text.splitlines()]
    entries = [line for line in lines if line and not line.startswith("#")]
    if not entries:
        raise ValueError(f"{path} has no key")
    try:
        return _named(entries)
    except ValueError as error:
        raise ValueError(f"{path} is invalid: {error}") from None


def _named(entries: list[str]) -> list[ApiKey]:
    if len(entries) > MAX_KEYS:
        raise ValueError(f"there are too many keys: got {len(entries)}, expected {MAX_KEYS}")
    keys = []
    for place, entry in enumerate(entries, start=1):
        match = _ENTRY.fullmatch(entry)
        weight = float(match["weight"] or 1) if match else 0.0
        if match is None or not weight:
            raise ValueError(f"entry {place} is invalid: {_EXPECTED}")
        if match["name"] and re.fullmatch(_WEIGHT, match["key"]):  # KEY:WEIGHT would log the key
            raise ValueError(f"entry {place} has no name, or a key like a weight: {_EXPECTED}")
        if (length := len(match["key"].rstrip("="))) < LEAST_LENGTH:
            raise ValueError(
                f"entry {place} has a key that is too short: got {length} characters, expected at "
                f"least {LEAST_LENGTH}, as openssl rand -hex 32 writes them"
            )
        keys.append(ApiKey(match["name"] or f"key{place}", match["key"], weight))
    for field in ("name", "key"):
        value, count = Counter(getattr(key, field) for key in keys).most_common(1)[0]
        if count > 1:
            which = f" {value}" if field == "name" else ""
            raise ValueError(f"{count} entries have the same {field}{which}")
    return keys
