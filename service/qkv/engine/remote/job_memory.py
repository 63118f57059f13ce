"""The tensors of a job in memory that a worker and a device process share."""

from __future__ import annotations

import numpy as np

from qkv.attention.layers.layer import Layer
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.tensors import RawTensor

__all__ = ["input_bytes", "read_inputs", "write_inputs"]


def input_bytes(plan: Plan) -> int:
    """Returns the size of the memory for the inputs of a job: its tensors, and its layer's."""
    return plan.input_layout.size + plan.layer_layout.size


def write_inputs(job: Job, memory: np.ndarray) -> None:
    """Copies the input tensors of a job, and those of its layer."""
    plan, buffer = job.plan, memory.data
    plan.input_layout.write(job.tensors, buffer)
    if job.layer is not None:
        weights = {name: RawTensor.from_numpy(a) for name, a in job.layer.tensors.items()}
        plan.layer_layout.write(weights, buffer[plan.input_layout.size :])


def read_inputs(plan: Plan, memory: np.ndarray) -> tuple[dict[str, RawTensor], Layer | None]:
    """Returns the tensors and the layer of a job whose inputs are in memory. Its worker has checked
    them."""
    buffer, layer = memory.data, plan.inputs.layer
    if layer is not None:
        weights = plan.layer_layout.read(buffer[plan.input_layout.size :])
        layer = layer.with_numbers({name: raw.numpy() for name, raw in weights.items()})
    return plan.input_layout.read(buffer), layer
