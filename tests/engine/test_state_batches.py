"""Jobs with a state in the engine: stacked on a device, and on several threads."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from qkv.engine.device.cpu import CpuDevice
from qkv.engine.executor import execute
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.each import each
from support.engines import LIMITS
from support.pretended_device import PretendedDevice, counts
from support.state_requests import (
    BOTH,
    CASES,
    Arrays,
    assert_same_bits,
    part,
    run,
    state_of,
    tokens,
)

EPS: Final = float(np.finfo(np.float64).eps)


@each("name", [*CASES])
def test_jobs_with_a_state_are_stacked_on_a_device(name: str) -> None:
    """One call serves sequences of several clients, and waits for the device once."""
    case = CASES[name]
    fields: dict[str, Any] = {"parameters": {"chunk": 16}, "outputs": BOTH}
    states = [state_of(run(case, tokens(n, 9 + 10 * n, case), **fields)) for n in range(3)]
    fields["parameters"] |= case.parameters
    jobs = []
    for n, state in enumerate(states):
        arrays = {**tokens(10 + n, 7, case), **state}
        raw = {tensor: RawTensor.from_numpy(x) for tensor, x in arrays.items()}
        jobs.append(Job.new(Plan, case.variant, Message(fields, raw), LIMITS))
    assert len({job.batch_key for job in jobs}) == 1
    device = PretendedDevice()
    together = execute(jobs, device, stack=True)
    assert counts["sync"] == 1
    for job, found in zip(jobs, together, strict=True):
        (alone,) = execute([job], device, stack=True)
        assert found.call_size == 3
        for tensor, raw_output in alone.outputs.items():
            one, other = raw_output.numpy(), found.outputs[tensor].numpy()
            np.testing.assert_allclose(other, one, rtol=0, atol=1e2 * EPS, err_msg=tensor)


@each("name", [*CASES])
def test_jobs_of_no_tokens_are_stacked_on_a_device(name: str) -> None:
    """Also with tails of several lengths."""
    case = CASES[name]
    fields: dict[str, Any] = {"parameters": {"chunk": 16}, "outputs": BOTH}
    none = part(tokens(0, 1, case), 0, 0)
    states = [state_of(run(case, tokens(n, n, case), **fields)) for n in (9, 21)]
    fields["parameters"] |= case.parameters
    jobs = []
    for state in states:
        raw = {tensor: RawTensor.from_numpy(x) for tensor, x in {**none, **state}.items()}
        jobs.append(Job.new(Plan, case.variant, Message(fields, raw), LIMITS))
    results = execute(jobs, PretendedDevice(), stack=True)
    for state, result in zip(states, results, strict=True):
        found = {tensor: output.numpy() for tensor, output in result.outputs.items()}
        assert found["output"].shape == (1, 2, 0, 3)
        assert_same_bits(state_of(found), state)


@each("name", [*CASES])
def test_bits_do_not_depend_on_the_threads_that_a_large_job_may_take(name: str) -> None:
    """The whole sequence is large enough for several threads; its last part is not."""
    case = CASES[name]
    inputs = tokens(11, 1500, case, heads=(4, 4, 4), D=64, E=64, dtype="float32")
    fields: dict[str, Any] = {"parameters": dict(case.parameters), "outputs": BOTH}

    def execute_with(threads: int, arrays: Arrays) -> Arrays:
        raw = {tensor: RawTensor.from_numpy(x) for tensor, x in arrays.items()}
        job = Job.new(Plan, case.variant, Message(fields, raw), LIMITS)
        (result,) = execute([job], CpuDevice(), stack=False, threads=threads)
        return {tensor: x.numpy() for tensor, x in result.outputs.items()}

    whole = execute_with(2, inputs)
    first = execute_with(1, part(inputs, 0, 1490))
    rest = execute_with(2, {**part(inputs, 1490, 1500), **state_of(first)})
    joined = np.concatenate([first["output"], rest["output"]], 2)
    assert_same_bits({"output": joined, **state_of(rest)}, whole)
