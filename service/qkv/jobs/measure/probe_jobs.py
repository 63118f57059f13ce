"""Jobs that measure a run: its time when nothing runs with it, its memory, or its roundings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch.autograd import profiler_legacy

from qkv.attention.catalogue import Variant
from qkv.jobs.job import Job

__all__ = ["PEAK", "ExactJob", "PeakJob", "TimedJob", "exact", "peak_of", "widened"]

PEAK: Final = "peak_bytes"
"""What a `PeakJob` answers."""


@dataclass(frozen=True, eq=False)
class TimedJob(Job):
    """A job that shares its call with no other, so that the call's time is its own."""

    is_inference: ClassVar[bool] = False

    @classmethod
    def like(cls, job: Job) -> Self:
        """The same run as a job of this kind."""
        return cls(job.variant, job.parameters, job.inputs, job.outputs)

    @cached_property
    def key(self) -> Hashable:
        """Its own."""
        return id(self)

    @property
    def is_fused(self) -> bool:
        """Never: threads that nobody else wants are lent to some variants and not to others."""
        return False


@dataclass(frozen=True, eq=False)
class PeakJob(TimedJob):
    """A job that answers, in place of its outputs, how many bytes it held at most beside its
    inputs."""

    @cached_property
    def answers(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """One number."""
        return {PEAK: ("int64", (1,))}


@dataclass(frozen=True, eq=False)
class ExactJob(TimedJob):
    """A job that runs, and answers, in float64 whatever its inputs came in."""

    def dtype_of(self, output: str) -> str:
        """float64."""
        return "float64"


def widened(
    variant: Variant, tensors: Mapping[str, Tensor], parameters: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """The arguments of a variant's functions in float64: of what it draws by itself, the numbers
    that it draws for inputs of their own dtype.

    Args:
        variant: whose.
        tensors: its inputs by name, `exact`.
        parameters: by the names that its functions give them.
        dtype: that the inputs came in.
    """
    wide = {
        spec.argument: tensors[name] for name, spec in variant.inputs.items() if name in tensors
    }
    came = getattr(torch, dtype)
    narrow = {n: t.to(came) if t.is_floating_point() else t for n, t in wide.items()}
    made = variant.drawn({**narrow, **parameters})
    drawn = {n: exact(v) if isinstance(v, Tensor) else v for n, v in made.items() if n not in wide}
    return drawn | wide


def exact(tensor: Tensor) -> Tensor:
    """In float64, where it has floats."""
    return tensor.double() if tensor.is_floating_point() else tensor


def peak_of(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes that torch held at once for this work, beyond what it held before; what the
    work returns is among them.

    On a CUDA device by its allocator's counters. On a CPU by every allocation and release of this
    thread: exact, where a process's resident memory is also what others do and what malloc keeps.
    Scratch memory that a kernel takes past torch's allocator (MKL's packed matrices) is in neither.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        made = work()
        torch.cuda.synchronize(device)
        del made
        return int(torch.cuda.max_memory_allocated(device) - before)
    # not torch.profiler: it writes lines of its own to standard error
    _enable_profiler_legacy(profiler_legacy.profile(profile_memory=True).config())
    try:
        made = work()
    finally:
        threads = _disable_profiler_legacy()
    del made
    held = most = 0
    for record in (r for thread in threads for r in thread if str(r.kind()) == "memory_alloc"):
        held += record.cpu_memory_usage()
        most = max(most, held)
    return most
