"""API keys: `ApiKeyMiddleware` rejects requests without a valid key, except on public paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hmac import compare_digest
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from qkv.api.endpoints.open_inference_models import HEALTH_PATHS
from qkv.api.endpoints.playground import PATHS
from qkv.errors import QkvError, Unauthorized

__all__ = ["PUBLIC_PATHS", "ApiKeyMiddleware", "ApiKeys"]

PUBLIC_PATHS: Final = frozenset(("/livez", "/readyz", *HEALTH_PATHS)) | PATHS
"""Paths that need no key: health probes, and the files of the playground, which asks the user for a
key."""


class ApiKeys:
    """The API keys of a service."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def match(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Returns True if the headers have one of the keys (RFC 6750, section 2.1).

        Takes the same time for any key, valid or not.

        Args:
            headers: names in lower case.
        """
        authorizations = [value for name, value in headers if name == b"authorization"]
        if len(authorizations) != 1:
            return False
        scheme, _, key = authorizations[0].partition(b" ")
        key = key.strip(b" ")
        matches = [
            compare_digest(key, known) for known in self._keys
        ]  # no early exit: constant time
        return scheme.lower() == b"bearer" and True in matches


class ApiKeyMiddleware:
    """Rejects requests without a valid key, before their body is read.

    Args:
        app: the application to protect.
        api_keys: the valid keys.
        error_response: returns the response for an error at a path.
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
