"""A device that fails: `python -m support.failing_device` runs `qkv` on it.

The first number of a request's query selects the failure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch

import qkv.api.app
import qkv.engine.device_errors
from qkv.cli.main import main
from qkv.engine.engine import Engine
from qkv.engine.executor import JobOutput, execute
from qkv.jobs.job import Job

POISON: Final = 6661.0
"""The batch of the request fails."""
STICKY: Final = 6662.0
"""The batch and all later batches of the process fail."""
GREEDY: Final = 6663.0
"""Memory runs out unless the request is alone in its batch."""
ENDING: Final = 6664.0
"""The batch calls sys.exit."""

_broken: list[bool] = []


def first_number(job: Job) -> float:
    """Returns the first number of the job's query."""
    query = job.inputs.tensors.get("query")
    return 0.0 if query is None else float(np.frombuffer(query.data, np.float32)[0])


def failing(jobs: Sequence[Job], *how: Any) -> list[JobOutput]:
    """Runs jobs as `execute` does, unless one selects a failure."""
    seen = {first_number(job) for job in jobs}
    if STICKY in seen:
        _broken.append(True)
    if _broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if POISON in seen:
        raise RuntimeError("marked")
    if ENDING in seen:
        sys.exit("marked")
    if GREEDY in seen and len(jobs) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
    return execute(jobs, *how)


def device_works(_: torch.device) -> bool:
    """Replaces `device_errors.device_works`; returns False after a sticky failure."""
    return not _broken


if __name__ == "__main__":
    qkv.api.app.Engine = partial(Engine, execute=failing)  # type: ignore[assignment, attr-defined]
    qkv.engine.device_errors.device_works = device_works  # type: ignore[assignment]
    main(prog_name="qkv")
