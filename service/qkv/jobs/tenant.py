"""`Tenant`: whose work a job is."""

from __future__ import annotations

from typing import Final, Self


class Tenant(str):
    """The sender of requests: the name of an API key, with its weight.

    Tenants of one name are equal: a key whose weight has changed is still the same sender.

    Args:
        name: of the key; empty: the service has no keys.
        weight: its part of the service, relative to those of the other tenants.
    """

    __slots__ = ("weight",)
    weight: float

    def __new__(cls, name: str, weight: float = 1.0) -> Self:
        """Returns a tenant."""
        tenant = super().__new__(cls, name)
        tenant.weight = weight
        return tenant

    @property
    def name(self) -> str:
        """The name of the key."""
        return str(self)


ANYONE: Final = Tenant("")
"""The tenant of all requests to a service without keys, and of its own jobs."""
