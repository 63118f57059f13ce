"""Who is let in: callers with one of the service's keys, and everyone to a few public paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hmac import compare_digest
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from qkv.api.endpoints.oip_models import PUBLIC
from qkv.api.endpoints.playground import PATHS
from qkv.errors import QkvError, Unauthorized

__all__ = ["OPEN", "Guard", "Keys"]

OPEN: Final = frozenset(("/livez", "/readyz", *PUBLIC)) | PATHS
"""The paths that need no key: probes, which say yes or no, and the playground's own files, which
hold nothing of anybody's; the page asks for a key for what it calls."""


class Keys:
    """The keys that a service was given."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def admit(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether headers, names in lower case, hold one of the keys, in the form of RFC 6750,
        section 2.1. How long it takes tells nothing of what any key is."""
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        key = key.strip(b" ")
        found = [compare_digest(key, known) for known in self._keys]  # all, whichever it is
        return scheme.lower() == b"bearer" and True in found


class Guard:
    """Refuses whoever has no key, before anything of the body is read; pure ASGI.

    Args:
        app: what is guarded.
        keys: who has one of them is let in.
        refusal: what answers an error below a path.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, refusal: Callable[[QkvError, str], Response]
    ) -> None:
        self._app, self._keys, self._refusal = app, keys, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        is_open = scope["type"] != "http" or scope["path"] in OPEN
        if not is_open and not self._keys.admit(scope["headers"]):
            app = self._refusal(Unauthorized(), scope["path"])
        return await app(scope, receive, send)
