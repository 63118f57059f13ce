"""A job: a plan with the tensors of one request, and the way of its result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Mapping
from typing import Final, Self

from qkv.attention.layers.layer import Layer
from qkv.jobs.plan import Limits, Plan
from qkv.jobs.result import Result
from qkv.jobs.tenant import Tenant
from qkv.tensors import RawTensor
from qkv.wire.message import Message

PRIORITIES: Final = (1, 2, 3)
"""High, default and low priority."""
DEFAULT_PRIORITY: Final = 2


class Job:
    """A plan with the numbers of one request, from its validation to its result.

    Args:
        plan: all but the numbers.
        tensors: the variant's inputs, or the embeddings of its layer, in the request's shapes.
        layer: the layer that projects them, or None.

    Attributes:
        plan, tensors, layer: as the arguments; the others are set when it is submitted.
        tenant: whose job it is.
        priority: one of `PRIORITIES`.
        submitted_at: start of its wait, by `time.perf_counter`.
        deadline: time at which it expires, by the same clock; None: never.
        future: receives its result or its error.
        timer: the timer of its deadline; None: it has none.
    """

    __slots__ = (
        "__weakref__", "deadline", "future", "layer", "plan", "priority", "submitted_at", "tenant",
        "tensors", "timer",
    )  # fmt: skip

    tenant: Tenant
    priority: int
    submitted_at: float
    deadline: float | None
    future: asyncio.Future[Result]
    timer: asyncio.TimerHandle | None

    def __init__(
        self, plan: Plan, tensors: Mapping[str, RawTensor], layer: Layer | None = None
    ) -> None:
        self.plan, self.tensors, self.layer = plan, tensors, layer

    @classmethod
    def from_message(cls, plan: Plan, message: Message) -> Self:
        """Returns the job of a message with the names, dtypes and shapes of a plan.

        Raises:
            InvalidContent: a number is wrong.
        """
        return cls.checked(plan, plan.inputs.read_tensors(message), plan.inputs.read_layer(message))

    @classmethod
    def checked(
        cls, plan: Plan, tensors: Mapping[str, RawTensor], layer: Layer | None = None
    ) -> Self:
        """Returns the job of these tensors, whose dtypes and shapes are those of the plan.

        Raises:
            InvalidContent: a number is wrong.
        """
        plan.check_numbers(tensors)
        return cls(plan, tensors, layer)

    @classmethod
    def new(cls, kind: type[Plan], variant: str, message: Message, limits: Limits) -> Self:
        """Returns the job of a request that is not expected again.

        Raises:
            QkvError: from `kind.from_message`, or a number is wrong.
        """
        return cls.from_message(kind.from_message(variant, message, limits), message)

    def start_wait(
        self,
        future: asyncio.Future[Result],
        tenant: Tenant,
        priority: int = DEFAULT_PRIORITY,
        wait_s: float | None = None,
    ) -> None:
        """Starts its wait for a device; a job that is done may start again.

        Args:
            future: receives its result.
            tenant: whose job it is.
            priority: 1 is high, 3 is low; any other value is the default, 2.
            wait_s: seconds after which it expires; None: never.

        Raises:
            RuntimeError: it waits, or runs: the first of two results would be lost.
        """
        before = getattr(self, "future", None)
        if before is not None and not before.done():
            raise RuntimeError("the job is in flight: submit another Job of its plan and tensors")
        self.future, self.tenant, self.timer = future, tenant, None
        self.priority = priority if priority in PRIORITIES else DEFAULT_PRIORITY
        self.submitted_at = now = time.perf_counter()
        self.deadline = None if wait_s is None else now + wait_s

    @property
    def is_cancelled(self) -> bool:
        """True if nothing waits for the result any more."""
        return self.future.cancelled()

    @property
    def is_expired(self) -> bool:
        """True once its deadline has passed."""
        return self.deadline is not None and self.deadline <= time.perf_counter()

    def resolve(self, outcome: Result | BaseException) -> None:
        """Hands over its result or its error, on the event loop, unless it is cancelled."""
        if self.timer is not None:
            self.timer.cancel()
        if self.future.done():
            return
        if isinstance(outcome, Result):
            self.future.set_result(outcome)
        else:
            self.future.set_exception(outcome)

    @property
    def batch_key(self) -> Hashable:
        """Jobs with equal keys may be stacked along B and run as one batch."""
        plan = self.plan
        if plan.runs_alone:
            return id(self)
        # a loaded layer is in the key of the plan, by its name
        is_own = self.layer is not None and self.layer.loaded is None
        if not is_own and not plan.shared_names:
            return plan.batch_key
        # the items of a request share an input without B: only the same object is equal
        shared = [id(self.tensors[name]) for name in plan.shared_names]
        return plan.batch_key, *shared, id(self.layer) if is_own else None
