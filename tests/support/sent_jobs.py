"""Jobs as the device process receives them."""

from __future__ import annotations

import numpy as np

from qkv.engine.remote.job_memory import layouts_of, read_inputs, write_inputs
from qkv.jobs import plan_codec
from qkv.jobs.job import Job


def send(job: Job) -> Job:
    """Returns a job after its way to the device process."""
    memory = np.zeros(layouts_of(job.plan).input_bytes, np.uint8)
    write_inputs(job, memory)
    plan = plan_codec.decode(plan_codec.encode(job.plan))
    return Job(plan, *read_inputs(plan, memory))
