"""A device with memory of its own, by `torch.accelerator`, `torch.Stream` and `torch.Event`.

Copies run in streams of their own. So the inputs of a batch arrive, and the outputs of another
leave, while the device computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from qkv.engine.device.device import MemoryUsage, Stopwatch, Unloading, is_out_of_memory
from qkv.engine.device.layer_memory import LAYER_BYTES, LayerMemory

_T = TypeVar("_T")


class Accelerator:
    """A device with memory of its own, which runs beside the CPU.

    The methods whose names begin with `new_` or `current_` create or find streams and events.

    Args:
        torch_device: the device of its tensors.
        layer_bytes: what loaded layers may take.
    """

    is_accelerator = True

    def __init__(self, torch_device: torch.device, layer_bytes: int = LAYER_BYTES) -> None:
        self.torch_device = torch_device
        self.synchronizations = 0
        self.layer_memory = LayerMemory(self.load, layer_bytes)

    def use_in_this_thread(self) -> None:
        """Makes it torch's current device; another one would get a context, and its memory."""
        if self.torch_device.index is not None:
            torch.accelerator.set_device_index(self.torch_device.index)

    def new_stream(self) -> torch.Stream:
        """Returns a new queue of work."""
        return torch.Stream(self.torch_device)

    def new_event(self) -> torch.Event:
        """Returns a new mark in a queue of work, with its time."""
        return torch.Event(self.torch_device, enable_timing=True)

    def current_stream(self) -> torch.Stream:
        """Returns the queue of the computations."""
        return torch.accelerator.current_stream(self.torch_device)

    @cached_property
    def _incoming(self) -> torch.Stream:
        return self.new_stream()

    @cached_property
    def _outgoing(self) -> torch.Stream:
        return self.new_stream()

    def empty_on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a tensor in pinned memory, which torch keeps for later tensors."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def load(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copies tensors to the device; later computations wait for the copies."""
        with self._incoming:
            loaded = {n: t.to(self.torch_device, non_blocking=True) for n, t in tensors.items()}
        self.current_stream().wait_stream(self._incoming)
        return loaded

    def unload(self, tensors: Mapping[str, Tensor]) -> Unloading:
        """Starts to copy tensors to the CPU, once the computations so far are done."""
        return _Copies(self, self._outgoing, tensors)

    def start_stopwatch(self) -> Stopwatch:
        """Returns a stopwatch by events of the device."""
        return _EventStopwatch(self)

    def synchronize(self, event: torch.Event) -> None:
        """Waits for an event."""
        self.synchronizations += 1
        event.synchronize()

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
        """Drops the loaded layers, and empties the allocator's cache."""
        self.layer_memory.clear()
        torch.accelerator.empty_cache()

    def measure_peak_bytes(self, work: Callable[[], _T]) -> tuple[_T, int]:
        """Returns the result, and the allocator's peak without what was allocated before."""
        torch.accelerator.synchronize(self.torch_device)
        torch.accelerator.reset_peak_memory_stats(self.torch_device)
        before = torch.accelerator.memory_allocated(self.torch_device)
        result = work()
        torch.accelerator.synchronize(self.torch_device)
        self.synchronizations += 2
        peak = torch.accelerator.max_memory_allocated(self.torch_device)
        return result, int(peak - before)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Returns True if the device's or the CPU's memory ran out."""
        return is_out_of_memory(error)

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
            return is_out_of_memory(error)


class _EventStopwatch:
    """A `Stopwatch` between two events in the queue of the computations."""

    def __init__(self, device: Accelerator) -> None:
        self._stream = device.current_stream()
        self._first, self._last = device.new_event(), device.new_event()
        self._first.record(self._stream)

    def stop(self) -> None:
        self._last.record(self._stream)

    def seconds(self) -> float:
        return float(self._first.elapsed_time(self._last)) / 1e3


class _Copies:
    """An `Unloading` by a stream of copies."""

    def __init__(
        self, device: Accelerator, stream: torch.Stream, tensors: Mapping[str, Tensor]
    ) -> None:
        self._device = device
        # kept until the copies are done: torch may use their memory again once they are freed
        self._sources: dict[str, Tensor] = {n: t.contiguous() for n, t in tensors.items()}
        self._first, self._last = device.new_event(), device.new_event()
        stream.wait_stream(device.current_stream())
        with stream:
            self._first.record(stream)
            self._copies = {n: self._copy(t) for n, t in self._sources.items()}
            self._last.record(stream)

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        copy = self._device.empty_on_host(tuple(tensor.shape), tensor.dtype)
        return copy.copy_(tensor, non_blocking=True)

    def wait(self) -> dict[str, Tensor]:
        self._device.synchronize(self._last)
        self._sources.clear()
        return self._copies

    def seconds(self) -> float:
        return float(self._first.elapsed_time(self._last)) / 1e3
