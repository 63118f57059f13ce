"""Cache of plans: jobs without their numbers, for requests that mean the same.

`PlanCache.new_job` validates a request. Fields, names, dtypes and shapes are validated once; later
requests with the same ones are checked for their numbers only.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import Final, Generic, TypeVar

import orjson

from qkv.attention.layers.layer import Layer
from qkv.jobs.job import Job, Limits
from qkv.jobs.layer_inputs import arrays_of
from qkv.tensors import RawTensor
from qkv.wire.message import Message

__all__ = ["BodyPlan", "BoundedCache", "Plan", "PlanCache"]

_MAX_PLANS: Final = 2048  # about 4 KiB each
_MAX_FIELDS: Final = 1024  # bytes of the fields of a request whose plan is kept
_MAX_NAMES: Final = 8192  # characters of the names of its tensors: a whole model has far more

_T = TypeVar("_T")


class BoundedCache(Generic[_T]):
    """The values that were used last, by key; safe across threads.

    Args:
        size: the number of values.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[Hashable, _T] = {}  # the order is that of the last uses
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> _T | None:
        """Returns the value of a key; None if it is not there."""
        with self._lock:
            value = self._values.pop(key, None)
            if value is not None:
                self._values[key] = value
        return value

    def put(self, key: Hashable, value: _T) -> None:
        """Adds a value; drops the one that was not used for longest."""
        with self._lock:
            self._values[key] = value
            if len(self._values) > self._size:
                del self._values[next(iter(self._values))]


class Plan:
    """A validated job without its numbers, with all that follows from its fields and shapes."""

    def __init__(self, job: Job) -> None:
        # and what these need
        _ = job.is_small, job.arguments, job.tensor_arguments, job.attend_outputs, job.annotations
        _ = job.has_lasting_key, job.batch_key
        job.__dict__.setdefault("_plan_id", object())
        layer = job.inputs.layer
        self._layer: Layer | None = None if layer is None else layer.without_numbers()
        self._job = job.with_inputs(job.inputs._replace(tensors={}, layer=None))

    def new_job(self, message: Message) -> Job:
        """Returns the job of a request with the numbers of a message.

        Raises:
            InvalidContent: a value is wrong.
        """
        inputs, layer = self._job.inputs, None
        if self._layer is not None:
            layer = self._layer.with_numbers(
                arrays_of(message.layer, inputs.cast_dtype, "layer", "tensors")
            )
        return self._job.with_inputs(inputs.with_numbers(message, layer))

    def with_tensors(self, tensors: Mapping[str, RawTensor]) -> Job:
        """Returns the job of a request without a layer, with tensors that need no cast.

        Raises:
            InvalidContent: a value is wrong.
        """
        return self._job.with_inputs(self._job.inputs.with_tensors(tensors, None))


class BodyPlan:
    """The plan of a request whose tensors follow one another in its body.

    Args:
        job: the job of such a request, without a layer.
        tensors: its tensors in the order of the body, as they are in it.

    Attributes:
        size: the number of their bytes.
    """

    def __init__(self, job: Job, tensors: Mapping[str, RawTensor]) -> None:
        self._plan = Plan(job)
        self._specs = []
        self.size = 0
        for name, tensor in tensors.items():
            part = slice(self.size, self.size + tensor.nbytes)
            self._specs.append((name, tensor.dtype, tensor.shape, part))
            self.size += tensor.nbytes

    def new_job(self, data: memoryview) -> Job:
        """Returns the job of a request with these bytes.

        Raises:
            InvalidContent: a value is wrong.
        """
        return self._plan.with_tensors(
            {name: RawTensor(dtype, shape, data[part]) for name, dtype, shape, part in self._specs}
        )


class PlanCache:
    """Validates requests, and keeps their plans; for one event loop and its threads.

    Args:
        limits: of a job.
        size: the number of plans.
    """

    def __init__(self, limits: Limits, size: int = _MAX_PLANS) -> None:
        self._limits = limits
        self._plans: BoundedCache[Plan] = BoundedCache(size)

    def new_job(self, kind: type[Job], variant: str, message: Message) -> Job:
        """Returns the job of a request.

        Args:
            kind: the class of the job.
            variant: the name of the variant.
            message: the request.

        Raises:
            QkvError: from `kind.from_message`.
        """
        key = _key(kind, variant, message)
        plan = None if key is None else self._plans.get(key)
        if plan is not None:
            return plan.new_job(message)
        job = kind.from_message(variant, message, self._limits)
        if key is not None:
            self._plans.put(key, Plan(job))
        return job


def _key(kind: type[Job], variant: str, message: Message) -> Hashable:
    """Returns all that a plan depends on; None for a request whose plan is not kept."""
    if sum(map(len, message.layer)) > _MAX_NAMES:
        return None
    fields = b""
    if message.fields:
        try:
            fields = orjson.dumps(message.fields, option=orjson.OPT_SORT_KEYS)
        except TypeError:  # an integer past 64 bits: `from_message` has the error
            return None
        if len(fields) > _MAX_FIELDS:
            return None
        # a copy: bytes from orjson take 4 KiB to 64 KiB, however short they are
        fields = memoryview(fields).tobytes()
    layer = _specs(message.layer) if message.layer else None
    return kind, variant, fields, _specs(message.tensors), layer


def _specs(tensors: dict[str, RawTensor]) -> Hashable:
    return tuple([(name, t.dtype, t.shape, t.is_untyped) for name, t in tensors.items()])
