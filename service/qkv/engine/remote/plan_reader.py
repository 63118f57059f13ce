"""Reads the plans that workers send with their jobs."""

from __future__ import annotations

from typing import Final

from qkv.jobs import plan_codec
from qkv.jobs.loaded.loaded_layers import NO_LAYERS, LoadedLayers
from qkv.jobs.plan import Plan
from qkv.jobs.plan_cache import BoundedCache, plan_bytes

__all__ = ["PlanReader"]

_MAX_PLANS: Final = 4096
_MAX_BYTES: Final = 64 << 20  # of plans
_OBJECT_FACTOR: Final = 12  # a row number takes 3 bytes encoded, and 36 in a tuple


class PlanReader:
    """The plans of the jobs of all workers: reads them, and keeps those that were used last.

    Args:
        layers: that plans may name.
    """

    def __init__(self, layers: LoadedLayers = NO_LAYERS) -> None:
        self._layers = layers
        self._plans: BoundedCache[Plan] = BoundedCache(_MAX_PLANS, _MAX_BYTES)

    @property
    def held_bytes(self) -> int:
        """Bytes that the plans hold."""
        return self._plans.held_bytes

    def read(self, encoded: bytes) -> Plan:
        """Returns the plan of these bytes, which its worker has validated.

        Args:
            encoded: as `plan_codec.encode` returns it.
        """
        if (plan := self._plans.get(encoded)) is None:
            plan = plan_codec.decode(encoded, self._layers)
            held_bytes = plan_bytes(encoded) + _OBJECT_FACTOR * len(encoded)
            self._plans.put(encoded, plan, held_bytes)
        return plan
