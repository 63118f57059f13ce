"""The metrics of a replica as metrics of Ray: Prometheus finds them by Ray's service discovery."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from ray.serve.metrics import Gauge

from qkv.telemetry.collector import ServiceCollector

_INTERVAL_S: Final = 5.0  # Ray itself exports every 10 s


class ReplicaMetrics:
    """Gauges of Ray, copied from every sample of GET /metrics.

    Ray adds the prefix `ray_`, and labels for application, deployment and replica. Counters and the
    buckets of histograms are gauges there: Ray's own classes cannot take over their values.
    `rate` and `histogram_quantile` of Prometheus work on them.

    Args:
        collector: of the metrics of the replica.
    """

    def __init__(self, collector: ServiceCollector) -> None:
        self._collector = collector
        self._gauges: dict[str, Any] = {}

    async def run(self) -> None:
        """Copies the samples again and again, until it is cancelled."""
        while True:
            await asyncio.to_thread(self.copy)  # hundreds of samples
            await asyncio.sleep(_INTERVAL_S)

    def copy(self) -> None:
        """Copies all samples once."""
        for sample in (s for family in self._collector.collect() for s in family.samples):
            if sample.name not in self._gauges:
                self._gauges[sample.name] = Gauge(sample.name, tag_keys=tuple(sample.labels))
            self._gauges[sample.name].set(sample.value, tags=sample.labels)
