"""Variables that Kubernetes adds to every container of a namespace: service links.

A Service named `qkv` or `qkv-workers` gives them names that begin with `QKV_`. One of them,
`QKV_PORT`, is also the name of a setting.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Final

__all__ = ["is_service_link"]

# {SERVICE} is the name of a Service, qkv or qkv-..., in capitals and with _ in place of -.
_PARTS: Final = {
    "SERVICE": r"QKV(?:_[A-Z0-9_]*[A-Z0-9])?",
    "NAME": r"[A-Z0-9_]*[A-Z0-9]",
    "PORT": r"(?P<port>[1-9][0-9]{0,4})",
    "PROTOCOL": r"(?P<protocol>TCP|UDP|SCTP)",
    "protocol": r"(?P<protocol>tcp|udp|sctp)",
    "IP": r"(?P<ip>[0-9a-f.:]+)",
    "HOST": r"(?:(?P<v4>[0-9.]+)|\[(?P<v6>[0-9a-f.:]+)\])",
}
# Names and values as Kubernetes' pkg/kubelet/envvars/envvars.go writes them. Its documentation has
# them on the page "Service", section "Environment variables".
_FORMS: Final = tuple(
    (re.compile(name.format_map(_PARTS)), re.compile(value.format_map(_PARTS)))
    for name, value in (
        ("{SERVICE}_SERVICE_HOST", "{IP}"),
        ("{SERVICE}_SERVICE_PORT", "{PORT}"),
        ("{SERVICE}_SERVICE_PORT_{NAME}", "{PORT}"),
        ("{SERVICE}_PORT", "{protocol}://{HOST}:{PORT}"),
        ("{SERVICE}_PORT_{PORT}_{PROTOCOL}", "{protocol}://{HOST}:{PORT}"),
        ("{SERVICE}_PORT_{PORT}_{PROTOCOL}_PROTO", "{protocol}"),
        ("{SERVICE}_PORT_{PORT}_{PROTOCOL}_PORT", "{PORT}"),
        ("{SERVICE}_PORT_{PORT}_{PROTOCOL}_ADDR", "{IP}"),
    )
)


def is_service_link(name: str, value: str) -> bool:
    """Returns True if a variable has the name and the value of a service link."""
    for name_form, value_form in _FORMS:
        if (named := name_form.fullmatch(name)) and (valued := value_form.fullmatch(value)):
            parts = valued.groupdict()
            # a port or protocol in the name is also that of the value
            stated = {part: text.lower() for part, text in named.groupdict().items()}
            if _are_valid(parts) and all(parts.get(p, text) == text for p, text in stated.items()):
                return True
    return False


def _are_valid(parts: dict[str, str | None]) -> bool:
    """Returns True if the port and the address of a value are valid."""
    return int(parts.get("port") or 1) < 1 << 16 and all(
        _is_address(text, versions)
        for part, versions in (("ip", (4, 6)), ("v4", (4,)), ("v6", (6,)))
        if (text := parts.get(part)) is not None
    )


def _is_address(text: str, versions: tuple[int, ...]) -> bool:
    """Returns True if a text is an IP address of one of these versions."""
    try:
        return ip_address(text).version in versions
    except ValueError:
        return False
