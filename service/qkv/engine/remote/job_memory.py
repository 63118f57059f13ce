"""The tensors of a job in memory that a worker and a device process share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qkv.attention.layers.layer import Layer
from qkv.jobs.buffer_layout import BufferLayout
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.tensors import RawTensor


class Layouts(NamedTuple):
    """The places of the tensors of a job in shared memory.

    Attributes:
        inputs: its tensors, without those of its layer.
        layer: those of its layer, behind the inputs; none without a layer.
        outputs: its outputs.
    """

    inputs: BufferLayout
    layer: BufferLayout
    outputs: BufferLayout

    @property
    def input_bytes(self) -> int:
        """Bytes of the tensors and of the layer."""
        return self.inputs.size + self.layer.size


def layouts_of(plan: Plan) -> Layouts:
    """Returns the layouts of the jobs of a plan."""
    return plan.derived(_new_layouts)


def _new_layouts(plan: Plan) -> Layouts:
    shapes, dtypes, layer = plan.inputs.sent_shapes, plan.inputs.dtypes, plan.inputs.layer
    weights = {} if layer is None else layer.tensors
    return Layouts(
        BufferLayout((name, dtypes[name], shape) for name, shape in shapes.items()),
        BufferLayout((name, a.dtype.name, a.shape) for name, a in weights.items()),
        BufferLayout((name, *spec) for name, spec in plan.output_specs.items()),
    )


def write_inputs(job: Job, memory: np.ndarray) -> None:
    """Copies the input tensors of a job, and those of its layer."""
    layouts, buffer = layouts_of(job.plan), memory.data
    layouts.inputs.write(job.tensors, buffer)
    if job.layer is not None:
        weights = {name: RawTensor.from_numpy(a) for name, a in job.layer.tensors.items()}
        layouts.layer.write(weights, buffer[layouts.inputs.size :])


def read_inputs(plan: Plan, memory: np.ndarray) -> tuple[dict[str, RawTensor], Layer | None]:
    """Returns the tensors and the layer of a job whose inputs are in memory. Its worker has checked
    them."""
    layouts, buffer, layer = layouts_of(plan), memory.data, plan.inputs.layer
    if layer is not None:
        weights = layouts.layer.read(buffer[layouts.inputs.size :])
        layer = layer.with_numbers({name: raw.numpy() for name, raw in weights.items()})
    return layouts.inputs.read(buffer), layer
