"""`Tenant`: whose work a job is."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["ANYONE", "Tenant"]


class Tenant(NamedTuple):
    """The sender of requests: the name of an API key, and its weight.

    Attributes:
        name: of the key; empty: the service has no keys.
        weight: its part of the service, relative to those of the other tenants.
    """

    name: str
    weight: float = 1.0


ANYONE: Final = Tenant("")
"""The tenant of all requests to a service without keys, and of its own jobs."""
