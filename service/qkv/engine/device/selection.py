"""The choice of the device: by name, or the accelerator that torch finds."""

from __future__ import annotations

import torch

from qkv.engine.device.accelerator import Accelerator
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.device.device import Device

__all__ = ["find_device", "new_device"]


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


def new_device(torch_device: torch.device, tf32: bool = False) -> Device:
    """Returns the device of tensors on a device of torch.

    Args:
        torch_device: as `find_device` returns it.
        tf32: products of float32 matrices on an accelerator may round their factors to 11 bits.
    """
    if torch_device.type == "cpu":
        return CpuDevice()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    return Accelerator(torch_device)
