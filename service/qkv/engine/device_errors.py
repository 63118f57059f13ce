"""The client's error for an error of the device, and the memory budget of a batch."""

from __future__ import annotations

import re
import traceback
from typing import Final

from qkv.engine.device.device import Device
from qkv.errors import Internal, PayloadTooLarge, QkvError, ServiceUnavailable

_REQUESTED: Final = re.compile(r"allocate ([\d.]+) (bytes|[KMGTPE]iB)")
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_NEARLY_ALL: Final = 0.9
_MIN_BUDGET_BYTES: Final = 1 << 20
_RECOVERY_STEPS: Final = 64  # full batches without an error that restore an empty budget


class EngineStopped(ServiceUnavailable):
    """The engine runs no more jobs: its device has failed, or its process stops.

    An engine in another process may run the job.
    """


def release_memory(error: BaseException, device: Device) -> None:
    """Drops the references that a failed run holds, and torch's cache."""
    traceback.clear_frames(error.__traceback__)
    device.release_memory()


def to_client_error(error: BaseException, device: Device) -> QkvError:
    """Returns the error for the client of a job that failed when it ran alone."""
    if isinstance(error, QkvError):
        return error
    if not device.is_out_of_memory(error):
        return Internal("the computation failed")
    free, total = device.free_memory()
    if _requested_bytes(error) > total or free > _NEARLY_ALL * total:
        return PayloadTooLarge(
            f"the request needs more memory than the device's {total} bytes", limit=total
        )
    return ServiceUnavailable("out of memory on the device")


def _requested_bytes(error: BaseException) -> float:
    """Returns the size of the failed allocation in bytes; 0 if the message lacks it."""
    if (match := _REQUESTED.search(str(error))) is None:
        return 0
    number, unit = match.groups()
    return float(number) * 1024.0 ** _UNITS.index(unit)


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
