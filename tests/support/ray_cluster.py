"""Ray on this machine, with deployments behind its HTTP proxy, for tests and benchmarks."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

os.environ |= {
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}

import ray
from ray import serve
from ray.serve.schema import LoggingConfig

from support.paths import ROOT
from support.ports import free_port

_CPUS: Final = 4  # as Ray counts them: every replica reserves one
_OBJECT_STORE_BYTES: Final = 100 << 20
_MARK: Final = "RAY_CLUSTER_MARK"
_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class RayCluster:
    """A running Ray.

    Attributes:
        address: host and port of the HTTP proxy.
        metrics_port: port at which Prometheus would find the metrics of this machine.
        dashboard_port: port of the dashboard, if it runs.
        folder: of sessions and logs; a short path, because it has sockets.
        mark: an environment variable that all processes of this Ray have.
    """

    address: tuple[str, int]
    metrics_port: int
    dashboard_port: int
    folder: Path
    mark: str

    @property
    def url(self) -> str:
        """URL of the proxy."""
        return "http://{}:{}".format(*self.address)

    @property
    def dashboard_url(self) -> str:
        """URL of the dashboard, if it runs."""
        return f"http://127.0.0.1:{self.dashboard_port}"

    @property
    def processes(self) -> list[int]:
        """The processes of this Ray, without the one that started it."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:  # it has ended, or belongs to another user
                continue
        return found

    def run(
        self,
        deployment: Any,
        replicas: int | dict[str, Any],
        name: str = "default",
        route: str | None = "/",
        **arguments: Any,
    ) -> None:
        """Runs a deployment with this number of replicas, or changes the number.

        Returns once the replicas run.

        Args:
            deployment: the deployment.
            replicas: number of its replicas, or options of Ray's autoscaler.
            name: of the application. The proxy keeps the request router of a name for good.
            route: prefix of the paths that the proxy sends to it; None: it sends nothing.
            **arguments: of the deployment's class.

        Raises:
            RuntimeError: no replica can start; the message has the reason.
        """
        number, scaling = (replicas, None) if isinstance(replicas, int) else (None, replicas)
        sized = deployment.options(
            num_replicas=number, autoscaling_config=scaling, ray_actor_options={"num_cpus": 1}
        )
        try:
            serve.run(sized.bind(**arguments), name=name, route_prefix=route)
        except RuntimeError as error:
            (state,) = serve.status().applications[name].deployments.values()
            raise RuntimeError(state.message) from error


@contextmanager
def running_ray(dashboard: bool = False) -> Iterator[RayCluster]:
    """Runs Ray and the HTTP proxy of Ray Serve; at the end no process of it is left.

    Args:
        dashboard: also run the dashboard, for `serve deploy` and Prometheus. It has a dozen
            processes and starts in five seconds.
    """
    folder = Path(tempfile.mkdtemp(prefix="qkv-ray-"))
    port, metrics_port, dashboard_port = free_port(), free_port(), free_port()
    mark = uuid.uuid4().hex
    cluster = RayCluster(
        ("127.0.0.1", port), metrics_port, dashboard_port, folder, f"{_MARK}={mark}"
    )
    try:
        with _environment(mark):
            ray.init(
                num_cpus=_CPUS,
                include_dashboard=dashboard,
                dashboard_port=dashboard_port,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level="error",
                _temp_dir=str(folder),
                _metrics_export_port=metrics_port,
                _system_config={"metrics_report_interval_ms": 1000},
            )
            quiet = LoggingConfig(enable_access_log=False, log_level="WARNING")
            serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=quiet)
        yield cluster
    finally:
        serve.shutdown()
        ray.shutdown()
        end = time.monotonic() + _TIMEOUT_S
        while (left := cluster.processes) and time.monotonic() < end:
            time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"processes of Ray are left: {left}"


@contextmanager
def _environment(mark: str) -> Iterator[None]:
    """Sets the variables of Ray's processes; others that start later do not inherit them."""
    before = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(ROOT / "bench"), str(ROOT / "tests"), before or ""])
    os.environ |= {_MARK: mark, "PYTHONPATH": paths}
    try:
        yield
    finally:
        del os.environ[_MARK], os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
