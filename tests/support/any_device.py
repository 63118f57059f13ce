"""A fixture with the devices on which the tests of the engine run."""

from __future__ import annotations

import pytest

from support.pretended_device import PretendedDevice


@pytest.fixture(params=["cpu", "pretended"])
def any_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test on the CPU and, with stacked batches, on the pretended accelerator."""
    if request.param == "pretended":
        monkeypatch.setattr("support.engines.new_test_device", _half_used_device)
    return str(request.param)


def _half_used_device() -> PretendedDevice:
    device = PretendedDevice()
    device.free_bytes //= 2  # memory that runs out is used by others, as on a CPU
    return device
