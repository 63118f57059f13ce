"""Counts the waits for a device that torch itself causes, such as reads of a number."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Final, TypeVar

import torch

T = TypeVar("T")

_WAITS: Final = "called a synchronizing CUDA operation"


def count_hidden_waits(device: torch.device, work: Callable[[], T]) -> tuple[T, int | None]:
    """Returns the result of `work`, and the number of hidden waits; None where torch counts none.

    torch counts them on CUDA only: it warns of each. A wait for an event is not among them.
    """
    if device.type != "cuda":
        return work(), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return result, sum(_WAITS in str(warning.message) for warning in caught)
