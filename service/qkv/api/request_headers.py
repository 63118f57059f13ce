"""Headers of a request by name. Handlers read them with `headers_of`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.types import Scope

__all__ = ["Header", "headers_of"]

Header = tuple[bytes, bytes]
"""Name in lower case, and value."""

_KEY: Final = "qkv.headers"


def headers_of(scope: Scope) -> Mapping[bytes, bytes]:
    """Returns the headers of a request by their names in lower case.

    Joins the values of a name that comes more than once (RFC 9110, section 5.3). Starlette's
    headers search the list for each name, which takes as long as a small attention in all.
    """
    known: Mapping[bytes, bytes] | None = scope.get(_KEY)
    if known is not None:
        return known
    pairs = scope["headers"]
    headers: dict[bytes, bytes] = dict(pairs)
    if len(headers) < len(pairs):
        headers = {}
        for name, value in pairs:
            headers[name] = b"%b, %b" % (headers[name], value) if name in headers else value
    scope[_KEY] = headers
    return headers
