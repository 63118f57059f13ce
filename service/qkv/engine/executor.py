"""Executes a batch on the device: builds tensors from buffers, calls the variant, splits outputs.

Entry point: `execute`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.attention.layers.projections import ROLES
from qkv.engine.device import Device
from qkv.engine.forward import LayerWeights, call_variant
from qkv.jobs.job import Job
from qkv.tensors import DTYPES, FLOATING, RawTensor

__all__ = ["ALIGNMENT", "JobOutput", "execute"]

_ONE_THREAD_FLOPS: Final = 1 << 28  # about 2 ms of one thread

ALIGNMENT: Final = 64
"""Alignment of every buffer, in bytes: the bits of a CPU kernel depend on it."""


class JobOutput(NamedTuple):
    """The outputs of one job, and its timing.

    Attributes:
        outputs: tensors with the shapes and dtypes of `Job.output_specs`.
        started_at: start of its batch, by `time.perf_counter`.
        load_s: seconds of aligning the tensors and moving them to the device.
        compute_s: seconds of projections and variant; on a GPU between two events.
        split_s: seconds of moving the outputs back and splitting them.
        batch_size: number of jobs in the batch.
        stacked_count: number of jobs in the same stacked call, which share these seconds.
        backend: name of the variant's code path that ran.
    """

    outputs: dict[str, RawTensor]
    started_at: float
    load_s: float
    compute_s: float
    split_s: float
    batch_size: int
    stacked_count: int
    backend: str


def execute(
    jobs: Sequence[Job], device: Device, stack: bool, threads: int = 1, idle_threads: int = 1
) -> list[JobOutput]:
    """Executes jobs with equal batch keys. All calls of variants begin here.

    Args:
        jobs: at least one.
        device: runs the jobs.
        stack: run the jobs as one call, stacked along B; else one after the other. On a CPU
            stacking changes bits (the kernels' scratch buffers have other addresses in another
            thread) and saves nothing; on a GPU it makes batching worthwhile.
        threads: CPU threads of a large job. A small job takes one: more threads gain nothing, and
            lose much time to other processes of the machine.
        idle_threads: CPU threads that no other process needs now. A lone job takes them if its
            bits do not depend on the number of threads.
    """
    if not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            return execute(jobs, device, stack, threads, idle_threads)
    if len(jobs) == 1:
        return [_execute_one(jobs[0], device, 1, threads, idle_threads)]
    outputs: dict[int, JobOutput] = {}
    together = [job for job in jobs if stack and not _has_huge_values(job)]
    if together:
        stacked = _execute_stacked(together, device, len(jobs))
        outputs.update(zip(map(id, together), stacked, strict=True))
    for job in jobs:
        if id(job) not in outputs:
            outputs[id(job)] = _execute_one(job, device, len(jobs), threads, idle_threads)
    return [outputs[id(job)] for job in jobs]


def _execute_one(
    job: Job, device: Device, batch_size: int, threads: int, idle_threads: int
) -> JobOutput:
    if job.flops < _ONE_THREAD_FLOPS:
        threads = 1
    elif idle_threads > threads and batch_size == 1 and not device.is_accelerator and job.uses_sdpa:
        torch.set_num_threads(idle_threads)
        (output,) = _execute_stacked([job], device, batch_size)
        if output.backend == "sdpa":
            return output
        # the numbers required another code path, whose bits may depend on the threads
    torch.set_num_threads(threads)
    return _execute_stacked([job], device, batch_size)[0]


def _has_huge_values(job: Job) -> bool:
    """Returns True if some numbers are so large that variants or projections take another code
    path. Jobs stacked with this one would take it too, and get other bits than alone."""
    layer = job.inputs.layer
    largest = {
        name: _max_abs(tensor.numpy())
        for name, tensor in job.inputs.tensors.items()
        if tensor.dtype in FLOATING
        and not (name in job.variant.inputs and job.variant.inputs[name].broadcasts)
    }
    reach = 1.0
    if layer is not None:
        sizes = [_max_abs(p.weight) * len(p.weight) for p in layer.projections]
        biases = [0.0 if p.bias is None else _max_abs(p.bias) for p in layer.projections]
        reach = max(sizes) + max(biases)
    limit = min(job.variant.stackable_below, torch.finfo(_TORCH[job.inputs.dtype]).max)
    return not all(size * reach < limit and size < limit for size in largest.values())


def _max_abs(array: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):  # bfloat16 warns of NaN
        return float(np.abs(array).max())


def _execute_stacked(jobs: Sequence[Job], device: Device, batch_size: int) -> list[JobOutput]:
    started_at = time.perf_counter()
    job = jobs[0]
    if len(jobs) == 1:
        shapes = job.inputs.shapes
        tensors = {name: _load(raw, shapes[name]) for name, raw in job.inputs.tensors.items()}
    else:  # stacked before they move: each copy to a device waits for it, even a small one
        tensors = {name: _stack(jobs, name) for name in job.inputs.tensors}
    loaded = device.load(tensors)
    weights = {} if job.inputs.layer is None else _layer_weights(job, device)
    loaded_at = time.perf_counter()
    stopwatch = device.start_stopwatch()
    plane_BH = None if len(jobs) == 1 else _plane_indices(jobs, device.torch_device)
    output = call_variant(job, loaded, weights, plane_BH, device)
    compute_s = stopwatch.stop()
    computed_at = time.perf_counter()
    outputs = _split(jobs, device.unload(output.tensors))
    times = (loaded_at - started_at, compute_s, time.perf_counter() - computed_at)
    return [
        JobOutput(a, started_at, *times, batch_size, len(jobs), output.backend) for a in outputs
    ]


def _stack(jobs: Sequence[Job], name: str) -> Tensor:
    """Returns one input of several jobs, stacked along B."""
    spec = jobs[0].variant.inputs.get(name)
    parts = []
    for job in jobs:
        part = _load(job.inputs.tensors[name], job.inputs.shapes[name])
        if spec is not None and spec.broadcasts:
            part = part.expand(job.batch_size, *part.shape[1:])
        parts.append(part)
        if spec is not None and "B" not in spec.letters:
            break  # one tensor for all
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _load(raw: RawTensor, shape: tuple[int, ...]) -> Tensor:
    """Returns an aligned tensor of this shape; copies only bytes that are not aligned."""
    if not raw.data.readonly:
        tensor = _view(raw.data, raw.dtype, shape)
        if tensor.data_ptr() % ALIGNMENT == 0:
            return tensor
    aligned = torch.empty(raw.nbytes, dtype=torch.uint8).numpy()
    np.copyto(aligned, np.frombuffer(raw.data, np.uint8))
    return _view(aligned.data, raw.dtype, shape)


def _view(data: memoryview, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Returns a view of bytes as a tensor. numpy's takes half the time of torch.frombuffer."""
    if dtype == "bfloat16":  # torch does not know numpy's
        return torch.from_numpy(np.ndarray(shape, np.int16, data)).view(torch.bfloat16)
    return torch.from_numpy(np.ndarray(shape, DTYPES[dtype], data))


