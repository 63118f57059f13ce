"""Requests with the numbers of real models are stacked: activations of MiniLM, and usual layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Final

import numpy as np
import pytest

from qkv.client.arrays import to_raw
from qkv.engine.executor import execute
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.engines import CPU, LIMITS, new_job
from support.minilm import Activations, activations, layer_weights
from support.pretended_device import PretendedDevice, counting

NAMES: Final = ("softmax", "sigmoid", "linear", "efficient", "taylor", "linformer")
LEAST_SHARE: Final = 0.95


def sentences() -> Iterator[list[Activations]]:
    """Yields the activations of all layers for each sentence."""
    for _, layers in groupby(activations(), key=lambda each: each.sentence):
        yield list(layers)


def job_of(each: Activations, name: str, **fields: Any) -> Job:
    """Returns a job with the queries, keys and values of a layer."""
    tensors = {
        "query": each.query_BHLD.numpy(),
        "key": each.key_BGSD.numpy(),
        "value": each.value_BGSE.numpy(),
    }
    return new_job(tensors, name, **fields)


def layer_job(
    name: str, x: RawTensor, tensors: Mapping[str, RawTensor], layout: str, heads: int
) -> Job:
    """Returns a job with a layer."""
    fields = {"outputs": ["output"], "layer": {"layout": layout, "heads": heads}}
    return Job.new(Plan, name, Message(fields, {"x": x}, dict(tensors)), LIMITS)


def is_stacked(job: Job) -> bool:
    """Returns True if the job shares a call with a request that has the same layer."""
    twin = Job(job.plan, dict(job.tensors), job.layer)
    return [output.times.stacked_count for output in execute([job, twin], CPU, stack=True)] == [
        2,
        2,
    ]


@pytest.mark.slow
@pytest.mark.representative
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *((name, {}) for name in NAMES),
        *((name, {"causal": True}) for name in NAMES if name != "linformer"),
    ],
)
def test_activations_of_a_model_are_stacked(name: str, parameters: dict[str, Any]) -> None:
    """The six layers of a sentence are a batch; one wait of the host for each call."""
    stacked, count = 0, 0
    for layers in sentences():
        jobs = [job_of(each, name, parameters=parameters) for each in layers]
        device = PretendedDevice()
        with counting() as counted:
            outputs = execute(jobs, device, stack=True)
        stacked += sum(output.times.stacked_count > 1 for output in outputs)
        count += len(jobs)
        assert counted["sync"] <= 2
    assert count == len(activations())
    assert stacked >= LEAST_SHARE * count


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_layers_of_a_model_are_stacked(name: str) -> None:
    """The layer projects the model's hidden states."""
    stacked = [
        is_stacked(
            layer_job(
                name,
                to_raw(each.x_BLM),
                {n: to_raw(t) for n, t in layer_weights()[each.layer].items()},
                "v2",
                12,
            )
        )
        for each in activations()[::4]
    ]
    assert sum(stacked) >= LEAST_SHARE * len(stacked)


@pytest.mark.parametrize("M", [64, 384, 768])
@pytest.mark.parametrize("is_scaled", [True, False], ids=["variance 1/M", "variance 1"])
@pytest.mark.parametrize("name", NAMES)
def test_layers_of_usual_widths_are_stacked(name: str, is_scaled: bool, M: int) -> None:
    """With weights of variance 1, queries are as large as 100: the call is in float64 then."""
    scale, stacked = M**-0.5 if is_scaled else 1.0, []
    for seed in range(3):
        random = np.random.default_rng(seed)

        def normal(*shape: int, scale: float = 1.0, random: Any = random) -> RawTensor:
            return RawTensor.from_numpy((random.normal(size=shape) * scale).astype(np.float32))

        weights = {f"W_{role}": normal(M, M, scale=scale) for role in ("query", "key", "value")}
        stacked.append(is_stacked(layer_job(name, normal(1, 64, M), weights, "v1", M // 64)))
    assert sum(stacked) >= LEAST_SHARE * len(stacked)
