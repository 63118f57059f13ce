"""Runs jobs on a device: buffers become torch tensors, a variant is called, answers are split."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.attention.layers.projections import ROLES
from qkv.engine.forward import LayerWeights, through
from qkv.jobs.job import Job
from qkv.tensors import FLOATING, RawTensor

__all__ = ["ALIGNMENT", "Ran", "Standing", "run"]

_SMALL_FLOPS: Final = 1 << 28  # about 2 ms of one thread

ALIGNMENT: Final = 64
"""Bytes. A CPU kernel's bits depend on where its buffers begin, so all begin alike."""


class Ran(NamedTuple):
    """What came of a job.

    Attributes:
        outputs: tensors in the shapes and dtypes that the job says.
        started: when its turn came, on the clock of `time.perf_counter`.
        load_s: seconds spent aligning tensors and moving them to the device.
        compute_s: seconds spent in projections and variant; on a GPU between two events.
        split_s: seconds spent moving the answers back and taking them apart.
        batch_size: jobs that ran together.
        stacked: jobs that shared one call, and so these seconds.
        backend: which of the variant's paths ran.
    """

    outputs: dict[str, RawTensor]
    started: float
    load_s: float
    compute_s: float
    split_s: float
    batch_size: int
    stacked: int
    backend: str


def run(
    jobs: Sequence[Job], device: torch.device, stack: bool, threads: int = 1, spare: int = 1
) -> list[Ran]:
    """Runs jobs whose keys are equal, the only place that calls a variant.

    Args:
        jobs: at least one.
        device: where.
        stack: run them as one call, stacked along B; else one after the other. On a CPU stacking
            changes bits (the kernels' scratch buffers lie elsewhere in another thread) and saves
            nothing; on a GPU it is what batching is for.
        threads: CPU threads for a job that is worth them. Small ones take one: they gain nothing
            by more, and lose a lot to whatever else runs on the machine.
        spare: CPU threads that nobody else wants now. A lone job whose bits do not depend on their
            number takes them.
    """
    ran: dict[int, Ran] = {}
    with torch.inference_mode():
        together = [job for job in jobs if stack and not _is_huge(job)]
        if together:
            answers = _run_together(together, device, len(jobs))
            ran.update(zip(map(id, together), answers, strict=True))
        for job in jobs:
            if id(job) not in ran:
                ran[id(job)] = _run_alone(job, device, len(jobs), threads, spare)
    return [ran[id(job)] for job in jobs]


class Standing:
    """A small job on a CPU that runs again and again, on whatever numbers lie in its tensors then.

    Args:
        job: without a layer; the bytes of its tensors are aligned, and may be written.
        buffer: where its tensors' bytes lie, and nothing else does; None: they are not together.
    """

    def __init__(self, job: Job, buffer: memoryview | None = None) -> None:
        self.job = job
        cpu = torch.device("cpu")
        self._tensors = {n: _gather([job], n, cpu) for n in job.inputs.tensors}
        places = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in self._tensors.values()]
        self._first, self._last = min(p for p, _ in places), max(p for _, p in places)
        self._names = [name for name in job.variant.outputs if name in job.outputs]
        self._decided = None
        self._square: Callable[[], Any] = lambda: math.inf
        dtype = job.inputs.dtype
        if buffer is not None and not job.form.is_digest and dtype in ("float32", "float64"):
            self._decided = job.variant.decided(job.inputs.shapes, job.parameters, job.outputs)
        if buffer is not None and self._decided is not None:
            row = np.frombuffer(buffer, dtype)
            # numpy has it sooner, and says nothing where it overflows; of float64 it takes threads
            self._square = partial(np.vdot, row, row)
            if dtype == "float64":
                self._square = partial(torch.dot, torch.from_numpy(row), torch.from_numpy(row))
        self._most = job.variant.ordinary**2  # each number's square is below

    def run(self) -> Ran:
        """Runs it on the calling thread. What is returned shares no memory with its tensors."""
        started = time.perf_counter()
        torch.set_num_threads(1)
        # their sum is above each of them, and inf or NaN where a number is
        if self._decided is not None and self._square() < self._most:
            result = self._decided(**self._tensors)
            made, backend = {n: getattr(result, n) for n in self._names}, result.backend
        else:
            with torch.inference_mode():
                made, backend = through(self.job, self._tensors, {}, None)
        computed = time.perf_counter()
        known = self.job.answers
        answers = {name: _raw(self._own(tensor), *known[name]) for name, tensor in made.items()}
        times = (0.0, computed - started, time.perf_counter() - computed)
        return Ran(answers, started, *times, 1, 1, backend)

    def _own(self, tensor: Tensor) -> Tensor:
        """Dense; a variant may answer a view of what it was given."""
        dense = tensor.contiguous()
        return dense.clone() if self._first <= dense.data_ptr() < self._last else dense


def _run_alone(job: Job, device: torch.device, batch_size: int, threads: int, spare: int) -> Ran:
    if job.flops < _SMALL_FLOPS:
        threads = 1
    elif spare > threads and batch_size == 1 and device.type == "cpu" and job.is_fused:
        torch.set_num_threads(spare)
        (ran,) = _run_together([job], device, batch_size)
        if ran.backend == "sdpa":
            return ran
        # its numbers took another path, whose bits may depend on the threads
    torch.set_num_threads(threads)
    return _run_together([job], device, batch_size)[0]


