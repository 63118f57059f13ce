"""A device that fails.

The first number of a request's query selects the failure.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from qkv.engine.device.cpu import CpuDevice
from qkv.engine.executor import Launched, launch
from qkv.jobs.job import Job

POISON: Final = 6661.0
"""The batch of the request fails."""
STICKY: Final = 6662.0
"""The batch and all later batches of the process fail."""
GREEDY: Final = 6663.0
"""Memory runs out unless the request is alone in its batch."""
ENDING: Final = 6664.0
"""The batch calls sys.exit."""
WAITING: Final = 6665.0
"""The batch makes the file that the variable `GATE` names, and waits until it is removed."""

broken: list[bool] = []
"""Not empty after a sticky failure."""


def first_number(job: Job) -> float:
    """Returns the first number of the job's query."""
    query = job.tensors.get("query")
    return 0.0 if query is None else float(np.frombuffer(query.data, np.float32)[0])


def failing(jobs: Sequence[Job], *how: Any) -> Launched:
    """Runs jobs as `launch` does, unless one selects a failure."""
    seen = {first_number(job) for job in jobs}
    if STICKY in seen:
        broken.append(True)
    if broken:
        raise torch.AcceleratorError("an illegal memory access was encountered")
    if POISON in seen:
        raise RuntimeError("marked")
    if ENDING in seen:
        sys.exit("marked")
    if WAITING in seen:
        gate = Path(os.environ["GATE"])
        gate.touch()
        while gate.exists():
            time.sleep(0.01)
    if GREEDY in seen and len(jobs) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
    return launch(jobs, *how)


class FailingDevice(CpuDevice):
    """A CPU that can run nothing more after a sticky failure."""

    def is_fatal(self, error: BaseException) -> bool:
        """Returns True after a sticky failure."""
        return bool(broken) and isinstance(error, RuntimeError)
