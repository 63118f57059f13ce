"""The plans that a worker has sent to the device process, by number.

`RemoteEngine` sends the header of a plan once, and then only its number.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

import numpy as np

from qkv.engine.remote.job_codec import aligned_bytes, aligned_slices, encode_header
from qkv.engine.work_queue import Load
from qkv.jobs.job import Job
from qkv.jobs.measure.row_divergence import RowDivergenceJob
from qkv.tensors import RawTensor, nbytes

__all__ = ["NOT_KEPT", "SentPlan", "SentPlans"]

_MAX_PLANS: Final = 2048  # as many as a worker validates once
_MAX_BYTES: Final = 8 << 20  # of plans; usual ones need half
_PLAN_BYTES: Final = 1 << 10  # of a plan beside what grows with its header
_HEADER_FACTOR: Final = 5  # one wide character in a name takes four bytes for each of the others
_MAX_HEADER_BYTES: Final = 4096  # of a plan that is kept
NOT_KEPT: Final = 0
"""The number of a plan that is sent with each of its jobs."""


class _OutputPlace(NamedTuple):
    """Name and place of an output in the memory for the outputs."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    where: slice


class SentPlan:
    """The memory that jobs of a plan need, and the number of the plan.

    Args:
        number: the number by which the device process knows the plan.
        job: any job of the plan.
        header: of the plan.

    Attributes:
        number: as the argument.
        held_bytes: what the plan holds, with its header.
        input_bytes, output_bytes: sizes of the memory for inputs and outputs.
        load: the work of a job.
    """

    def __init__(self, number: int, job: Job, header: bytes) -> None:
        self.number = number
        self.held_bytes = _PLAN_BYTES + _HEADER_FACTOR * len(header)
        tensors = job.inputs.tensors
        layer = {} if job.inputs.layer is None else job.inputs.layer.tensors
        sizes = [t.nbytes for t in tensors.values()] + [t.nbytes for t in layer.values()]
        places = list(zip((*tensors, *layer), aligned_slices(sizes), strict=True))
        self._tensors, self._weights = places[: len(tensors)], places[len(tensors) :]
        self._specs = job.output_specs
        self._output_places: dict[tuple[str, ...], Sequence[_OutputPlace]] = {}
        self.input_bytes = aligned_bytes(sizes)
        self.output_bytes = aligned_bytes(nbytes(*spec) for spec in self._specs.values())
        self.load = Load(1, self.input_bytes + self.output_bytes, job.flops)

    def write_inputs(self, job: Job, into: np.ndarray) -> None:
        """Copies the input tensors of a job, and those of its layer."""
        buffer, tensors = into.data, job.inputs.tensors
        for name, where in self._tensors:
            buffer[where] = tensors[name].data
        if job.inputs.layer is not None:
            for name, where in self._weights:
                weight = np.ascontiguousarray(job.inputs.layer.tensors[name])
                into[where] = weight.reshape(-1).view(np.uint8)

    def read_outputs(self, names: tuple[str, ...], data: np.ndarray) -> dict[str, RawTensor]:
        """Returns the outputs, as views of the memory that the device process has written."""
        if (places := self._output_places.get(names)) is None:
            slices = aligned_slices(nbytes(*self._specs[name]) for name in names)
            places = [
                _OutputPlace(name, *self._specs[name], where)
                for name, where in zip(names, slices, strict=True)
            ]
            self._output_places[names] = places
        buffer = data.data
        return {
            name: RawTensor(dtype, shape, buffer[where]) for name, dtype, shape, where in places
        }


class SentPlans:
    """The plans that were used last, for one connection. The device process keeps as many.

    The least recently used plans lose their numbers to new ones. The device process then
    replaces one, as soon as it receives the new one.

    Args:
        size: the number of plans.

    Attributes:
        held_bytes: what they hold.
    """

    def __init__(self, size: int = _MAX_PLANS) -> None:
        self._size = size
        self.held_bytes = 0
        self._plans: dict[Hashable, SentPlan] = {}  # the order is that of the last uses
        self._free_numbers: list[int] = []

    def find(self, job: Job) -> tuple[SentPlan, bytes | None]:
        """Returns the plan of a job; and its header, if it must be sent before the job."""
        key: Hashable = job.plan_id
        header = None
        if key is None:  # jobs of comparisons and sweeps: those with equal headers are alike
            key = header = encode_header(job)
        if (plan := self._plans.pop(key, None)) is not None:
            self._plans[key] = plan
            return plan, None
        header = encode_header(job) if header is None else header
        if isinstance(job, RowDivergenceJob) or len(header) > _MAX_HEADER_BYTES:
            return SentPlan(NOT_KEPT, job, header), header
        plan = SentPlan(self._free_number(), job, header)
        self._plans[key] = plan
        self.held_bytes += plan.held_bytes
        return plan, header

    def _free_number(self) -> int:
        """Returns the number of a new plan; drops plans that were not used for longest."""
        while len(self._plans) >= self._size or self.held_bytes > _MAX_BYTES:
            oldest = self._plans.pop(next(iter(self._plans)))
            self.held_bytes -= oldest.held_bytes
            self._free_numbers.append(oldest.number)
        if self._free_numbers:
            return self._free_numbers.pop()
        return NOT_KEPT + 1 + len(self._plans)
