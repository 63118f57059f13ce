"""API keys: requests without one are rejected, except on a few public paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hmac import compare_digest
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from qkv.api.endpoints.oip_models import HEALTH_PATHS
from qkv.api.endpoints.playground import PATHS
from qkv.errors import QkvError, Unauthorized

__all__ = ["PUBLIC_PATHS", "ApiKeyMiddleware", "ApiKeys"]

PUBLIC_PATHS: Final = frozenset(("/livez", "/readyz", *HEALTH_PATHS)) | PATHS
"""Paths that need no key: health probes, and the playground's own files; the page asks its user for
a key for the requests it sends."""


class ApiKeys:
    """The API keys of a service."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def match(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Returns whether the headers have one of the keys, as RFC 6750, section 2.1 has it.

        Takes the same time whichever key matches, or none.

        Args:
            headers: names in lower case.
        """
        authorizations = [value for name, value in headers if name == b"authorization"]
        if len(authorizations) != 1:
            return False
        scheme, _, key = authorizations[0].partition(b" ")
        key = key.strip(b" ")
        matches = [compare_digest(key, known) for known in self._keys]  # all: constant time
        return scheme.lower() == b"bearer" and True in matches


class ApiKeyMiddleware:
    """Rejects requests without a key, before their body is read.

    Args:
        app: that needs a key.
        api_keys: of which a request must have one.
        error_response: makes the response for an error at a path.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: ApiKeys,
        error_response: Callable[[QkvError, str], Response],
    ) -> None:
        self._app, self._api_keys, self._error_response = app, api_keys, error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        is_public = scope["type"] != "http" or scope["path"] in PUBLIC_PATHS
        if not is_public and not self._api_keys.match(scope["headers"]):
            app = self._error_response(Unauthorized(), scope["path"])
        return await app(scope, receive, send)
