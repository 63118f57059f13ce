"""The autoscaling policy of the deployment: seconds of work for each replica, not requests only.

Ray's controller runs it. The costs of two requests may differ by a factor of a million, so a
policy that counts requests adds no replica for a few long ones.
"""

from __future__ import annotations

import logging
import math
from statistics import fmean
from typing import Any, Final

from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingContext

_TARGET_S: Final = 5.0
_log: Final = logging.getLogger("ray.serve")  # the controller's log


class QueuedWorkPolicy:
    """As many replicas as keep the unfinished work of each below a target, in seconds.

    Replicas report the operations that they have to do, and the rate of their last batches of at
    least 10 ms. So the same target is right for a CPU and a GPU. The time of shorter batches says
    little about the rate, and 64 of them are less than a second of work: Ray's own count of
    requests covers them. The policy never wants fewer replicas than this count. Until the first
    long batch has ended, it wants no more either. For the sake of work, it wants at most as many
    replicas as there are requests, because a request runs on one replica.

    Ray itself averages the reports over `look_back_period_s`, and applies delays, factors and
    bounds of `AutoscalingConfig` to the result. The policy has no state.

    Args:
        **options: `policy_kwargs` of the configuration: `target_seconds`, the seconds of work for
            each replica. An error here would stop Ray's controller and `serve status`, so wrong
            options are an error in the controller's log, and the target is 5.
    """

    def __init__(self, **options: Any) -> None:
        target = options.get("target_seconds", _TARGET_S)
        is_number = isinstance(target, int | float) and 0 < target < math.inf
        if options.keys() - {"target_seconds"} or not is_number:
            _log.error("policy_kwargs are wrong: got %s, expected target_seconds above 0", options)
            target = _TARGET_S
        self.target_seconds: float = target

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Returns the number of replicas, which Ray rounds up, and the state of Ray's policy."""
        by_requests, state = replica_queue_length_autoscaling_policy(context)
        # the count is an average, so one client alone may be 0.98 or 1.02 requests
        limit = max(1, round(context.total_num_requests))
        by_work = work_seconds(context) / self.target_seconds
        return max(by_requests, min(by_work, limit)), state


def work_seconds(context: AutoscalingContext) -> float:
    """Returns the seconds that one replica would take for the work of all.

    A replica that has no rate yet works at the average rate of the others; without any rate the
    result is 0. A replica without a report has just started, and has little to do. The last report
    of a replica that is silent counts until Ray's health check replaces it. Requests that wait in
    proxies cost as much as the average request in the replicas.
    """
    metrics = context.aggregated_metrics or {}
    flops = metrics.get("queued_flops", {})
    # Ray gives 0 for a series without points
    rates = {id: rate for id, rate in metrics.get("flops_per_s", {}).items() if rate}
    if not rates:
        return 0.0
    average = fmean(rates.values())
    seconds: float = sum(flops[id] / rates.get(id, average) for id in flops)
    waiting: float = context.total_queued_requests / max(1.0, context.total_running_requests)
    return seconds * (1 + waiting)
