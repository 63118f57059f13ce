"""Encodes a job as bytes for the device process: a header in JSON, and the bytes of its tensors.

The header is the job's request without its numbers. The device process validates it again, and
caches the jobs of recent headers. `RemoteEngine` encodes, `WorkerLink` decodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import orjson

from qkv.attention.layers.layouts import LAYOUTS
from qkv.engine.remote.shared_memory import ALIGNMENT
from qkv.jobs.gradient_job import GradientJob
from qkv.jobs.job import Job, Limits
from qkv.jobs.measure.probe_jobs import Float64Job, PeakMemoryJob, TimingJob
from qkv.jobs.measure.row_divergence import RowDivergenceJob
from qkv.tensors import RawTensor, nbytes
from qkv.wire.message import Message

__all__ = [
    "JobDecoder",
    "aligned_bytes",
    "aligned_slices",
    "encode_header",
    "input_sizes",
    "output_sizes",
    "write_tensors",
]

_MAX_CACHED: Final = 256  # headers, the most recent ones
_MAX_HEADER_BYTES: Final = 4096  # of a header whose job is cached

_Tensor = tuple[str, str, tuple[int, ...]]  # name, dtype, shape

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
    weights: list[_Tensor] = []
    if (layer := job.inputs.layer) is not None:
        (layout,) = (name for name, known in LAYOUTS.items() if known is layer.layout)
        fields["layer"] = {"layout": layout, "heads": layer.heads}
        weights = [(name, t.dtype.name, t.shape) for name, t in layer.tensors.items()]
    return orjson.dumps([kind, job.variant.name, fields, tensors, weights])


def input_sizes(job: Job) -> list[int]:
    """Returns the bytes of each input tensor; those of the layer last."""
    layer = job.inputs.layer
    weights = () if layer is None else layer.tensors.values()
    return [t.nbytes for t in (*job.inputs.tensors.values(), *weights)]


def output_sizes(job: Job, names: Iterable[str] | None = None) -> list[int]:
    """Returns the bytes of each output, in the order of `names`; None: in any order."""
    names = job.output_specs if names is None else names
    return [nbytes(*job.output_specs[name]) for name in names]


def write_tensors(job: Job, into: np.ndarray) -> None:
    """Copies the job's input tensors; those of the layer last."""
    sources = [np.frombuffer(t.data, np.uint8) for t in job.inputs.tensors.values()]
    if job.inputs.layer is not None:
        arrays = job.inputs.layer.tensors.values()
        sources += [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]
    for where, source in zip(aligned_slices(s.nbytes for s in sources), sources, strict=True):
        into[where] = source


class JobDecoder:
    """Decodes jobs; caches the jobs of recent headers.

    Args:
        limits: limits of each job, the same as in the worker, which validated it first.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: OrderedDict[bytes, tuple[Job, list[_Tensor]]] = OrderedDict()

    def decode(self, header: bytes, data: np.ndarray) -> Job:
        """Returns the job, whose tensors are views of `data`.

        Raises:
            QkvError: as `Job.from_message`; unexpected, because the worker has validated the job.
        """
        if (known := self._known.get(header)) is not None:
            self._known.move_to_end(header)
            return known[0].with_tensors(_views(known[1], data))
        kind, variant, fields, tensors, weights = orjson.loads(header)
        views = _views([*tensors, *weights], data)
        layer = {name: views.pop(name) for name, *_ in weights}
        job = _JOB_TYPES[kind].from_message(variant, Message(fields, views, layer), self._limits)
        # the headers of row comparisons do not repeat
        is_cached = job.inputs.layer is None and not isinstance(job, RowDivergenceJob)
        if is_cached and len(header) <= _MAX_HEADER_BYTES:
            _ = job.is_small, job.bytes_out, job.arguments  # computed from the shapes, once
            specs = [(n, t.dtype, t.shape) for n, t in job.inputs.tensors.items()]
            self._known[header] = job.with_tensors({}), specs
            if len(self._known) > _MAX_CACHED:
                self._known.popitem(last=False)
        return job


def _views(tensors: Sequence[_Tensor], data: np.ndarray) -> dict[str, RawTensor]:
    slices = aligned_slices(nbytes(dtype, shape) for _, dtype, shape in tensors)
    return {
        name: RawTensor(dtype, tuple(shape), data.data[where])
        for (name, dtype, shape), where in zip(tensors, slices, strict=True)
    }
