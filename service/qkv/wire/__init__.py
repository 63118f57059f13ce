"""Wire formats: named tensors to bytes and back, for the service and the client.

`for_content_type` and `for_accept` choose the codec of a request and of its response.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from qkv.errors import NotAcceptable, UnsupportedMediaType
from qkv.wire import json, safetensors
from qkv.wire.message import Message

Chunk = bytes | memoryview


class Codec(Protocol):
    """The functions of a wire format's module."""

    MEDIA_TYPE: str

    def aligned_offset(self, head: bytes) -> int | None:
        """Returns the index of the byte of a body that should have an aligned address.

        None: alignment does not matter, and `decode` takes `bytes`.

        Args:
            head: the first 8 bytes of the body.
        """

    def decode(self, body: bytes | memoryview, group: str) -> Message:
        """Parses a message whose tensors are in the field `group`."""

    def encode(self, message: Message, group: str) -> list[Chunk]:
        """Encodes a message as consecutive chunks."""


CODECS: Final[Mapping[str, Codec]] = {c.MEDIA_TYPE: c for c in (json, safetensors)}


def for_content_type(header: str | None) -> Codec:
    """Returns the codec for a Content-Type; JSON if the header is absent.

    Raises:
        UnsupportedMediaType: there is no codec for it.
    """
    given = json.MEDIA_TYPE if header is None else header
    media_type = given.partition(";")[0].strip().lower()
    if (codec := CODECS.get(media_type)) is None:
        raise UnsupportedMediaType(
            f"Content-Type is not supported: got {media_type!r:.100}, "
            f"expected {' or '.join(CODECS)}"
        )
    return codec


def for_accept(header: str | None, request_codec: Codec) -> Codec:
    """Returns the codec of the response: the one that the client prefers.

    Args:
        header: Accept (RFC 9110, section 12.5.1).
        request_codec: the codec of the request, chosen if the client has no preference.

    Raises:
        NotAcceptable: the client accepts none of the codecs.
    """
    if not header:
        return request_codec
    preferences = _parse_preferences(header)
    best = max(
        (request_codec, *CODECS.values()),
        key=lambda codec: _preference(preferences, codec.MEDIA_TYPE),
    )
    if _preference(preferences, best.MEDIA_TYPE)[0] <= 0:
        raise _not_acceptable(header, *CODECS)
    return best


def require_acceptable(header: str | None, *media_types: str) -> None:
    """Checks that the client accepts a response that has only one form.

    Args:
        header: Accept.
        media_types: any of them suffices.

    Raises:
        NotAcceptable: the client accepts none of them.
    """
    if not header:
        return
    preferences = _parse_preferences(header)
    if all(_preference(preferences, media_type)[0] <= 0 for media_type in media_types):
        raise _not_acceptable(header, *media_types)


def _not_acceptable(header: str, *media_types: str) -> NotAcceptable:
    return NotAcceptable(
        f"Accept excludes every format: got {header!r:.100}, expected {' or '.join(media_types)}"
    )


_Preferences = Mapping[str, tuple[float, int]]


def _parse_preferences(header: str) -> _Preferences:
    """Returns the quality of each media range, and its rank: the first has the highest."""
    preferences: dict[str, tuple[float, int]] = {}
    for place, item in enumerate(header.split(",")):
        media_range, *parameters = (part.strip().lower() for part in item.split(";"))
        preferences.setdefault(media_range, (_quality(parameters), -place))
    return preferences


def _preference(preferences: _Preferences, media_type: str) -> tuple[float, int]:
    """Returns the preference of the most specific range; (0.0, 0) if there is none."""
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
