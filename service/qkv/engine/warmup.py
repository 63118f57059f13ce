"""Warm-up: the first call of each variant, which costs torch more than all others.

`warm_up` runs before a process is ready. On an accelerator it also runs batches, whose bits are
compared with those of a request alone (see `batch_verifier`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import numpy as np

from qkv.attention import catalogue
from qkv.attention.signature import fixed_size
from qkv.errors import QkvError
from qkv.jobs.job import Job
from qkv.jobs.plan import Limits, Plan
from qkv.jobs.result import Result
from qkv.tensors import RawTensor
from qkv.wire.message import Message

_log = logging.getLogger("qkv.app")

_LIMITS: Final = Limits(response_bytes=1 << 20, job_bytes=1 << 20)


async def warm_up(submit: Callable[[Job], asyncio.Future[Result]], count: int) -> None:
    """Runs the smallest request of each variant.

    A first call costs torch about 30 ms, which must not appear in a client's timing.

    Args:
        submit: queues a job, and returns the future of its result.
        count: how often each runs at once.
    """
    for name, variant in catalogue.variants().items():
        tensors = {
            i.name: RawTensor.from_numpy(
                np.zeros([fixed_size(x) or 2 for x in i.letters], np.float32)
            )
            for i in variant.inputs.values()
            if not i.is_optional
        }
        for outputs in (["output"], list(variant.outputs)):
            job = Job.new(Plan, name, Message({"outputs": outputs}, tensors), _LIMITS)
            try:
                futures = [submit(Job(job.plan, job.tensors)) for _ in range(count)]
                await asyncio.gather(*futures)
            except QkvError:
                _log.exception("the warm-up of %s failed", name)
