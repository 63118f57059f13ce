"""Out-of-memory and other device errors, and the memory budget of a batch."""

from __future__ import annotations

import os
import re
import traceback
from typing import Final

import torch

from qkv.errors import Internal, PayloadTooLarge, QkvError, ServiceUnavailable

__all__ = [
    "MemoryBudget",
    "device_works",
    "is_fatal",
    "is_out_of_memory",
    "release_memory",
    "to_client_error",
]

_REQUESTED: Final = re.compile(r"allocate ([\d.]+) (bytes|[KMGTPE]iB)")
_OUT_OF_MEMORY: Final = ("can't allocate", "CUDA error: out of memory", "ALLOC_FAILED")
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_NEARLY_ALL: Final = 0.9
_MIN_BUDGET_BYTES: Final = 1 << 20
_RECOVERY_STEPS: Final = 64  # full batches without an error, until an empty budget is whole again


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if memory ran out; torch on a CPU says so in the message only."""
    is_named = isinstance(error, RuntimeError) and any(
        text in str(error) for text in _OUT_OF_MEMORY
    )
    return is_named or isinstance(error, MemoryError | torch.OutOfMemoryError)


def is_fatal(error: BaseException, device: torch.device) -> bool:
    """Returns True if nothing will run in this process any more: CUDA's context is broken. A new
    launch tells this from an error of one launch only."""
    is_named = isinstance(error, RuntimeError) and "CUDA error" in str(error)
    return (is_named or isinstance(error, torch.AcceleratorError)) and not device_works(device)


def device_works(device: torch.device) -> bool:
    """Runs the smallest computation on the device; returns True if it succeeds."""
    try:
        return bool(torch.ones(1, device=device).sum().item() == 1)
    except RuntimeError as error:
        return is_out_of_memory(error)


def release_memory(error: BaseException, device: torch.device) -> None:
    """Drops the references that a failed run holds, and torch's cache."""
    traceback.clear_frames(error.__traceback__)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def to_client_error(error: BaseException, device: torch.device) -> QkvError:
    """Returns the error for the client whose job failed alone."""
    if isinstance(error, QkvError):
        return error
    if not is_out_of_memory(error):
        return Internal("the computation failed")
    free, total = _memory(device)
    if _requested_bytes(error) > total or free > _NEARLY_ALL * total:
        return PayloadTooLarge(
            f"it needs more memory than the device has, which is {total} bytes", limit=total
        )
    return ServiceUnavailable("out of memory on the device")


def _requested_bytes(error: BaseException) -> float:
    """Returns the bytes that could not be allocated; 0 if the message does not say."""
    if (found := _REQUESTED.search(str(error))) is None:
        return 0
    number, unit = found.groups()
    return float(number) * 1024.0 ** _UNITS.index(unit)


def _memory(device: torch.device) -> tuple[int, int]:
    """Returns the device's free bytes, once memory was released, and its total. On a CPU none
    counts as free: what other processes use changes from one moment to the next."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    return 0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class MemoryBudget:
    """Most bytes of tensors in a batch: halved when memory runs out, and slowly raised again.

    Args:
        limit: the most it ever is.

    Attributes:
        bytes: the most now.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self.bytes = limit

    def lower(self, failed_bytes: int) -> None:
        """Halves it after a batch of so many bytes ran out of memory."""
        self.bytes = max(_MIN_BUDGET_BYTES, min(self.bytes, failed_bytes) // 2)

    def recover(self, batch_bytes: int) -> None:
        """Raises it a little after a batch of so many bytes ran; one far below it counts not."""
        if 2 * batch_bytes >= self.bytes:
            self.bytes = min(self._limit, self.bytes + self._limit // _RECOVERY_STEPS)
