"""Steps of stacked jobs: the bits of each job alone, and no wait for the device."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from qkv.attention.catalogue import variants
from qkv.attention.signature import fixed_size
from qkv.attention.variant import Variant
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.executor import execute
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from support.engines import bits, new_job
from support.pretended_device import PretendedDevice, counting, log

SIZES: Final = {"H": 4, "G": 2, "J": 4, "V": 2, "T": 2, "L": 5, "S": 6, "D": 4, "E": 3}
PARAMETERS: Final = {"causal": True, "query_offset": "end", "dropout": 0.4, "rule": "delta"}


def jobs_of(variant: Variant) -> list[Job]:
    """Returns jobs of 1, 2 and 3 items with lengths of keys, which share tensors without B."""
    random = np.random.default_rng(0)
    known = variant.parameters.model_fields
    parameters = {n: value for n, value in PARAMETERS.items() if n in known}
    needed = {"key_lengths", "beta"} if "rule" in parameters else {"key_lengths", "alibi_slopes"}
    jobs: list[Job] = []
    for B in (1, 2, 3):
        arrays: dict[str, Any] = {}
        for spec in variant.inputs.values():
            if spec.is_optional and spec.name not in needed:
                continue
            sizes = {**SIZES, "B": B}
            shape = [fixed_size(x) or sizes.get(x, 4) for x in spec.letters]
            arrays[spec.name] = random.normal(size=shape).astype(np.float32)
            if spec.name == "key_lengths":
                arrays[spec.name] = random.integers(0, SIZES["S"] + 1, B)
        job = new_job(arrays, variant.name, Plan, outputs=["steps"], parameters=parameters)
        same = (
            {n: x for n, x in jobs[0].tensors.items() if not job.plan.has_batch(n)} if jobs else {}
        )
        jobs.append(Job(job.plan, {**job.tensors, **same}, job.layer))
    return jobs


@pytest.mark.parametrize(
    "variant", [v for v in variants().values() if v.steps], ids=lambda v: v.name
)
def test_stacked_steps_have_the_bits_of_each_job_alone(variant: Variant) -> None:
    jobs, device = jobs_of(variant), PretendedDevice()
    with counting() as counted:
        stacked = execute(jobs, device, stack=True)
    assert counted["sync"] == 1, log
    assert [result.times.stacked_count for result in stacked] == [3, 3, 3]
    for job, result in zip(jobs, stacked, strict=True):
        (alone,) = execute([job], CpuDevice(), stack=True)
        assert bits(result) == bits(alone)
        assert [*result.outputs] == list(job.plan.output_specs)
