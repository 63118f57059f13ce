"""The implementations of `Device`: memory, errors and the choice of the device."""

from __future__ import annotations

import pytest
import torch

from qkv.engine.device.accelerator import Accelerator
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.device.selection import find_device, new_device
from support.pretended_device import PretendedDevice, faults

CPU = torch.device("cpu")


def test_failed_launch_is_not_fatal() -> None:
    """Both errors have the same class, but only after one of them the next launch works."""
    device, error = PretendedDevice(), torch.AcceleratorError("invalid configuration argument")
    assert not device.is_fatal(error)
    faults.is_broken = True
    assert device.is_fatal(error)
    assert not device.is_fatal(RuntimeError("shapes differ"))
    assert not CpuDevice().is_fatal(error)


@pytest.mark.parametrize("device", [CpuDevice(), Accelerator(CPU)])
def test_out_of_memory(device: CpuDevice | Accelerator) -> None:
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] can't allocate memory: 8 bytes"),
    ):
        assert device.is_out_of_memory(error)
    for other in (RuntimeError("shapes differ"), ValueError("out of memory")):
        assert not device.is_out_of_memory(other)


def test_peak_is_that_of_torch_allocations() -> None:
    device = CpuDevice()

    def work() -> torch.Tensor:
        one, other = torch.empty(1 << 20), torch.empty(1 << 20)
        del one
        return torch.cat([other, torch.empty(1 << 19)])

    before = torch.zeros(1 << 10)
    result, peak = device.measure_peak_bytes(work)
    assert len(result) == (1 << 20) + (1 << 19)
    assert peak == 4 * ((1 << 20) + (1 << 19) + (1 << 20) + (1 << 19))
    assert device.measure_peak_bytes(lambda: before) == (before, 0)
    with pytest.raises(ZeroDivisionError):
        device.measure_peak_bytes(lambda: 1 / 0)
    assert device.measure_peak_bytes(lambda: torch.empty(8))[1] == 32


@pytest.mark.gpu
def test_peak_is_that_of_torch_allocations_on_an_accelerator() -> None:
    device = new_device(find_device("auto"))
    if not device.is_accelerator:
        pytest.skip("needs an accelerator")
    where = device.torch_device
    _, peak = device.measure_peak_bytes(
        lambda: torch.empty(1 << 20, device=where) + torch.empty(1 << 20, device=where)
    )
    assert peak == 12 << 20
    assert device.memory_usage().total > 12 << 20


def test_device_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_device("cpu") == CPU
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert find_device("auto") == CPU
    with pytest.raises(ValueError, match="QKV_DEVICE is cuda, but torch finds no such device"):
        find_device("cuda")
    found = torch.device("cuda", 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    assert find_device("auto") == find_device("cuda") == torch.device("cuda")
    assert find_device("cpu") == CPU


def test_tensors_of_the_cpu_stay_where_they_are() -> None:
    device = new_device(CPU)
    assert isinstance(device, CpuDevice)
    dense, turned = torch.ones(2, 3), torch.ones(2, 3).T
    tensors = device.load({"dense": dense, "turned": turned})
    assert tensors["dense"] is dense
    assert tensors["turned"] is turned
    unloaded = device.unload(tensors).wait()
    assert unloaded["dense"] is dense
    assert unloaded["turned"].is_contiguous()
    stopwatch = device.start_stopwatch()
    stopwatch.stop()
    assert stopwatch.seconds() >= 0
