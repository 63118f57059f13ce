"""A pretended accelerator: tensors whose operations run on an inner tensor of the CPU.

It has no memory of its own, but what holds on a GPU holds on it: a tensor of the CPU meets none of
the device in an operation, numbers are read by a synchronisation, and memory can run out. torch's
dispatcher calls it by the key PrivateUse1. `PretendedDevice` is the `Device` of such tensors.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.utils import backend_registration

from qkv.engine.device.accelerator import Accelerator
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.device.device import MemoryUsage

_T = TypeVar("_T")

_NAME: Final = "pretended"
_COPIES: Final = ("aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::to.device")
# these read numbers: a GPU would have to finish its work first
_READS: Final = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero")

counts: Counter[str] = Counter()
"""The synchronisations (by "sync"), copies ("to device", "to host") and "operations" so far."""
log: list[str] = []
"""The copies, operations and synchronisations in order, and the streams that wait or copy."""

_live: weakref.WeakSet[PretendedTensor] = weakref.WeakSet()


class _Module(backend_registration._DummyBackendModule):
    """Hides the device from code that looks for an accelerator."""

    def is_available(self) -> bool:
        return False


class _Faults:
    """The faults of the device.

    Attributes:
        allocations: tensors that can be allocated until memory runs out; None: any number.
        operations: operations until the device is broken; None: any number.
        is_broken: every operation fails.
    """

    def __init__(self) -> None:
        self.allocations: int | None = None
        self.operations: int | None = None
        self.is_broken = False

    def count_allocation(self) -> None:
        """Counts a new tensor.

        Raises:
            torch.OutOfMemoryError: memory has run out.
        """
        if self.allocations is not None:
            self.allocations -= 1
            if self.allocations < 0:
                raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 MiB.")

    def count_operation(self) -> None:
        """Counts an operation.

        Raises:
            torch.AcceleratorError: the device is broken.
        """
        if self.operations is not None:
            self.operations -= 1
            self.is_broken = self.is_broken or self.operations < 0
        if self.is_broken:
            raise torch.AcceleratorError("an illegal memory access was encountered")


faults: Final = _Faults()
"""The faults of the device; `PretendedDevice` resets them."""


class PretendedTensor(Tensor):
    """A tensor of the device.

    Attributes:
        numbers: on the CPU.
    """

    numbers: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendedTensor:
        tensor: PretendedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=PRETENDED,
        )
        tensor.numbers = inner
        _live.add(tensor)
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # in inference mode, operations made of others are not taken apart before this call
        run = operation.decompose if _is_made_of_others(operation) else partial(_call, operation)
        return run(*args, **(kwargs or {}))

    def tolist(self) -> Any:
        """Reads all numbers."""
        _record_sync("tolist")
        return self.numbers.tolist()


@cache
def _is_made_of_others(operation: Any) -> bool:
    return bool(operation._can_decompose())


def _call(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operation on the inner tensors."""
    faults.count_operation()
    name = operation.name().partition(".")[0]
    ours: list[PretendedTensor] = []
    theirs: list[Tensor] = []

    def to_inner(value: Any) -> Any:
        if isinstance(value, PretendedTensor):
            ours.append(value)
            return value.numbers
        if isinstance(value, Tensor):
            theirs.append(value)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    inner_args, inner_kwargs = _map(to_inner, args), _map(to_inner, kwargs)
    target = _target(name, args, kwargs)
    is_to_host = name in _COPIES and target[0] == "cpu"
    _record(name, ours, theirs, target)
    inner_kwargs.pop("pin_memory", None)
    result = operation(*inner_args, **inner_kwargs)
    if is_to_host:
        return result.clone() if name == "aten::_to_copy" else result
    known = {id(tensor.numbers): tensor for tensor in ours}  # an operation may return its argument
    return _map(lambda value: _to_outer(value, known, ours), result)


_SEQUENCES: Final = (tuple, list)


def _map(function: Callable[[Any], Any], values: Any) -> Any:
    """Applies a function to all that tuples, lists and dictionaries contain.

    torch's own `tree_map` took half of the time of an operation.
    """
    if isinstance(values, _SEQUENCES):
        return type(values)([_map(function, value) for value in values])
    if isinstance(values, dict):
        return {name: _map(function, value) for name, value in values.items()}
    return function(values)


def _record_sync(why: str) -> None:
    counts["sync"] += 1
    log.append(f"sync: {why}")


def _record(name: str, ours: list[PretendedTensor], theirs: list[Tensor], target: Any) -> None:
    """Records an operation; `target` is the device that it copies to, and True if it waits."""
    counts["operations"] += 1
    device, waits = target
    if name in _READS:
        _record_sync(name)
    elif name in _COPIES and (device == "cpu" or theirs):
        where = "to host" if device == "cpu" else "to device"
        counts[where] += 1
        log.append(where)
        if waits:
            _record_sync(where)
    elif name not in _COPIES and any(tensor.dim() for tensor in theirs):
        raise RuntimeError(f"{name}: Expected all tensors to be on the same device")
    else:
        log.append(name)


