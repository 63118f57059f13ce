"""The interface of a device: all that differs between a CPU and an accelerator.

`cpu.py` and `accelerator.py` implement it; `selection.py` finds the device of a service.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from qkv.engine.device.layer_memory import LayerMemory

_T = TypeVar("_T")

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
    """A measurement of the seconds of a computation on a device."""

    def stop(self) -> None:
        """Marks the end of the computation; waits for nothing."""

    def seconds(self) -> float:
        """Returns the seconds; call it after the outputs are unloaded."""


class Unloading(Protocol):
    """Tensors on their way from the device."""

    def wait(self) -> dict[str, Tensor]:
        """Waits for the tensors; returns them on the CPU, dense."""

    def seconds(self) -> float:
        """Returns the seconds of the copies; call it after `wait`."""


class Device(Protocol):
    """A device. Its calls wait for nothing, apart from those that say so.

    Attributes:
        torch_device: the device of its tensors.
        is_accelerator: it has memory of its own and runs beside the CPU, so that batches are
            stacked; else tensors of the CPU are used where they are.
        synchronizations: how often a call has waited for the device.
        layer_memory: has the weights of loaded layers.
    """

    torch_device: torch.device
    is_accelerator: bool
    synchronizations: int
    layer_memory: LayerMemory

    def use_in_this_thread(self) -> None:
        """Makes it the device that torch uses in this thread if a call names none."""

    def empty_on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a tensor of the CPU from which copies to the device wait for nothing."""

    def load(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copies tensors of `empty_on_host`; returns them on the device.

        The caller keeps the result until the outputs computed from it are unloaded.
        """

    def unload(self, tensors: Mapping[str, Tensor]) -> Unloading:
        """Starts to copy tensors from the device."""

    def start_stopwatch(self) -> Stopwatch:
        """Starts to measure a computation."""

    def memory_usage(self) -> MemoryUsage:
        """Returns the memory in use; zeros where that is not measured."""

    def free_memory(self) -> tuple[int, int]:
        """Returns the free and the total bytes of the device."""

    def release_memory(self) -> None:
        """Gives memory that torch holds for later back to the device."""

    def measure_peak_bytes(self, work: Callable[[], _T]) -> tuple[_T, int]:
        """Runs `work` and waits for it; returns its result, and the peak of the bytes that torch
        allocated."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Returns True if memory ran out."""

    def is_fatal(self, error: BaseException) -> bool:
        """Returns True if the device can run nothing more in this process; may wait for it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if memory ran out; for some errors of torch only the text shows it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
