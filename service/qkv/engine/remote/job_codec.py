"""Encodes jobs for the device process: their plan as a header in JSON, and the bytes of tensors.

The header is a job's request without its numbers. `SentPlans` encodes, `WorkerLink` decodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import orjson

from qkv.engine.remote.shared_memory import ALIGNMENT
from qkv.jobs.gradient_job import GradientJob
from qkv.jobs.job import Job, Limits
from qkv.jobs.measure.probe_jobs import Float64Job, PeakMemoryJob, TimingJob
from qkv.jobs.measure.row_divergence import RowDivergenceJob
from qkv.jobs.plan_cache import BoundedCache, Plan, plan_bytes
from qkv.tensors import RawTensor, nbytes
from qkv.wire.message import Message

__all__ = [
    "DecodedPlan",
    "JobDecoder",
    "aligned_bytes",
    "aligned_slices",
    "decode_label",
    "encode_header",
    "encode_label",
]

_MAX_PLANS: Final = 4096
_MAX_BYTES: Final = 64 << 20  # of plans; usual ones need half
_MAX_LABELS: Final = 256

_JOB_TYPES: Final[dict[str, type[Job]]] = {
    "run": Job,
    "gradients": GradientJob,
    "timed": TimingJob,
    "peak": PeakMemoryJob,
    "exact": Float64Job,
    "divergence": RowDivergenceJob,
}


def aligned_slices(sizes: Iterable[int]) -> Iterator[slice]:
    """Yields the slice of each tensor of these sizes, one after the other, each aligned."""
    first = 0
    for size in sizes:
        yield slice(first, first + size)
        first += _padded(size)


def aligned_bytes(sizes: Iterable[int]) -> int:
    """Returns the bytes that `aligned_slices` needs; the order of the sizes changes nothing."""
    return sum(map(_padded, sizes))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def encode_header(job: Job) -> bytes:
    """Encodes a job without its numbers; jobs that differ only in numbers have equal headers."""
    fields: dict[str, Any] = {
        "parameters": job.parameters.model_dump(mode="json", exclude_unset=True)
    }
    (kind,) = (name for name, known in _JOB_TYPES.items() if type(job) is known)
    if isinstance(job, RowDivergenceJob):
        fields |= job.own_fields
    elif kind != "gradients":
        fields["outputs"] = sorted(job.outputs)
        if job.form.is_summary:
            fields["weights"] = job.form.as_json
    tensors = [(name, t.dtype, t.shape) for name, t in job.inputs.tensors.items()]
    weights: list[tuple[str, str, tuple[int, ...]]] = []
    if (layer := job.inputs.layer) is not None:
        options = layer.options.model_dump(mode="json", exclude_unset=True)
        # the parameters have these
        fields["layer"] = {n: v for n, v in options.items() if n not in layer.options.parameters}
        weights = [(name, t.dtype.name, t.shape) for name, t in layer.tensors.items()]
    header = orjson.dumps([kind, job.variant.name, fields, tensors, weights])
    # a copy: bytes from orjson take 4 KiB to 64 KiB, however short they are
    return memoryview(header).tobytes()


@lru_cache(_MAX_LABELS)
def encode_label(outputs: tuple[str, ...], backend: str) -> bytes:
    """Encodes what the results of many jobs share: names of the outputs, and the backend."""
    return orjson.dumps([outputs, backend])


@lru_cache(_MAX_LABELS)
def decode_label(label: bytes) -> tuple[tuple[str, ...], str]:
    """Returns the names of the outputs and the backend that `encode_label` encoded."""
    outputs, backend = orjson.loads(label)
    return tuple(outputs), backend


class JobDecoder:
    """Decodes the headers of all workers; keeps the plans that were used last.

    Args:
        limits: limits of each job, the same as in the worker, which validated it first.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._plans: BoundedCache[DecodedPlan] = BoundedCache(_MAX_PLANS, _MAX_BYTES)

    @property
    def held_bytes(self) -> int:
        """Bytes that the plans hold."""
        return self._plans.held_bytes

    def plan(self, header: bytes, *, is_kept: bool = True) -> DecodedPlan:
        """Returns the plan of a header; keeps it for other workers, unless it is for one job."""
        plan = self._plans.get(header)
        if plan is None:
            plan = DecodedPlan(header, self._limits)
            if is_kept:
                self._plans.put(header, plan, plan.held_bytes)
        return plan


class DecodedPlan:
    """The plan of a header: makes jobs of tensors in shared memory.

    Only the first job is validated, which prepares what the others share. The workers have
    validated all of them.

    Args:
        header: as `encode_header` returns it.
        limits: limits of its first job.

    Attributes:
        input_bytes: size of the memory for inputs.
        held_bytes: what it holds, with its header.
    """

    def __init__(self, header: bytes, limits: Limits) -> None:
        request = orjson.loads(header)
        self._kind, self._variant, self._fields, tensors, weights = request
        self.held_bytes = plan_bytes(header, request)
        self._limits = limits
        self._layer_names = [name for name, *_ in weights]
        self._tensors = _place(tensors + weights)
        self.input_bytes = aligned_bytes(
            nbytes(dtype, shape) for _, dtype, shape, _ in self._tensors
        )
        self._plan: Plan | None = None
        self._output_slices: dict[tuple[str, ...], Sequence[slice]] = {}

    def new_job(self, data: np.ndarray) -> Job:
        """Returns a job whose tensors are views of `data`.

        Raises:
            QkvError: as `Job.from_message`; unexpected, because the worker has validated the job.
        """
        buffer = data.data
        views = {
            name: RawTensor(dtype, shape, buffer[where])
            for name, dtype, shape, where in self._tensors
        }
        if self._plan is not None and not self._layer_names:
            return self._plan.with_tensors(views)
        layer = {name: views.pop(name) for name in self._layer_names}
        message = Message(self._fields, views, layer)
        if self._plan is not None:
            return self._plan.new_job(message)
        job = _JOB_TYPES[self._kind].from_message(self._variant, message, self._limits)
        if not isinstance(job, RowDivergenceJob):  # its headers do not repeat
            self._plan = Plan(job)
        return job

    def output_slices(self, outputs: dict[str, RawTensor]) -> Sequence[slice]:
        """Returns the slice of each output of a job in the memory for its outputs."""
        names = tuple(outputs)
        if (slices := self._output_slices.get(names)) is None:
            slices = list(aligned_slices(tensor.nbytes for tensor in outputs.values()))
            self._output_slices[names] = slices
        return slices


def _place(
    tensors: Sequence[tuple[str, str, Sequence[int]]],
) -> list[tuple[str, str, tuple[int, ...], slice]]:
    """Returns name, dtype, shape and slice of each tensor, one after the other."""
    slices = aligned_slices(nbytes(dtype, shape) for _, dtype, shape in tensors)
    return [
        (name, dtype, tuple(shape), where)
        for (name, dtype, shape), where in zip(tensors, slices, strict=True)
    ]