def _target(name: str, args: Any, kwargs: Any) -> tuple[str, bool]:
    """Returns the type of the device that an operation writes to, and True if a copy waits."""
    waits = not kwargs.get("non_blocking", len(args) > 2 and args[2] is True)
    if name in ("aten::copy_", "aten::_copy_from"):
        written = args[0] if name == "aten::copy_" else args[1]
        return ("pretended" if isinstance(written, PretendedTensor) else "cpu"), waits
    device = kwargs.get("device")
    return ("pretended" if device is None else torch.device(device).type), waits


def _to_outer(value: Any, known: dict[int, PretendedTensor], ours: list[PretendedTensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if id(value) in known:
        return known[id(value)]
    if faults.allocations is not None:
        storages = {tensor.numbers.untyped_storage().data_ptr() for tensor in ours}
        if value.untyped_storage().data_ptr() not in storages:  # a view allocates nothing
            faults.count_allocation()
    return PretendedTensor(value)


backend_registration._setup_privateuseone_for_python_backend(_NAME, backend_module=_Module())
PRETENDED: Final = torch.device(_NAME, 0)
"""The device of the tensors."""
_fallback = torch.library.Library("_", "IMPL")
_fallback.fallback(_call, "PrivateUse1")
_kernels = torch.library.Library("aten", "IMPL")


def _arange(*values: Any, **kwargs: Any) -> PretendedTensor:
    """Returns a range; torch's own kernel would resize a tensor in place."""
    faults.count_operation()
    faults.count_allocation()
    kwargs.pop("pin_memory", None)
    return PretendedTensor(torch.arange(*values, **kwargs | {"device": "cpu"}))


for _name in ("arange.start", "arange.start_step"):
    _kernels.impl(_name, _arange, "PrivateUse1")


def live_tensors() -> int:
    """Returns the number of tensors of the device that are still referred to."""
    # The last generation has all objects of torch, and takes half a second. A tensor that a graph
    # of autograd refers to is revived by torch once, so that only the next collection frees it.
    for generation in (0, 1, 2, 2):
        if _live:
            gc.collect(generation)
    return len(_live)


class _Stream:
    """A stream of the device, which is done with everything at once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        log.append(f"in {self.name}")

    def __exit__(self, *_: object) -> None:
        log.append(f"out of {self.name}")

    def wait_stream(self, other: _Stream) -> None:
        """Records that work of this stream comes after that of the other so far."""
        log.append(f"{self.name} waits for {other.name}")


class _Event:
    """An event of the device."""

    def __init__(self, device: PretendedDevice) -> None:
        self._device, self._at = device, 0.0

    def record(self, stream: _Stream) -> None:
        """Records the time."""
        self._at = time.perf_counter()
        log.append(f"event in {stream.name}")

    def synchronize(self) -> None:
        """Counts a synchronisation; returns once the device ends waits."""
        _record_sync("event")
        self._device.ends_waits.wait()

    def elapsed_time(self, other: _Event) -> float:
        """Returns milliseconds."""
        return (other._at - self._at) * 1e3


class PretendedDevice(Accelerator):
    """The `Device` of pretended tensors. It stands in for what torch cannot ask of such a backend.

    Attributes:
        released: how often its memory was released.
        free_bytes: the free memory that it reports.
        ends_waits: synchronisations return once it is set.
    """

    def __init__(self) -> None:
        super().__init__(PRETENDED)
        self.released, self.free_bytes, self.ends_waits = 0, 1 << 30, threading.Event()
        self.ends_waits.set()
        self._cpu = CpuDevice()
        self._compute = _Stream("compute")
        self._names = iter(("incoming", "outgoing"))
        faults.__init__()  # type: ignore[misc]
        counts.clear()
        log.clear()

    def use_in_this_thread(self) -> None:
        """Does nothing: torch cannot select such a device."""

    def new_stream(self) -> Any:
        """Returns a stream; the first is for inputs, as `Accelerator` uses it."""
        return _Stream(next(self._names))

    def new_event(self) -> Any:
        """Returns an event."""
        return _Event(self)

    def current_stream(self) -> Any:
        """Returns the stream of the computations."""
        return self._compute

    def empty_on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a tensor of the CPU, which stands for pinned memory."""
        return torch.empty(shape, dtype=dtype)

    def memory_usage(self) -> MemoryUsage:
        """Returns the bytes of the live tensors."""
        held = sum(tensor.numbers.nbytes for tensor in list(_live))
        return MemoryUsage(held, held, 1 << 30)

    def free_memory(self) -> tuple[int, int]:
        """Returns the free bytes and 1 GiB."""
        return self.free_bytes, 1 << 30

    def release_memory(self) -> None:
        """Counts the call; memory is available again."""
        self.released += 1
        faults.allocations = None

    def measure_peak_bytes(self, work: Callable[[], _T]) -> tuple[_T, int]:
        """Measures the inner tensors."""
        return self._cpu.measure_peak_bytes(work)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts what the device does in a block."""
    before, counted = Counter(counts), Counter[str]()
    yield counted
    counted.update({name: count - before[name] for name, count in counts.items()})
