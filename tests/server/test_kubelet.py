"""A rolling update under load, with the probes and times of the manifests of deploy/k8s.

No request is lost or refused. A request on a kept connection may find it closed.
"""

from __future__ import annotations

import random

import pytest

from support.cluster_load import KINDS, Seen, load
from support.kubelet import running_cluster
from support.processes import wait_until

OVERLAY = "k8s/overlays/cpu"


def roll(updates: int, seed: int) -> tuple[Seen, list[str]]:
    """Replaces two pods under load, several times; returns what clients and the kubelet saw."""
    draw = random.Random(seed)
    with running_cluster(OVERLAY, QKV_DEVICE="cpu", QKV_WORKERS="2") as cluster:
        cluster.start(2)
        with load(cluster.endpoints, cluster.longest_delay_s, seed) as seen:
            for _ in range(updates):
                cluster.replace(draw)
            before = seen.counts.copy()
            wait_until(lambda: all(seen.counts[kind] > before[kind] for kind in KINDS))
        return seen, cluster.faults


@pytest.mark.process
@pytest.mark.slow
def test_rolling_update_loses_and_refuses_no_request() -> None:
    seen, faults = roll(updates=1, seed=0)
    assert seen.faults == []
    assert faults == []
    assert all(seen.counts[kind] > 10 for kind in KINDS), seen.counts
    assert seen.counts["last"] > 0
