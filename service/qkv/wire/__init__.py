"""Wire formats: bytes to named raw tensors and back. Used by the server and the client alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from qkv.errors import NotAcceptable, UnsupportedMediaType
from qkv.wire import json, safetensors
from qkv.wire.message import Message

__all__ = ["CODECS", "Codec", "for_accept", "for_content_type", "require_acceptable"]

Chunk = bytes | memoryview


class Codec(Protocol):
    """The functions of a wire format's module."""

    MEDIA_TYPE: str

    def aligned_offset(self, head: bytes) -> int | None:
        """Which byte of a body should lie at an aligned address, seen from its first 8; None
        where it does not matter and `bytes` are wanted."""

    def decode(self, body: bytes | memoryview, group: str) -> Message:
        """Reads a message whose tensors stand under `group`."""

    def encode(self, message: Message, group: str) -> list[Chunk]:
        """Writes a message, in chunks that are to follow each other."""


CODECS: Final[Mapping[str, Codec]] = {c.MEDIA_TYPE: c for c in (json, safetensors)}


def for_content_type(header: str | None) -> Codec:
    """The codec a body came in; JSON where nothing is said.

    Raises:
        UnsupportedMediaType: there is none for it.
    """
    given = json.MEDIA_TYPE if header is None else header
    media_type = given.partition(";")[0].strip().lower()
    if (codec := CODECS.get(media_type)) is None:
        raise UnsupportedMediaType(
            f"Content-Type {media_type!r:.100} is not read here; send {' or '.join(CODECS)}"
        )
    return codec


def for_accept(header: str | None, came: Codec) -> Codec:
    """The codec an answer goes out in: what the caller likes best, or as the request came.

    Args:
        header: Accept, as RFC 9110, section 12.5.1, defines it.
        came: the request's codec, taken where the caller has no preference.

    Raises:
        NotAcceptable: nothing that is spoken here is accepted.
    """
    if not header:
        return came
    preferences = _parse_preferences(header)
    best = max(
        (came, *CODECS.values()), key=lambda codec: _preference(preferences, codec.MEDIA_TYPE)
    )
    if _preference(preferences, best.MEDIA_TYPE)[0] <= 0:
        raise NotAcceptable(f"Accept {header!r:.100} has none of {', '.join(CODECS)}")
    return best


def require_acceptable(header: str | None, *media_types: str) -> None:
    """Has an answer that comes in but one form be welcome, by any of its names.

    Raises:
        NotAcceptable: Accept takes none of them.
    """
    if not header:
        return
    preferences = _parse_preferences(header)
    if all(_preference(preferences, media_type)[0] <= 0 for media_type in media_types):
        raise NotAcceptable(f"Accept {header!r:.100} has no {' or '.join(media_types)}")


_Preferences = Mapping[str, tuple[float, int]]


def _parse_preferences(header: str) -> _Preferences:
    """How much each range is liked, and, less the further back it stands, how early."""
    preferences: dict[str, tuple[float, int]] = {}
    for place, item in enumerate(header.split(",")):
        media_range, *parameters = (part.strip().lower() for part in item.split(";"))
        preferences.setdefault(media_range, (_quality(parameters), -place))
    return preferences


def _preference(preferences: _Preferences, media_type: str) -> tuple[float, int]:
    """That of the most specific range; among equals, what was named first."""
    ranges = (media_type, f"{media_type.partition('/')[0]}/*", "*/*")
    return next((preferences[r] for r in ranges if r in preferences), (0.0, 0))


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
