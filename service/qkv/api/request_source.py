"""The source of requests: refuses pages of other origins, and names of other hosts.

A browser sends a page's POST to any address, also to one of the user's own machine. A name that
resolves to this machine makes the service part of the page's origin (DNS rebinding).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from starlette.types import Scope

from qkv.errors import Forbidden

_SAFE_METHODS: Final = frozenset(("GET", "HEAD", "OPTIONS"))  # RFC 9110, section 9.2.1
_LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
_DEFAULT_PORTS: Final = {b"http": b":80", b"https": b":443"}
_ANY: Final = "*"


class SourceRules:
    """The hosts that a service serves, and the origins whose pages may send requests.

    Starlette's TrustedHostMiddleware knows neither IPv6 addresses nor networks, and its errors are
    plain text.

    Args:
        origins: the allowed origins besides the service's own; `*`: every origin.
        hosts: the served names, besides those of this machine; `*`: every name.
        bound_host: the name or address of the settings. Unless there are `hosts`, every name is
            served if this is not a loopback address, or the connection arrives at one that is not:
            the server may be told another address than the settings.
    """

    def __init__(
        self,
        origins: Iterable[str],
        hosts: Iterable[str],
        bound_host: str,
    ) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)
        names = {*hosts}
        self._serves_any_host = _ANY in names or not (
            names or _is_loopback(bound_host, of_name=True)
        )
        self._is_listed = bool(names)
        names.update(_LOOPBACK_NAMES)
        names.add(f"[{bound_host}]" if ":" in bound_host else bound_host.lower())
        self._hosts = frozenset(name.encode("latin-1", "replace") for name in names)

    def find_error(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Forbidden | None:
        """Returns the error of a request that must be refused; None if it may run."""
        host = headers.get(b"host")
        if not self._is_served(host, scope):
            return Forbidden(
                f"Host is not allowed: got {_quote(host or b'')}, expected a name of this "
                "machine or one of QKV_ALLOWED_HOSTS"
            )
        if scope["method"] in _SAFE_METHODS:
            return None
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if (origin is None and site is None) or self._is_allowed(origin, site, host):
            return None
        got = f"Sec-Fetch-Site {_quote(site or b'')}" if origin is None else _quote(origin)
        return Forbidden(
            f"Origin is not allowed: got {got}, expected the service's own or one of "
            "QKV_CORS_ORIGINS"
        )

    def _is_served(self, host: bytes | None, scope: Scope) -> bool:
        if self._serves_any_host or host is None:  # HTTP/1.0 needs no Host
            return True
        name, colon, port = host.lower().rpartition(b":")
        if not colon or (port and not port.isdigit()):
            name = host.lower()
        name = name.removesuffix(b".")
        if name in self._hosts or _is_of_this_machine(name.decode("latin-1"), scope):
            return True
        server = scope.get("server")
        return not (self._is_listed or (server is not None and _is_loopback(server[0])))

    def _is_allowed(self, origin: bytes | None, site: bytes | None, host: bytes | None) -> bool:
        """Returns True if a request comes from an allowed origin.

        Sec-Fetch-Site (W3C Fetch Metadata) is right even if a proxy has replaced Host. Browsers
        leave it out without https, except on the same machine. Other values of it are ignored.
        """
        if _ANY.encode() in self._origins or origin in self._origins:
            return True
        if origin is not None and host is not None and _is_origin_of(origin, host):
            return True
        if site in (b"cross-site", b"same-site"):
            return False
        return origin is None or site in (b"same-origin", b"none")


def _is_loopback(host: str, *, of_name: bool = False) -> bool:
    """Returns True for a loopback address, and `of_name` for a name."""
    try:
        return _address(host).is_loopback
    except ValueError:
        return of_name


def _is_of_this_machine(name: str, scope: Scope) -> bool:
    """Returns True for other loopback names, and for the local address of the connection.

    A probe or Prometheus uses the address of a pod. No page can make a name out of it.
    """
    if name.endswith(".localhost"):  # RFC 6761, section 6.3
        return True
    try:
        address = _address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    if address.is_loopback:
        return True
    server = scope.get("server")
    with suppress(ValueError):
        return server is not None and address == _address(server[0])
    return False


def _address(text: str) -> IPv4Address | IPv6Address:
    """Returns an address; of IPv4 too if it is mapped into IPv6, as ::ffff:10.0.0.5.

    A socket for both versions of IP has such addresses.

    Raises:
        ValueError: the text is no address.
    """
    address = ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def _is_origin_of(origin: bytes, host: bytes) -> bool:
    """Returns True if an origin has the name and port of a Host.

    The scheme may differ: a proxy in front of the service speaks https.
    """
    scheme, _, authority = origin.lower().partition(b"://")
    port = _DEFAULT_PORTS.get(scheme)
    return port is not None and authority.removesuffix(port) == host.lower().removesuffix(port)


def _quote(value: bytes) -> str:
    return f"{value.decode('latin-1')!r:.100}"
