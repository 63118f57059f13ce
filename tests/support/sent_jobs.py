"""Jobs as the device process receives them."""

from __future__ import annotations

import numpy as np

from qkv.engine.remote.job_codec import JobDecoder
from qkv.engine.remote.sent_plans import SentPlans
from qkv.jobs.job import Job, Limits


def send(job: Job, limits: Limits) -> Job:
    """Returns a job after its way to the device process."""
    plan, header = SentPlans().find(job)
    assert header is not None
    data = np.zeros(plan.input_bytes, np.uint8)
    plan.write_inputs(job, data)
    return JobDecoder(limits).plan(header).new_job(data)
