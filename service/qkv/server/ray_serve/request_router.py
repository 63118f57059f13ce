"""The request router of the deployment: two random replicas, and the one with less work of them.

Ray's proxies run it. The costs of two requests may differ by a factor of a million, so a router
that compares numbers of requests sends small ones to a replica that is busy for seconds.
"""

from __future__ import annotations

import pickle
import random
from collections import defaultdict
from typing import Any, Final

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

_LEAST_WIDTH: Final = 16  # of all heads together: wider requests of the same size cost less


class FlopsRouter(RequestRouter):  # type: ignore[misc]  # ray has no annotations here
    """A router to the one of two random replicas that has fewer operations to do.

    The router estimates the operations of the requests that it has sent itself and that have no
    response yet. It asks no replica: reports pass Ray's controller and arrive up to a second late,
    so that a replica that has finished a large job looks busy. Equal numbers are compared by the
    number of requests, which Ray learns from the replicas.
    """

    def initialize_state(self, **_: Any) -> None:
        """Prepares the counts; Ray calls it once."""
        self._sent_flops: dict[ReplicaID, dict[str, int]] = defaultdict(dict)
        self._chosen: dict[str, tuple[PendingRequest, ReplicaID]] = {}  # not yet accepted

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Returns two random replicas, the better one first."""
        self._forget_cancelled()
        replicas = list(self.curr_replicas.values())
        two = random.sample(replicas, min(2, len(replicas)))
        best_first = sorted(two, key=self._work_of)
        if pending_request is not None and best_first and not pending_request.future.done():
            self._choose(pending_request, best_first[0].replica_id)
        return [[replica] for replica in best_first]

    def _choose(self, pending_request: PendingRequest, replica_id: ReplicaID) -> None:
        """Counts a request at once: a replica may take tens of milliseconds to accept it."""
        id = pending_request.metadata.internal_request_id
        if id in self._chosen:  # the replica that was chosen before has not accepted it
            self.on_request_completed(self._chosen[id][1], id)
        self._sent_flops[replica_id][id] = _estimate_flops(_body_bytes(pending_request))
        self._chosen[id] = pending_request, replica_id

    def _forget_cancelled(self) -> None:
        """Stops counting requests whose clients disconnected before a replica accepted them."""
        for id, (pending, chosen) in list(self._chosen.items()):
            if pending.future.cancelled():
                self.on_request_completed(chosen, id)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Corrects the count if not the chosen replica has accepted a request."""
        id = pending_request.metadata.internal_request_id
        _, chosen = self._chosen.pop(id, (None, replica_id))
        if chosen != replica_id:
            self._sent_flops[replica_id][id] = self._sent_flops[chosen].pop(id, 0)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stops counting a request."""
        self._chosen.pop(internal_request_id, None)
        self._sent_flops[replica_id].pop(internal_request_id, None)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forgets the requests of a replica."""
        self._sent_flops.pop(replica_id, None)
        super().on_replica_actor_died(replica_id)

    def _work_of(self, replica: RunningReplica) -> tuple[int, int]:
        """Returns the operations that a replica has to do, and the number of its requests."""
        id = replica.replica_id
        return sum(self._sent_flops[id].values()), self.replica_queue_len_cache.get(id) or 0


def _estimate_flops(body_bytes: int) -> int:
    """Returns the operations of self-attention with a body of this size in float32.

    The body has 12 L W bytes, for query, key and value; the two products have 4 L² W operations.
    """
    length = body_bytes // (12 * _LEAST_WIDTH)
    return 4 * length * length * _LEAST_WIDTH


def _body_bytes(pending_request: PendingRequest) -> int:
    """Returns the declared size of a request's body; 0 if there is none.

    A proxy sends the request's scope as bytes that it has pickled itself.
    """
    (argument, *_) = pending_request.args or (None,)
    if not isinstance(argument, bytes):
        return 0
    for name, value in pickle.loads(argument).asgi_scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
