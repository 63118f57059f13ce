"""The random numbers of a second run of something: they are those of the first one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """Returns the state of the random numbers of a device."""
    numbers, place = _random_numbers(device)
    state: Tensor = numbers.get_rng_state(*place)
    return state


@contextmanager
def repeating(device: torch.device, state: Tensor) -> Iterator[None]:
    """Repeats what ran, with its random numbers; leaves no gradients, random numbers and casts.

    Args:
        device: of the tensors.
        state: that `random_state` returned.
    """
    numbers, place = _random_numbers(device)
    devices = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    caches = torch.is_autocast_cache_enabled()
    # weights cast without gradients would be taken for those of the model
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=kind):
            numbers.set_rng_state(state, *place)
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)


def _random_numbers(device: torch.device) -> tuple[Any, Sequence[torch.device]]:
    """Returns torch's module of the random numbers of a device, and its arguments.

    Without an argument they would be those of the current GPU.
    """
    if device.type in ("cpu", "meta"):
        return torch, ()
    return torch.get_device_module(device), () if device.type == "mps" else (device,)
