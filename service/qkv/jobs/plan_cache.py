"""Cache of plans, for requests that mean the same.

Fields, names, dtypes and shapes are validated once; later requests with the same ones are checked
for their numbers only.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Final, Generic, TypeVar

import orjson

from qkv.jobs.job import Job
from qkv.jobs.plan import Limits, Plan
from qkv.tensors import RawTensor
from qkv.wire.message import Message

_MAX_BYTES: Final = 32 << 20  # of plans; two thousand usual ones need a third
_MAX_FIELDS: Final = 1024  # bytes of the fields of a request whose plan is kept
_MAX_PART: Final = 64  # an entry that takes more than this part of a cache would displace too many
_PLAN_BYTES: Final = 6 << 10  # of a plan beside what grows with its request
_COPIES: Final = 3  # a plan has names, shapes and parameters as sent, validated and derived

_T = TypeVar("_T")


def plain_bytes(value: object) -> int:
    """Returns the bytes of texts and numbers, and of tuples, lists, sets and dicts of them.

    A value of another class counts without the values that it refers to.
    """
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(map(plain_bytes, value)) + sum(map(plain_bytes, value.values()))
    if isinstance(value, (tuple, list, set, frozenset)):
        return size + sum(map(plain_bytes, value))
    return size


def plan_bytes(*request: object) -> int:
    """Returns a bound of the bytes that a plan holds, with its key and its description.

    To visit the objects of the plan itself takes twice as long as to validate its request.

    Args:
        request: the plain values that the plan depends on.
    """
    return _PLAN_BYTES + _COPIES * plain_bytes(request)


class BoundedCache(Generic[_T]):
    """The values that were used last, by key; safe across threads.

    Args:
        max_bytes: what the values may hold together, with their keys.

    Attributes:
        held_bytes: what they hold, as `put` was told.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.held_bytes = 0
        # with the bytes of each; the order is that of the last uses
        self._values: OrderedDict[Hashable, tuple[_T, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> _T | None:
        """Returns the value of a key; None if it is not there."""
        with self._lock:
            if (entry := self._values.get(key)) is None:
                return None
            self._values.move_to_end(key)  # and keep the key that was counted
        return entry[0]

    def put(self, key: Hashable, value: _T, held_bytes: int) -> None:
        """Adds a value, unless it is too large; drops those that were not used for longest.

        Args:
            key: of the value.
            value: the value.
            held_bytes: what both hold.
        """
        if held_bytes * _MAX_PART > self._max_bytes:
            return
        with self._lock:
            _, before = self._values.pop(key, (None, 0))
            self._values[key] = value, held_bytes
            self.held_bytes += held_bytes - before
            while self.held_bytes > self._max_bytes:
                _, (_, dropped) = self._values.popitem(last=False)
                self.held_bytes -= dropped


class PlanCache:
    """The plans of the requests to a process.

    Args:
        limits: of a job; also the layers that plans may name.
        max_bytes: what the plans may hold together.
    """

    def __init__(self, limits: Limits, max_bytes: int = _MAX_BYTES) -> None:
        self._limits = limits
        self._plans: BoundedCache[Plan] = BoundedCache(max_bytes)

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def held_bytes(self) -> int:
        """Bytes that the plans hold."""
        return self._plans.held_bytes

    def new_job(self, kind: type[Plan], variant: str, message: Message) -> Job:
        """Returns the job of a request.

        Args:
            kind: the class of the plan.
            variant: the name of the variant.
            message: the request.

        Raises:
            QkvError: from `kind.from_message` and `Job.from_message`.
        """
        key = _key(kind, variant, message)
        plan = None if key is None else self._plans.get(key)
        if plan is None:
            plan = kind.from_message(variant, message, self._limits)
            if key is not None:
                self._plans.put(key, plan, plan_bytes(message.fields, key[1:]))
        return Job.from_message(plan, message)


def _key(kind: type[Plan], variant: str, message: Message) -> tuple[Any, ...] | None:
    """Returns all that a plan depends on; None for a request whose plan is not kept."""
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
