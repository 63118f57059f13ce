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
_RECOVERY_STEPS: Final = 64  # full batches without an error that restore an empty budget


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if memory ran out; on a CPU only the text of torch's error shows it."""
    is_named = isinstance(error, RuntimeError) and any(
        text in str(error) for text in _OUT_OF_MEMORY
    )
    return is_named or isinstance(error, MemoryError | torch.OutOfMemoryError)


def is_fatal(error: BaseException, device: torch.device) -> bool:
    """Returns True if CUDA's context is broken, so that nothing can run in this process any more.
    A new launch distinguishes this from an error of a single launch."""
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
    """Returns the error for the client of a job that failed when it ran alone."""
    if isinstance(error, QkvError):
        return error
    if not is_out_of_memory(error):
        return Internal("the computation failed")
    free, total = _memory(device)
    if _requested_bytes(error) > total or free > _NEARLY_ALL * total:
        return PayloadTooLarge(
            f"the request needs more memory than the device's {total} bytes", limit=total
        )
    return ServiceUnavailable("out of memory on the device")


def _requested_bytes(error: BaseException) -> float:
    """Returns the size of the failed allocation in bytes; 0 if the message lacks it."""
    if (found := _REQUESTED.search(str(error))) is None:
        return 0
    number, unit = found.groups()
    return float(number) * 1024.0 ** _UNITS.index(unit)


def _memory(device: torch.device) -> tuple[int, int]:
    """Returns the device's free bytes, after memory was released, and its total bytes. On a CPU
    the free bytes are 0: the use of other processes changes from one moment to the next."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    return 0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class MemoryBudget:
    """Budget of tensor bytes for a batch: halved when memory runs out, then slowly raised again.

    Args:
        limit: the largest budget.

    Attributes:
        bytes: the current budget.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self.bytes = limit

    def lower(self, failed_bytes: int) -> None:
        """Halves the budget after a batch of so many bytes ran out of memory."""
        self.bytes = max(_MIN_BUDGET_BYTES, min(self.bytes, failed_bytes) // 2)

    def recover(self, batch_bytes: int) -> None:
        """Raises the budget a little after a batch of so many bytes ran, if the batch was close to
        it."""
        if 2 * batch_bytes >= self.bytes:
            self.bytes = min(self._limit, self.bytes + self._limit // _RECOVERY_STEPS)
