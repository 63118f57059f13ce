"""API keys: `ApiKeyMiddleware` rejects requests without a valid key, except on public paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import sha256
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from qkv.api.endpoints.open_inference_models import HEALTH_PATHS
from qkv.api.endpoints.playground import PATHS
from qkv.api.request_record import record
from qkv.api_keys import ValidApiKeys
from qkv.errors import Unauthorized
from qkv.jobs.tenant import Tenant

PUBLIC_PATHS: Final = frozenset(("/livez", "/readyz", *HEALTH_PATHS)) | PATHS
"""Paths that need no key: health probes, and the files of the playground, which asks the user for a
key."""


class ApiKeys:
    """The API keys of a service.

    Args:
        valid: those that were read.
        on_name: called with the name of each key that was read.
    """

    def __init__(
        self, valid: ValidApiKeys, on_name: Callable[[str], object] = lambda _: None
    ) -> None:
        self._valid, self._on_name = valid, on_name
        self._tenants = self._find_tenants()

    def reload(self) -> None:
        """Reads the keys again; keeps those that it has if that fails."""
        with suppress(ValueError):  # the supervisor has logged it
            self._valid.reload()
            self._tenants = self._find_tenants()

    def _find_tenants(self) -> dict[bytes, Tenant]:
        tenants = {}
        for name, key, weight in self._valid.keys:
            self._on_name(name)
            tenants[sha256(key.encode()).digest()] = Tenant(name, weight)
        return tenants

    def find(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant | None:
        """Returns the tenant of the key in the headers (RFC 6750, section 2.1); None: it has none.

        The time it takes tells nothing of a key: it depends on the digest of the one sent.

        Args:
            headers: names in lower case.
        """
        authorizations = [value for name, value in headers if name == b"authorization"]
        if len(authorizations) != 1:
            return None
        scheme, _, sent = authorizations[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        return self._tenants.get(sha256(sent.strip(b" ")).digest())


class ApiKeyMiddleware:
    """A middleware that rejects requests without a valid key, before their body is read.

    Args:
        app: the application to protect.
        api_keys: the valid keys.

    Raises:
        Unauthorized: a request has none of them.
    """

    def __init__(self, app: ASGIApp, api_keys: ApiKeys) -> None:
        self._app, self._api_keys = app, api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            tenant = self._api_keys.find(scope["headers"])
            if tenant is not None:
                record().tenant = tenant
            elif scope["path"] not in PUBLIC_PATHS:
                raise Unauthorized
        await self._app(scope, receive, send)
