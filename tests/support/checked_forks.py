"""Runs `qkv` and writes, before each fork, the state of the driver and of torch in its process.

A process that has initialised the driver of an accelerator cannot hand it on to a fork. The tests
run this module as a command; the variable `FORK_LOG` names the file.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

FORK_LOG: Final = "FORK_LOG"
LOOK_FIRST: Final = "LOOK_FOR_THE_DEVICE"
"""A variable: if it is set, the process looks for the device before it serves, as it must not."""
NOT_INITIALIZED: Final = 3
"""CUDA_ERROR_NOT_INITIALIZED, of CUDA's driver API."""

_HEAVY: Final[tuple[str, ...]] = ("torch._inductor", "triton")  # they would be part of each process
_HARMLESS: Final = ("is_initialized",)  # reads a variable of torch


class Fork(NamedTuple):
    """The state of a process before it forks.

    Attributes:
        pid: its id.
        calls: functions of torch that it has called and that may initialise a driver.
        modules: modules that it has imported and does not need.
        driver: status of CUDA's driver; None without a driver.
    """

    pid: int
    calls: list[str]
    modules: list[str]
    driver: int | None


def read_forks(log: Path, pid: int) -> list[Fork]:
    """Returns the forks of a process so far."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [fork for line in lines if (fork := Fork(*json.loads(line))).pid == pid]


def _record_calls(calls: list[str], module: types.ModuleType) -> None:
    """Replaces the public functions of a module by ones that also record their names."""

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(f"{module.__name__}.{name}")
            return function(*args, **kwargs)

        return call

    for name in set(module.__all__).difference(_HARMLESS):
        function = getattr(module, name, None)
        if isinstance(function, types.FunctionType):
            setattr(module, name, recorded(name, function))


def _driver_status() -> int | None:
    """Returns the status of a call that initialises nothing; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())))


def main() -> None:
    """Runs the command, and records each fork of it and of its children."""
    import torch

    calls: list[str] = []
    for module in (torch.accelerator, torch.cuda):
        _record_calls(calls, module)
    log = os.environ.pop(FORK_LOG)

    def record() -> None:
        modules = [name for name in _HEAVY if name in sys.modules]
        fork = Fork(os.getpid(), calls, modules, _driver_status())
        with open(log, "a") as file:
            file.write(json.dumps(fork) + "\n")

    os.register_at_fork(before=record)
    from qkv.cli.main import main as run
    from qkv.engine.device.selection import find_device

    if os.environ.pop(LOOK_FIRST, None):
        find_device("auto")
    run()


if __name__ == "__main__":
    main()
