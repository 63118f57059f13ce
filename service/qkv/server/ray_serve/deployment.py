"""The deployment of Ray Serve: each replica is the service in one process, with its own engine.

`serve run qkv.server.ray_serve:app threads=2` starts one; `deploy/ray/` has configuration files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import pydantic
from ray import serve
from ray.serve._private import constants
from ray.serve.config import AutoscalingPolicy, BackpressureConfig, RequestRouterConfig

from qkv.server.ray_serve.autoscaling_policy import QueuedWorkPolicy
from qkv.server.ray_serve.request_router import FlopsRouter
from qkv.settings import Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_BATCHES: Final = 4  # one runs, the others arrive or wait
_BATCH: Final = 64  # largest batch on a GPU
_NOT_UNDER_RAY: Final = {
    "host": "http_options of the configuration",
    "port": "http_options of the configuration",
    "metrics_port": "the metrics of Ray",
    "workers": "num_replicas or autoscaling_config of the deployment",
    "device_process": "num_replicas or autoscaling_config of the deployment",
    "devices": "num_replicas or autoscaling_config of the deployment",
    "drain_s": "graceful_shutdown_timeout_s of the deployment",
    "write_timeout_s": "the proxy's own timeouts",
}
"""Settings of the processes of `qkv serve`, and what has their place."""


class _Replica:
    """One replica: the application of `create_app`, in a process of Ray.

    Args:
        **settings: as in `qkv.settings.Settings`. Variables QKV_... of the replica give the others.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns the application. Ray calls it in the replica: the application does not pickle."""
        # connections come from Ray's proxy, at an address that is not the service's
        settings = read_settings(self._settings).model_copy(update={"host": "0.0.0.0"})

        # imported only now, because that takes seconds
        from qkv.api.app import create_app
        from qkv.server.ray_serve.replica_app import ReplicaApp
        from qkv.server.ray_serve.replica_metrics import ReplicaMetrics
        from qkv.telemetry.collector import ServiceCollector

        built = create_app(settings)
        self._runtime = built.state.runtime
        state, device = self._runtime.worker.shared_state, self._runtime.engine.device_name
        metrics = ReplicaMetrics(ServiceCollector(state, device))
        self._export = asyncio.create_task(metrics.run())  # ends with the event loop
        return ReplicaApp(built)

    def check_health(self) -> None:
        """Fails where GET /livez would be 503. Ray then replaces the replica.

        Raises:
            RuntimeError: only a new process can run jobs.
        """
        engine, worker = self._runtime.engine, self._runtime.worker
        if not engine.is_alive or engine.failed.is_set():
            raise RuntimeError("the device has failed")
        if worker.shared_state.stuck_processes:
            raise RuntimeError("the device is stuck in one batch")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the operations of the jobs that are queued or run, and the rate if it is known.

        `QueuedWorkPolicy` reads them. Ray calls this method every few seconds.
        """
        engine = self._runtime.engine
        stats = {"queued_flops": float(engine.unfinished_flops)}
        if (rate := engine.flops_per_s) is not None:
            stats["flops_per_s"] = rate
        return stats


Replica: Any = serve.deployment(
    name="qkv",
    max_ongoing_requests=_BATCHES * _BATCH,  # Ray's default of 5 would keep batches at 5
    max_queued_requests=1024,  # for each proxy; Ray's default is no limit
    backpressure_config=BackpressureConfig(status_code=503, retry_after_s=1),
    graceful_shutdown_timeout_s=60,  # longer than the longest run; Ray's default is 20
    health_check_period_s=5,
    health_check_timeout_s=30,  # as QKV_STUCK_S
    autoscaling_config={
        "min_replicas": 1,
        "max_replicas": 8,
        "target_ongoing_requests": _BATCH,  # Ray's default is 2
        "upscale_delay_s": 5,
        "downscale_delay_s": 120,
        "policy": AutoscalingPolicy(policy_function=QueuedWorkPolicy),
    },
    request_router_config=RequestRouterConfig(request_router_class=FlopsRouter),
)(serve.ingress()(_Replica))
"""The deployment, with what Ray's defaults get wrong for batches of requests of any cost."""


def app(arguments: dict[str, Any]) -> serve.Application:
    """Returns the application for `serve run` and for configuration files.

    A replica reserves `threads` CPUs, and a GPU if `device` is cuda. With HAProxy, which chooses
    the replica itself, the deployment has no router of its own: Ray rejects it.

    Args:
        arguments: settings of the replicas by name, such as {"threads": 2}.

    Raises:
        ValueError: an argument is not a setting of a replica, or its value is wrong.
    """
    settings = read_settings(arguments)
    resources = {"num_cpus": settings.threads, "num_gpus": int(settings.device == "cuda")}
    replica = Replica
    if constants.RAY_SERVE_ENABLE_HA_PROXY:  # as Ray itself has read the variable
        replica = Replica.options(request_router_config=RequestRouterConfig())
    return replica.options(ray_actor_options=resources).bind(**arguments)


def read_settings(arguments: Mapping[str, Any]) -> Settings:
    """Returns the settings of a replica.

    Raises:
        ValueError: an argument is not a setting of a replica, or its value is wrong.
    """
    for name, instead in _NOT_UNDER_RAY.items():
        if name in arguments:
            raise ValueError(
                f"setting {name} has no effect under Ray Serve: "
                f"got {arguments[name]!r:.60}, expected {instead}"
            )
    try:
        return Settings(**arguments)
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0])
        # the message must not show keys
        value = "a list of keys" if name == "api_keys" else f"{problem['input']!r:.60}"
        raise ValueError(f"setting {name} is wrong: got {value}: {problem['msg']}") from None
