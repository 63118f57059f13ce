"""What a device says when it fails, and what that means for whoever waits."""

from __future__ import annotations

import os
import re
import traceback
from typing import Final

import torch

from qkv.errors import Internal, NotNow, QkvError, TooLarge

__all__ = ["Budget", "is_out_of_memory", "is_sticky", "make_room", "told", "works"]

_ASKED: Final = re.compile(r"allocate ([\d.]+) (bytes|[KMGTPE]iB)")
_OUT: Final = ("can't allocate", "CUDA error: out of memory", "ALLOC_FAILED")
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_NEARLY_ALL: Final = 0.9
_LEAST_BYTES: Final = 1 << 20
_STEPS: Final = 64  # full batches that go well, until a budget of nothing is whole again


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch on a CPU says it in words only."""
    is_said = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT)
    return is_said or isinstance(error, MemoryError | torch.OutOfMemoryError)


def is_sticky(error: BaseException, device: torch.device) -> bool:
    """Whether nothing will run in this process any more: CUDA's context is broken. What is wrong
    with one launch only is told apart by another."""
    is_said = isinstance(error, RuntimeError) and "CUDA error" in str(error)
    return (is_said or isinstance(error, torch.AcceleratorError)) and not works(device)


def works(device: torch.device) -> bool:
    """Whether the least that there is to compute can be."""
    try:
        return bool(torch.ones(1, device=device).sum().item() == 1)
    except RuntimeError as error:
        return is_out_of_memory(error)


def make_room(error: BaseException, device: torch.device) -> None:
    """Lets go of what a failed run still holds, and torch of what it keeps for later."""
    traceback.clear_frames(error.__traceback__)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def told(error: BaseException, device: torch.device) -> QkvError:
    """What a caller is told whose job failed alone."""
    if isinstance(error, QkvError):
        return error
    if not is_out_of_memory(error):
        return Internal("the computation failed")
    free, total = _memory(device)
    if _asked(error) > total or free > _NEARLY_ALL * total:
        return TooLarge(
            f"it needs more memory than the device has, which is {total} bytes", limit=total
        )
    return NotNow("out of memory on the device")


def _asked(error: BaseException) -> float:
    """Bytes that could not be had, as far as it is said."""
    if (found := _ASKED.search(str(error))) is None:
        return 0
    number, unit = found.groups()
    return float(number) * 1024.0 ** _UNITS.index(unit)


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free on a device, once room was made, and that it has. On a CPU none counts
    as free: what others hold there changes from one moment to the next."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    return 0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Budget:
    """Bytes of tensors that run together: fewer where memory has run out, and slowly more again.

    Args:
        most: as many as ever.

    Attributes:
        bytes: as many as now.
    """

    def __init__(self, most: int) -> None:
        self._most = self.bytes = most

    def lower(self, tried: int) -> None:
        """So many were too many."""
        self.bytes = max(_LEAST_BYTES, min(self.bytes, tried) // 2)

    def recover(self, ran: int) -> None:
        """A batch of so many bytes went well; one that is far below what may be says nothing."""
        if 2 * ran >= self.bytes:
            self.bytes = min(self._most, self.bytes + self._most // _STEPS)
