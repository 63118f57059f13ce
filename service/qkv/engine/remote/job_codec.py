"""A job as bytes, for another process of the service: a head of JSON, and the tensors' own bytes.

The head is the request that the job was made of, without its numbers. The other process makes the
job of it by the same checks; of a head that has come before, once and for all.
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
from qkv.jobs.measure.probe_jobs import ExactJob, PeakJob, TimedJob
from qkv.jobs.measure.row_divergence import DivergenceJob
from qkv.tensors import RawTensor, nbytes
from qkv.wire.message import Message

__all__ = ["Opener", "head_of", "laid_out", "room_for", "sizes_in", "sizes_out", "write"]

_MOST: Final = 256  # heads that are kept, those that came last
_LONGEST: Final = 4096  # bytes of a head that is kept

_Tensor = tuple[str, str, tuple[int, ...]]  # name, dtype, shape

_KINDS: Final[dict[str, type[Job]]] = {
    "run": Job,
    "gradients": GradientJob,
    "timed": TimedJob,
    "peak": PeakJob,
    "exact": ExactJob,
    "divergence": DivergenceJob,
}


def laid_out(sizes: Iterable[int]) -> Iterator[slice]:
    """Where tensors of so many bytes lie, one after the other, each at an aligned place."""
    first = 0
    for size in sizes:
        yield slice(first, first + size)
        first += _padded(size)


def room_for(sizes: Iterable[int]) -> int:
    """Bytes that hold them all so, in any order."""
    return sum(map(_padded, sizes))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def head_of(job: Job) -> bytes:
    """All of a job but numbers, the same for jobs that differ in nothing else."""
    fields: dict[str, Any] = {
        "parameters": job.parameters.model_dump(mode="json", exclude_unset=True)
    }
    (kind,) = (name for name, known in _KINDS.items() if type(job) is known)
    if isinstance(job, DivergenceJob):
        fields |= job.asked
    elif kind != "gradients":
        fields["outputs"] = sorted(job.outputs)
        if job.form.is_digest:
            fields["weights"] = job.form.asked
    tensors = [(name, t.dtype, t.shape) for name, t in job.inputs.tensors.items()]
    weights: list[_Tensor] = []
    if (layer := job.inputs.layer) is not None:
        (layout,) = (name for name, known in LAYOUTS.items() if known is layer.layout)
        fields["layer"] = {"layout": layout, "heads": layer.heads}
        weights = [(name, t.dtype.name, t.shape) for name, t in layer.tensors.items()]
    return orjson.dumps([kind, job.variant.name, fields, tensors, weights])


def sizes_in(job: Job) -> list[int]:
    """Bytes of each tensor that comes with it, its layer's last."""
    layer = job.inputs.layer
    weights = () if layer is None else layer.tensors.values()
    return [t.nbytes for t in (*job.inputs.tensors.values(), *weights)]


def sizes_out(job: Job, names: Iterable[str] | None = None) -> list[int]:
    """Bytes of each tensor of its answer, in that order; None: in any."""
    return [nbytes(*job.answers[name]) for name in (job.answers if names is None else names)]


def write(job: Job, into: np.ndarray) -> None:
    """Copies its tensors, its layer's last."""
    sources = [np.frombuffer(t.data, np.uint8) for t in job.inputs.tensors.values()]
    if job.inputs.layer is not None:
        arrays = job.inputs.layer.tensors.values()
        sources += [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]
    for place, source in zip(laid_out(s.nbytes for s in sources), sources, strict=True):
        into[place] = source


class Opener:
    """Makes jobs of parcels.

    Args:
        limits: what each may ask for, as whoever checked it before had them.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: OrderedDict[bytes, tuple[Job, list[_Tensor]]] = OrderedDict()

    def open(self, head: bytes, data: np.ndarray) -> Job:
        """The job; its tensors are views of the data.

        Raises:
            QkvError: as `Job.of`; but whoever wrote the head has had it checked.
        """
        if (known := self._known.get(head)) is not None:
            self._known.move_to_end(head)
            return known[0].again(_views(known[1], data))
        kind, variant, fields, tensors, weights = orjson.loads(head)
        views = _views([*tensors, *weights], data)
        layer = {name: views.pop(name) for name, *_ in weights}
        job = _KINDS[kind].of(variant, Message(fields, views, layer), self._limits)
        # rows that are compared do not come again
        is_kept = job.inputs.layer is None and not isinstance(job, DivergenceJob)
        if is_kept and len(head) <= _LONGEST:
            _ = job.is_small, job.bytes_out, job.arguments  # found of the shapes, once
            came = [(n, t.dtype, t.shape) for n, t in job.inputs.tensors.items()]
            self._known[head] = job.again({}), came
            if len(self._known) > _MOST:
                self._known.popitem(last=False)
        return job


def _views(tensors: Sequence[_Tensor], data: np.ndarray) -> dict[str, RawTensor]:
    places = laid_out(nbytes(dtype, shape) for _, dtype, shape in tensors)
    return {
        name: RawTensor(dtype, tuple(shape), data.data[place])
        for (name, dtype, shape), place in zip(tensors, places, strict=True)
    }
