"""Tests of the autoscaling policy in Ray's own autoscaler, without a cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import (
    RUNNING_REQUESTS_KEY,
    DeploymentHandleSource,
    DeploymentID,
    HandleMetricReport,
    ReplicaID,
    ReplicaMetricReport,
    TimeStampedValue,
)
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext
from ruamel.yaml import YAML

from qkv.server.ray_serve import Replica
from qkv.server.ray_serve.autoscaling_policy import QueuedWorkPolicy, work_seconds

DEPLOY: Final = Path(__file__).parents[3] / "deploy" / "ray"
DEPLOYMENT: Final = DeploymentID("qkv", "default")
RATE: Final = 1e10  # operations per second


class Autoscaler:
    """Ray's autoscaler of the deployment, with reports of replicas and of a proxy.

    Args:
        flops: operations that each replica has to do; None: it has not reported.
        running: requests in the replicas.
        waiting: requests in the proxy.
        rates: operations per second that replicas have reported.
        options: of `AutoscalingConfig`, beside those of the deployment.
    """

    def __init__(
        self,
        *flops: float | None,
        running: float = 1,
        waiting: float = 0,
        rates: Mapping[int, float] | None = None,
        **options: Any,
    ) -> None:
        delays = {"upscale_delay_s": 0, "downscale_delay_s": 0}
        # Ray has no public way to read it
        scaling = Replica._deployment_config.autoscaling_config.model_dump(exclude={"policy"})
        policy = options.pop("policy", {"policy_function": QueuedWorkPolicy})
        self.config = AutoscalingConfig(**scaling | delays | options | {"policy": policy})
        deployed = DeploymentConfig(autoscaling_config=self.config)
        self._state = DeploymentAutoscalingState(DEPLOYMENT)
        self._state.register(DeploymentInfo(deployed, SimpleNamespace(), 0, ""), len(flops))
        self._now = time.time()
        self._replicas = [ReplicaID(str(index), DEPLOYMENT) for index in range(len(flops))]
        self._state.update_running_replica_ids(self._replicas)
        rates = dict.fromkeys(range(len(flops)), RATE) if rates is None else rates
        for index, work in enumerate(flops):
            if work is not None:
                self._report_replica(index, work, rates.get(index))
        self._report_proxy(running, waiting)

    def _report_replica(self, index: int, flops: float, rate: float | None) -> None:
        series = {"queued_flops": self._series(flops)}
        if rate is not None:
            series["flops_per_s"] = self._series(rate)
        report = ReplicaMetricReport(
            replica_id=self._replicas[index], timestamp=self._now, metrics=series
        )
        self._state.record_request_metrics_for_replica(report)

    def _report_proxy(self, running: float, waiting: float) -> None:
        each = self._series(running / len(self._replicas))
        report = HandleMetricReport(
            DEPLOYMENT,
            handle_id="proxy",
            actor_id="proxy",
            handle_source=DeploymentHandleSource.PROXY,
            queued_requests=self._series(waiting),
            metrics={RUNNING_REQUESTS_KEY: {r.to_full_id_str(): each for r in self._replicas}},
            timestamp=self._now,
        )
        self._state.record_request_metrics_for_handle(report)

    def _series(self, value: float) -> list[TimeStampedValue]:
        return [TimeStampedValue(self._now - age, value) for age in (10, 5, 0)]

    def context(self) -> AutoscalingContext:
        """Returns the argument of the policy."""
        return self._state.get_autoscaling_context(len(self._replicas))

    def decide(self) -> int:
        """Returns the number of replicas that Ray will run next."""
        number: int = self._state.get_decision_num_replicas(len(self._replicas))
        return number


@pytest.mark.parametrize(
    ("seconds", "requests", "expected"),
    [
        (0, 0, 1),  # idle
        (4.9, 3, 1),
        (5.1, 3, 2),
        (20.1, 7, 5),
        (20.1, 3, 3),  # a request runs on one replica
        (1000, 1, 1),
        (0, 130, 3),  # of small requests: Ray's own count
        (12, 250, 4),
        (1000, 500, 8),  # bounded
    ],
)
def test_number_of_replicas_follows_the_larger_of_work_and_requests(
    seconds: float, requests: int, expected: int
) -> None:
    assert Autoscaler(seconds * RATE, running=requests).decide() == expected


def test_replicas_that_are_not_needed_are_removed_to_the_minimum() -> None:
    busy = [10 * RATE] * 4
    assert Autoscaler(*busy, running=30).decide() == 8
    assert Autoscaler(*[4.9 * RATE] * 4, running=30).decide() == 4
    assert Autoscaler(*[1 * RATE] * 4, running=30).decide() == 1
    assert Autoscaler(*[0] * 4, running=0).decide() == 1
    assert Autoscaler(*[0] * 4, running=0, min_replicas=2).decide() == 2
    assert Autoscaler(*[0] * 4, running=0, min_replicas=0).decide() == 1  # Ray: never 4 -> 0
    assert Autoscaler(0, running=0, min_replicas=0).decide() == 0


def test_fast_and_slow_replicas_have_the_same_target_in_seconds() -> None:
    work = 30 * RATE
    assert Autoscaler(work, running=9).decide() == 6
    assert Autoscaler(work, running=9, rates={0: 1000 * RATE}).decide() == 1
    assert Autoscaler(work, work, running=9, rates={0: 2 * RATE, 1: 4 * RATE}).decide() == 5


def test_target_is_an_option_of_the_policy() -> None:
    policy = {"policy_function": QueuedWorkPolicy, "policy_kwargs": {"target_seconds": 1.5}}
    assert Autoscaler(5 * RATE, running=9, policy=policy).decide() == 4


@pytest.mark.parametrize(
    "options",
    [
        {"target_seconds": 0},
        {"target_seconds": float("nan")},
        {"target_seconds": float("inf")},
        {"target_seconds": "9"},
        {"target_second": 9},
    ],
)
def test_wrong_options_are_logged_and_do_not_stop_the_controller(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    policy = {"policy_function": QueuedWorkPolicy, "policy_kwargs": options}
    assert Autoscaler(14 * RATE, running=9, policy=policy).decide() == 3
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert line == f"policy_kwargs are wrong: got {options}, expected target_seconds above 0"


def test_requests_that_wait_in_proxies_count_as_work_of_average_cost() -> None:
    assert Autoscaler(4 * RATE, running=4).decide() == 1
    assert Autoscaler(4 * RATE, running=4, waiting=12).decide() == 4  # 16 s
    assert Autoscaler(0, running=64, waiting=129).decide() == 4


def test_replica_without_a_report_or_a_rate_is_no_reason_to_scale() -> None:
    assert work_seconds(Autoscaler(None, running=2).context()) == 0
    assert Autoscaler(None, running=2).decide() == 1
    assert Autoscaler(100 * RATE, running=9, rates={}).decide() == 1  # no long batch has ended
    assert Autoscaler(100 * RATE, running=130, rates={}).decide() == 3
    # the first of three has just started; the second works at the rate of the third
    assert Autoscaler(None, 10 * RATE, 10 * RATE, running=9, rates={2: RATE}).decide() == 4


def test_delays_of_ray_apply() -> None:
    assert Autoscaler(50 * RATE, running=9, upscale_delay_s=60).decide() == 1
    assert Autoscaler(0, 0, 0, running=1, downscale_delay_s=60).decide() == 3


def test_replica_reports_its_rate_once_it_is_known() -> None:
    def stats(rate: float | None) -> Any:
        engine = SimpleNamespace(unfinished_flops=7, flops_per_s=rate)
        replica = SimpleNamespace(_runtime=SimpleNamespace(engine=engine))
        return Replica.func_or_class.record_autoscaling_stats(replica)

    assert stats(None) == {"queued_flops": 7}
    assert stats(2.0) == {"queued_flops": 7, "flops_per_s": 2.0}


def test_policy_of_the_deployment_is_that_of_the_configuration() -> None:
    deployment = Replica._deployment_config.autoscaling_config  # as above
    assert deployment.policy.get_policy().__name__ == QueuedWorkPolicy.__name__
    (application,) = YAML(typ="safe").load((DEPLOY / "config.yaml").read_text())["applications"]
    (changes,) = application["deployments"]
    written = AutoscalingConfig(**changes["autoscaling_config"])
    assert written.policy.get_policy().__name__ == QueuedWorkPolicy.__name__
    target = QueuedWorkPolicy(**written.policy.policy_kwargs).target_seconds
    assert target == QueuedWorkPolicy().target_seconds
    assert written.target_ongoing_requests == deployment.target_ongoing_requests


def test_policy_of_ray_adds_no_replica_for_a_few_long_requests() -> None:
    by_count = {"policy_function": replica_queue_length_autoscaling_policy}
    assert Autoscaler(100 * RATE, running=4, policy=by_count).decide() == 1
    assert Autoscaler(100 * RATE, running=4).decide() == 4
