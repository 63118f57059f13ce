"""The CPU as a device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch.autograd import profiler_legacy

from qkv.engine.device.device import MemoryUsage, Stopwatch, Unloading, is_out_of_memory
from qkv.engine.device.layer_memory import LAYER_BYTES, LayerMemory

_T = TypeVar("_T")


class _WallClock:
    """A `Stopwatch` for calls that return when they are done."""

    def __init__(self) -> None:
        self._started_at, self._seconds = time.perf_counter(), 0.0

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._started_at

    def seconds(self) -> float:
        return self._seconds


class _OnCpu:
    """An `Unloading` of tensors that need no copy, or have been copied."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        started_at = time.perf_counter()
        self._tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        self._seconds = time.perf_counter() - started_at

    def wait(self) -> dict[str, Tensor]:
        return self._tensors

    def seconds(self) -> float:
        return self._seconds


class CpuDevice:
    """The CPU: tensors stay where they are, and calls return when they are done."""

    torch_device = torch.device("cpu")
    is_accelerator = False
    synchronizations = 0

    def __init__(self) -> None:
        self.layer_memory = LayerMemory(self.load, LAYER_BYTES)

    def use_in_this_thread(self) -> None:
        """Does nothing: the CPU is torch's default."""

    def empty_on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a tensor of the CPU."""
        return torch.empty(shape, dtype=dtype)

    def load(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the tensors."""
        return tensors

    def unload(self, tensors: Mapping[str, Tensor]) -> Unloading:
        """Makes tensors dense."""
        return _OnCpu(tensors)

    def start_stopwatch(self) -> Stopwatch:
        """Returns a stopwatch by wall clock."""
        return _WallClock()

    def memory_usage(self) -> MemoryUsage:
        """Returns zeros."""
        return MemoryUsage()

    def free_memory(self) -> tuple[int, int]:
        """Returns 0 free bytes, because other processes change them all the time."""
        return 0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def release_memory(self) -> None:
        """Does nothing: torch keeps no memory of the CPU."""

    def measure_peak_bytes(self, work: Callable[[], _T]) -> tuple[_T, int]:
        """Returns the result, and the peak of the sum of this thread's allocations and releases.

        Resident memory would include other threads, and memory that malloc retains. Memory that
        kernels allocate without torch is not counted, such as MKL's packed matrices.
        """
        # torch.profiler writes lines of its own to standard error
        _enable_profiler_legacy(profiler_legacy.profile(profile_memory=True).config())
        try:
            result = work()
        finally:
            threads = _disable_profiler_legacy()
        allocated = peak = 0
        for record in (r for thread in threads for r in thread if str(r.kind()) == "memory_alloc"):
            allocated += record.cpu_memory_usage()
            peak = max(peak, allocated)
        return result, peak

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Returns True if memory ran out."""
        return is_out_of_memory(error)

    def is_fatal(self, error: BaseException) -> bool:
        """Returns False: no computation breaks the CPU."""
        return False
