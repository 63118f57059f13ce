"""The metrics of a replica as metrics of Ray: Prometheus finds them by Ray's service discovery."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final

from ray.serve.metrics import Gauge

from qkv.api.endpoints.metrics import exposition
from qkv.telemetry.worker_state import SharedState

__all__ = ["ReplicaMetrics"]

_INTERVAL_S: Final = 5.0  # Ray itself exports every 10 s
_SAMPLE: Final = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')


class ReplicaMetrics:
    """Gauges of Ray, copied from every sample of GET /metrics.

    Ray adds the prefix `ray_`, and labels for application, deployment and replica. Counters and the
    buckets of histograms are gauges there: Ray's own classes cannot take over their values.
    `rate` and `histogram_quantile` of Prometheus work on them.

    Args:
        shared_state: state of the replica.
        device: as GET /metrics gives it.
    """

    def __init__(self, shared_state: SharedState, device: str) -> None:
        self._shared_state, self._device = shared_state, device
        self._gauges: dict[str, Any] = {}

    async def run(self) -> None:
        """Copies the samples again and again, until it is cancelled."""
        while True:
            await asyncio.to_thread(self.copy)  # hundreds of samples
            await asyncio.sleep(_INTERVAL_S)

    def copy(self) -> None:
        """Copies all samples once."""
        for line in exposition(self._shared_state, self._device).splitlines():
            if (match := _SAMPLE.fullmatch(line)) is None:  # a comment
                continue
            name, labels = match[1], dict(_LABEL.findall(match[2] or ""))
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, tag_keys=tuple(labels))
            self._gauges[name].set(float(match[3]), tags=labels)
