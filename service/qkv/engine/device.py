"""The device that runs the jobs: copies, timing, memory and errors. No other module knows devices.

`new_device` returns a `Device`: a `CpuDevice` or an `Accelerator`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch.autograd import profiler_legacy

__all__ = [
    "Accelerator",
    "CpuDevice",
    "Device",
    "MemoryUsage",
    "Stopwatch",
    "find_device",
    "new_device",
]

_OUT_OF_MEMORY: Final = ("can't allocate", "out of memory", "ALLOC_FAILED")


class MemoryUsage(NamedTuple):
    """The memory of a device in bytes.

    Attributes:
        allocated: held by tensors of this process.
        reserved: held by torch's allocator in this process.
        total: of the device.
    """

    allocated: int = 0
    reserved: int = 0
    total: int = 0


class Stopwatch(Protocol):
    """Measures the seconds of a computation on a device."""

    def stop(self) -> float:
        """Waits until the computation is done; returns its seconds."""


class Device(Protocol):
    """A device, and all that differs between devices.

    Attributes:
        torch_device: the device of its tensors.
        is_accelerator: it has memory of its own and runs beside the CPU, so that batches are
            stacked; else tensors of the CPU are used where they are.
    """

    torch_device: torch.device
    is_accelerator: bool

    def load(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns tensors of the CPU on the device."""

    def unload(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns tensors of the device on the CPU, dense; waits for their values."""

    def start_stopwatch(self) -> Stopwatch:
        """Starts to measure a computation."""

    def memory_usage(self) -> MemoryUsage:
        """Returns the memory in use; zeros where that is not measured."""

    def free_memory(self) -> tuple[int, int]:
        """Returns the free and the total bytes of the device."""

    def release_memory(self) -> None:
        """Gives memory that torch holds for later back to the device."""

    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        """Runs `work`; returns the peak of the bytes that torch allocated for it."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Returns True if memory ran out."""

    def is_fatal(self, error: BaseException) -> bool:
        """Returns True if the device can run nothing more in this process."""


class _WallClock:
    """A `Stopwatch` for a device whose calls return when they are done."""

    def __init__(self) -> None:
        self._started_at = time.perf_counter()

    def stop(self) -> float:
        return time.perf_counter() - self._started_at


class CpuDevice:
    """The CPU: tensors stay where they are, and calls return when they are done."""

    torch_device = torch.device("cpu")
    is_accelerator = False

    def load(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the tensors."""
        return tensors

    def unload(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns dense tensors."""
        return {name: tensor.contiguous() for name, tensor in tensors.items()}

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

    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        """Returns the peak of the sum of this thread's allocations and releases.

        Resident memory would include other threads, and memory that malloc retains. Memory that
        kernels allocate without torch is not counted, such as MKL's packed matrices.
        """
        # torch.profiler writes lines of its own to standard error
        _enable_profiler_legacy(profiler_legacy.profile(profile_memory=True).config())
        try:
            result = work()
        finally:
            threads = _disable_profiler_legacy()
        del result
        allocated = peak = 0
        for record in (r for thread in threads for r in thread if str(r.kind()) == "memory_alloc"):
            allocated += record.cpu_memory_usage()
            peak = max(peak, allocated)
        return peak

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Returns True if memory ran out; only the text of torch's error shows it."""
        return _is_out_of_memory(error)

    def is_fatal(self, error: BaseException) -> bool:
        """Returns False: no computation breaks the CPU."""
        return False


class _Events:
    """A `Stopwatch` between two events on an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._first = torch.Event(device, enable_timing=True)
        self._last = torch.Event(device, enable_timing=True)
        self._first.record()

    def stop(self) -> float:
        self._last.record()
        self._last.synchronize()
        return float(self._first.elapsed_time(self._last)) / 1e3


class Accelerator:
    """A device with memory of its own, by `torch.accelerator`.

    Args:
        torch_device: the device of its tensors.
    """

    is_accelerator = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def load(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copies tensors to the device."""
        return {name: tensor.to(self.torch_device) for name, tensor in tensors.items()}

    def unload(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copies tensors to the CPU."""
        return {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}

    def start_stopwatch(self) -> Stopwatch:
        """Returns a stopwatch by events of the device."""
        return _Events(self.torch_device)

    def memory_usage(self) -> MemoryUsage:
        """Returns the allocator's counts."""
        _, total = self.free_memory()
        return MemoryUsage(
            torch.accelerator.memory_allocated(self.torch_device),
            torch.accelerator.memory_reserved(self.torch_device),
            total,
        )

    def free_memory(self) -> tuple[int, int]:
        """Returns the free bytes and the total bytes, as the driver counts them."""
        free, total = torch.accelerator.get_memory_info(self.torch_device)
        return int(free), int(total)

    def release_memory(self) -> None:
        """Empties the allocator's cache."""
        torch.accelerator.empty_cache()

    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        """Returns the allocator's peak, without what was allocated before."""
        torch.accelerator.synchronize(self.torch_device)
        torch.accelerator.reset_peak_memory_stats(self.torch_device)
        before = torch.accelerator.memory_allocated(self.torch_device)
        result = work()
        torch.accelerator.synchronize(self.torch_device)
        del result
        return int(torch.accelerator.max_memory_allocated(self.torch_device) - before)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Returns True if the device's or the CPU's memory ran out."""
        return _is_out_of_memory(error)

    def is_fatal(self, error: BaseException) -> bool:
        """Returns True if the driver's context is broken.

        A new launch distinguishes this from an error of a single launch.
        """
        return isinstance(error, torch.AcceleratorError) and not self._works()

    def _works(self) -> bool:
        """Runs the smallest computation; returns True if it succeeds."""
        try:
            return bool(torch.ones(1, device=self.torch_device).sum().item() == 1)
        except RuntimeError as error:
            return _is_out_of_memory(error)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def find_device(name: str) -> torch.device:
    """Returns the device of a name; "auto" is the accelerator if torch finds one, else the CPU.

    Call it in the process that uses the device: a process that has looked for it cannot fork.

    Raises:
        ValueError: torch finds no such device.
    """
    found = None if name == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    if name not in ("auto", "cpu") and (found is None or found.type != name):
        raise ValueError(f"QKV_DEVICE is {name}, but torch finds no such device")
    return torch.device("cpu") if found is None else torch.device(found.type)


def new_device(torch_device: torch.device) -> Device:
    """Returns the device of tensors on a device of torch."""
    return CpuDevice() if torch_device.type == "cpu" else Accelerator(torch_device)