def _to_dense_tensor(array: np.ndarray) -> Tensor:
    """Returns a layer's array, which may be a transposed view, as a dense, aligned tensor."""
    dtype = _TORCH[array.dtype.name]
    bits = array.view(np.int16) if dtype == torch.bfloat16 else array
    aligned = torch.empty(array.shape, dtype=dtype)
    seen = aligned.view(torch.int16) if dtype == torch.bfloat16 else aligned
    np.copyto(seen.numpy(), bits)
    return aligned


def _layer_weights(job: Job, device: Device) -> LayerWeights:
    """Returns the weights of each role that the variant has, dense in every layout."""
    assert job.inputs.layer is not None
    used = [
        (role, p)
        for role, p in zip(ROLES, job.inputs.layer.projections, strict=True)
        if role in job.roles
    ]
    weights = device.load({role: _to_dense_tensor(p.weight) for role, p in used})
    biases = {role: _to_dense_tensor(p.bias) for role, p in used if p.bias is not None}
    biases = dict(device.load(biases))
    return {role: (weight, biases.get(role)) for role, weight in weights.items()}


def _plane_indices(jobs: Sequence[Job], device: torch.device) -> Tensor | None:
    """Returns b * H + h of each plane within its own request; None if no code needs it."""
    if not jobs[0].variant.takes_plane:
        return None
    each = [(job.batch_size, job.inputs.axes.sizes["H"]) for job in jobs]
    return torch.cat([torch.arange(B * H, device=device).view(B, H) for B, H in each])


def _split(jobs: Sequence[Job], tensors: Mapping[str, Tensor]) -> list[dict[str, RawTensor]]:
    """Returns the outputs of each job, in the dtypes and shapes of its `output_specs`."""
    if len(jobs) == 1:  # its tensors may have no axis B
        specs = jobs[0].output_specs
        return [{name: _to_raw(tensor, *specs[name]) for name, tensor in tensors.items()}]
    outputs: list[dict[str, RawTensor]] = [{} for _ in jobs]
    for name, whole in tensors.items():
        first = 0
        for job, job_outputs in zip(jobs, outputs, strict=True):
            part = whole[first : first + job.batch_size]
            job_outputs[name] = _to_raw(part, *job.output_specs[name])
            first += job.batch_size
    return outputs


def _to_raw(tensor: Tensor, dtype: str, shape: tuple[int, ...]) -> RawTensor:
    if tensor.dtype != _TORCH[dtype]:  # only for projections in float64
        tensor = tensor.to(_TORCH[dtype])
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return RawTensor(dtype, shape, bits.numpy().data.cast("B"))


_TORCH: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "bool": torch.bool,
}
