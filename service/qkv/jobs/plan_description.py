"""Describes plans to another process of the service, which validates them from that again.

A description is what the plan of a request depends on: the kind of the request, the variant, the
fields, and the names, dtypes and shapes of the tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

from qkv.jobs.gradient_plan import GradientPlan
from qkv.jobs.loaded.loaded_layers import LoadedLayers
from qkv.jobs.plan import Limits, Measurement, Plan
from qkv.jobs.plan_cache import BoundedCache, plan_bytes
from qkv.tensors import DTYPES, RawTensor
from qkv.wire.message import Message

_KINDS: Final = {kind.__name__: kind for kind in (Plan, GradientPlan)}
_MAX_BYTES: Final = 64 << 20  # of the plans of all workers
_OBJECT_FACTOR: Final = 24  # a row number takes 3 bytes, and 36 each as sent and as validated
_ANY: Final = 1 << 62
_KEY_BYTES: Final = 16
_NOTHING: Final = memoryview(b"")


class PlanDescription(NamedTuple):
    """The description of a plan.

    Attributes:
        key: of the content; plans with other contents have other keys.
        content: that from which another process validates the plan.
    """

    key: bytes
    content: bytes


def describe(plan: Plan) -> PlanDescription:
    """Returns the description of a plan."""
    content = msgpack.packb(_parts(plan))
    return PlanDescription(hashlib.blake2b(content, digest_size=_KEY_BYTES).digest(), content)


class KnownPlans:
    """The plans that other processes have described to this one.

    Args:
        layers: those that the operator loaded.
        max_bytes: what the plans may hold together.
    """

    def __init__(self, layers: LoadedLayers, max_bytes: int = _MAX_BYTES) -> None:
        # the process that describes a plan has checked the limits
        self._limits = Limits(_ANY, _ANY, _ANY, layers)
        self._plans: BoundedCache[Plan] = BoundedCache(max_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes that the plans hold."""
        return self._plans.held_bytes

    def find(self, key: bytes, content: bytes | None) -> Plan | None:
        """Returns the plan of a description; None if it is not known, or not any more.

        Args:
            key, content: of the description. None: the plan was described before.
        """
        if (plan := self._plans.get(key)) is None and content is not None:
            plan = _plan(msgpack.unpackb(content), self._limits)
            self._plans.put(key, plan, plan_bytes(content) + _OBJECT_FACTOR * len(content))
        return plan


def _parts(plan: Plan) -> tuple[Any, ...]:
    inputs = plan.inputs
    fields, layer = dict(plan.fields), inputs.layer
    tensors = [(name, dtype, inputs.sent_shapes[name]) for name, dtype in inputs.dtypes.items()]
    weights: list[tuple[str, str, tuple[int, ...]]] = []
    if layer is not None and layer.loaded is None:
        # the tensors that were found: their layout and prefix are known now
        found = {"layout": layer.layout.name, "prefix": layer.options.prefix}
        fields["layer"] = {**fields["layer"], **found}
        weights = [(name, a.dtype.name, a.shape) for name, a in layer.tensors.items()]
    return type(plan).__name__, plan.variant.name, fields, tensors, weights, plan.measurement


def _plan(parts: Iterable[Any], limits: Limits) -> Plan:
    kind, variant, fields, tensors, weights, measurement = parts
    message = Message(fields, _hollow_tensors(tensors), _hollow_tensors(weights))
    plan = _KINDS[kind].from_message(variant, message, limits)
    return replace(plan, measurement=Measurement(*measurement))


def _hollow_tensors(specs: Iterable[tuple[str, str, list[int]]]) -> dict[str, RawTensor]:
    return {name: _HollowTensor(dtype, tuple(shape), _NOTHING) for name, dtype, shape in specs}


class _HollowTensor(RawTensor):
    """A tensor without its numbers, which its reader finds to be ones, in the memory of one."""

    __slots__ = ()

    def numpy(self) -> np.ndarray:
        """Returns an array of ones."""
        return np.broadcast_to(np.ones((), DTYPES[self.dtype]), self.shape)