def _is_huge(job: Job) -> bool:
    """Whether its numbers are of a size that variants or projections take another path for: what
    is stacked with it would take that path too, and have other bits than alone."""
    layer = job.inputs.layer
    largest = {
        name: _largest(tensor.numpy())
        for name, tensor in job.inputs.tensors.items()
        if tensor.dtype in FLOATING
        and not (name in job.variant.inputs and job.variant.inputs[name].broadcasts)
    }
    reach = 1.0
    if layer is not None:
        sizes = [_largest(p.weight) * len(p.weight) for p in layer.projections]
        biases = [0.0 if p.bias is None else _largest(p.bias) for p in layer.projections]
        reach = max(sizes) + max(biases)
    most = min(job.variant.ordinary, torch.finfo(_TORCH[job.inputs.dtype]).max)
    return not all(size * reach < most and size < most for size in largest.values())


def _largest(array: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):  # NaN, which bfloat16 warns of
        return float(np.abs(array).max())


def _run_together(jobs: Sequence[Job], device: torch.device, batch_size: int) -> list[Ran]:
    started = time.perf_counter()
    job = jobs[0]
    tensors = {name: _gather(jobs, name, device) for name in job.inputs.tensors}
    weights = _layer_weights(job, device)
    loaded = time.perf_counter()
    clock = _Clock(device)
    passed = through(job, tensors, weights, _places(jobs, device))
    compute_s = clock.stop()
    computed = time.perf_counter()
    answers = _split(jobs, passed.tensors)
    times = (loaded - started, compute_s, time.perf_counter() - computed)
    return [Ran(a, started, *times, batch_size, len(jobs), passed.backend) for a in answers]


def _gather(jobs: Sequence[Job], name: str, device: torch.device) -> Tensor:
    """One input of every job, stacked along B; with every axis of the signature.

    Stacked before they move: a copy to a device waits for it, however little it brings.
    """
    spec = jobs[0].variant.inputs.get(name)
    parts = []
    for job in jobs:
        part = _load(job.inputs.tensors[name]).view(job.inputs.shapes[name])
        if spec is not None and spec.broadcasts and len(jobs) > 1:
            part = part.expand(job.batch, *part.shape[1:])
        parts.append(part)
        if spec is not None and "B" not in spec.letters:
            break  # one tensor for all
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(device)


def _load(raw: RawTensor) -> Tensor:
    """The tensor as one aligned row of numbers; a copy only where its bytes are not aligned."""
    dtype = _TORCH[raw.dtype]
    if not raw.data.readonly:
        tensor = torch.frombuffer(raw.data, dtype=dtype)
        if tensor.data_ptr() % ALIGNMENT == 0:
            return tensor
    aligned = torch.empty(raw.nbytes, dtype=torch.uint8)
    np.copyto(aligned.numpy(), np.frombuffer(raw.data, np.uint8))
    return aligned.view(dtype)


def _dense(array: np.ndarray, device: torch.device) -> Tensor:
    """A layer's array, which may be a transposed view, as a dense, aligned tensor."""
    dtype = _TORCH[array.dtype.name]
    bits = array.view(np.int16) if dtype == torch.bfloat16 else array
    aligned = torch.empty(array.shape, dtype=dtype)
    seen = aligned.view(torch.int16) if dtype == torch.bfloat16 else aligned
    np.copyto(seen.numpy(), bits)
    return aligned.to(device)


def _layer_weights(job: Job, device: torch.device) -> LayerWeights:
    """Those of each role that the variant has, dense whatever layout they came in."""
    if job.inputs.layer is None:
        return {}
    return {
        role: (
            _dense(p.weight, device),
            None if p.bias is None else _dense(p.bias, device),
        )
        for role, p in zip(ROLES, job.inputs.layer.projections, strict=True)
        if role in job.roles
    }


def _places(jobs: Sequence[Job], device: torch.device) -> Tensor | None:
    """b * H + h of each plane within its own request; None where there is but one request."""
    if len(jobs) == 1 or not jobs[0].variant.takes_place:
        return None
    each = [(job.batch, job.inputs.bound.sizes["H"]) for job in jobs]
    return torch.cat([torch.arange(B * H, device=device).view(B, H) for B, H in each])


def _split(jobs: Sequence[Job], tensors: Mapping[str, Tensor]) -> list[dict[str, RawTensor]]:
    """Each job's part of each tensor, as it goes back."""
    answers: list[dict[str, RawTensor]] = [{} for _ in jobs]
    for name, whole in tensors.items():
        whole = whole.contiguous().cpu()
        if len(jobs) == 1:  # all of it, and what has no B too
            answers[0][name] = _raw(whole, *jobs[0].answers[name])
            continue
        first = 0
        for job, answer in zip(jobs, answers, strict=True):
            part = whole[first : first + job.batch]
            answer[name] = _raw(part, *job.answers[name])
            first += job.batch
    return answers


def _raw(tensor: Tensor, dtype: str, shape: tuple[int, ...]) -> RawTensor:
    if tensor.dtype != _TORCH[dtype]:  # only where a layer went the long way
        tensor = tensor.to(_TORCH[dtype])
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return RawTensor(dtype, shape, bits.numpy().data.cast("B"))


class _Clock:
    """Seconds of compute: by events where the device works on its own, else by the wall."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._first = torch.cuda.Event(enable_timing=True)
            self._last = torch.cuda.Event(enable_timing=True)
            self._first.record()
        self._started = time.perf_counter()

    def stop(self) -> float:
        if not self._cuda:
            return time.perf_counter() - self._started
        self._last.record()
        self._last.synchronize()
        return float(self._first.elapsed_time(self._last)) / 1e3


_TORCH: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "bool": torch.bool,
}
