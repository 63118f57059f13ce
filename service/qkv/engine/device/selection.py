"""The choice of the device: by name, or the accelerator that torch finds."""

from __future__ import annotations

import torch

from qkv.engine.device.accelerator import Accelerator
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.device.device import Device
from qkv.engine.device.layer_memory import LAYER_BYTES


def find_device(name: str) -> torch.device:
    """Returns the device of a name: cpu, cuda, or cuda:1 for the second one.

    "auto" is the accelerator if torch finds one, else the CPU. Call it in the process that uses the
    device: a process that has looked for it cannot fork.

    Raises:
        ValueError: torch finds no such device.
    """
    kind, _, index = name.partition(":")
    accelerator = (
        None if kind == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    )
    is_missing = kind not in ("auto", "cpu") and (accelerator is None or accelerator.type != kind)
    if is_missing or (index and int(index) >= torch.accelerator.device_count()):
        raise ValueError(f"QKV_DEVICE is {name}, but torch finds no such device")
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, int(index)) if index else torch.device(accelerator.type)


def new_device(
    torch_device: torch.device, tf32: bool = False, layer_bytes: int = LAYER_BYTES
) -> Device:
    """Returns the device of tensors on a device of torch.

    Args:
        torch_device: as `find_device` returns it.
        tf32: products of float32 matrices on an accelerator may round their factors to 11 bits.
        layer_bytes: what loaded layers may take on an accelerator.
    """
    if torch_device.type == "cpu":
        return CpuDevice()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    return Accelerator(torch_device, layer_bytes)
