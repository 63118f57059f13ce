"""Plans that measure a run: time, peak memory, and the output in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor

from qkv.attention.signature import VERSION
from qkv.attention.variant import Variant
from qkv.jobs.plan import Plan

__all__ = [
    "PEAK_BYTES",
    "CachedTokenPlan",
    "Float64Plan",
    "PeakMemoryPlan",
    "TimingPlan",
    "float64_arguments",
    "to_float64",
]

PEAK_BYTES: Final = "peak_bytes"
"""The output of a `PeakMemoryPlan`."""


@dataclass(frozen=True, eq=False)
class TimingPlan(Plan):
    """A run alone in its batch, so that the batch's time is its own."""

    is_inference: ClassVar[bool] = False

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Returns the same run as a plan of this class."""
        return cls(plan.variant, plan.parameters, plan.inputs, plan.outputs)

    @cached_property
    def runs_alone(self) -> bool:
        """Always true."""
        return True

    @cached_property
    def is_small(self) -> bool:
        """Always false: it runs where nothing else does meanwhile."""
        return False

    @property
    def uses_sdpa(self) -> bool:
        """Always false: the engine lends idle threads to SDPA only, which would skew the times."""
        return False


@dataclass(frozen=True, eq=False)
class CachedTokenPlan(TimingPlan):
    """A run of one query that first writes the last key and value to those before."""


@dataclass(frozen=True, eq=False)
class PeakMemoryPlan(TimingPlan):
    """A run that returns its peak memory without the inputs, instead of its outputs."""

    @cached_property
    def output_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """One integer, a number of bytes."""
        return {PEAK_BYTES: ("int64", (1,))}


@dataclass(frozen=True, eq=False)
class Float64Plan(TimingPlan):
    """A run in float64 for inputs of any dtype."""

    def dtype_of(self, output: str) -> str:
        """Returns float64."""
        return "float64"


def float64_arguments(
    variant: Variant, tensors: Mapping[str, Tensor], parameters: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """Returns the arguments of a variant's functions in float64.

    Random tensors of the variant have the values drawn for the dtype of the request.

    Args:
        variant: the variant.
        tensors: its inputs by name, in float64.
        parameters: its parameters by name.
        dtype: the dtype of the inputs in the request.
    """
    wide = {
        spec.argument: tensors[name]
        for name, spec in variant.tensors.items()
        if name in tensors and name != VERSION
    }
    request_dtype = getattr(torch, dtype)
    narrow = {n: t.to(request_dtype) if t.is_floating_point() else t for n, t in wide.items()}
    complete = variant.random_inputs({**narrow, **parameters})
    random = {
        n: to_float64(v) if isinstance(v, Tensor) else v
        for n, v in complete.items()
        if n not in wide
    }
    return variant.with_state(random | wide)


def to_float64(tensor: Tensor) -> Tensor:
    """Converts a floating tensor to float64; returns any other tensor unchanged."""
    return tensor.double() if tensor.is_floating_point() else tensor
