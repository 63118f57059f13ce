"""Executes a batch on the device: builds tensors from buffers, calls the variant, splits outputs.

Entry points: `launch`, which begins a batch, and `execute`, which also waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from qkv.attention.common import guards
from qkv.attention.layers.layer_weights import ROLES
from qkv.engine.device.device import Device, Stopwatch, Unloading
from qkv.engine.forward import (
    NOTE,
    LayerTensors,
    call_variant,
    can_defer,
    can_widen,
    in_layout,
)
from qkv.jobs.buffer_layout import ALIGNMENT
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.jobs.result import Result
from qkv.telemetry.times import Times
from qkv.tensors import DTYPES, RawTensor

_ONE_THREAD_FLOPS: Final = 1 << 28  # about 2 ms of one thread

_Path = Literal["careful", "ordinary", "wide"]
_FITS: Final = "fitting items"  # the name of the guards among the outputs


Launched = Callable[[], list[Result]]
"""A batch that has begun: waits for it, and returns the output of each job."""


def execute(
    jobs: Sequence[Job], device: Device, stack: bool, threads: int = 1, idle_threads: int = 1
) -> list[Result]:
    """Executes jobs; arguments as for `launch`."""
    return launch(jobs, device, stack, threads, idle_threads)()


def launch(
    jobs: Sequence[Job], device: Device, stack: bool, threads: int = 1, idle_threads: int = 1
) -> Launched:
    """Begins to execute jobs with equal batch keys. All calls of variants begin here.

    On an accelerator the call returns before the device is done; jobs that cannot be deferred run
    when the result is called. On a CPU the call does all the work.

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
            return launch(jobs, device, stack, threads, idle_threads)
    alone = partial(
        _run_alone, device=device, batch_size=len(jobs), threads=threads, idle_threads=idle_threads
    )
    if stack and can_defer(jobs[0].plan):
        return partial(_finish, _Call(jobs, device, len(jobs), "ordinary"), alone)
    if device.is_accelerator:  # the results of the previous batch come first
        return partial(_each, jobs, alone)
    results = [alone(job) for job in jobs]
    return lambda: results


@torch.inference_mode()
def _each(jobs: Sequence[Job], run_alone: Callable[[Job], Result]) -> list[Result]:
    return [run_alone(job) for job in jobs]


@torch.inference_mode()
def _finish(call: _Call, run_alone: Callable[[Job], Result]) -> list[Result]:
    """Returns the outputs of a deferred call; runs jobs again that need another path.

    The path of a job depends on its numbers alone.
    """
    outputs = call.finish()
    left = [i for i, output in enumerate(outputs) if output is None]
    if left and call.can_widen:
        wide = call.again([call.jobs[i] for i in left]).finish()
        for i, output in zip(left, wide, strict=True):
            outputs[i] = output
    results = []
    for job, output in zip(call.jobs, outputs, strict=True):
        result = run_alone(job) if output is None else output
        result.started_at = call.started_at
        results.append(result)
    return results


def _run_alone(
    job: Job, device: Device, batch_size: int, threads: int, idle_threads: int
) -> Result:
    """Runs a job whose conditions are read at once, in the way that its numbers need."""
    if device.is_accelerator:
        result = _Call([job], device, batch_size).finish()[0]
        assert result is not None
        return result
    if job.plan.flops < _ONE_THREAD_FLOPS or job.plan.has_state:  # bits depend on the threads
        threads = 1
    elif idle_threads > threads and batch_size == 1 and job.plan.uses_sdpa:
        torch.set_num_threads(idle_threads)
        result = _run_on_cpu(job, device, batch_size)
        if result.backend == "sdpa":
            return result
        # the numbers required another code path, whose bits may depend on the threads
    torch.set_num_threads(threads)
    return _run_on_cpu(job, device, batch_size)


def _run_on_cpu(job: Job, device: Device, batch_size: int) -> Result:
    """Runs a job where its tensors are."""
    started_at = time.perf_counter()
    plan, tensors = job.plan, job.tensors
    shapes = plan.inputs.shapes
    inputs = {name: _load(raw, shapes[name]) for name, raw in tensors.items()}
    weights = {} if job.layer is None else _layer_weights(job, device)
    loaded_at = time.perf_counter()
    computed, backend, peak_bytes = _measured_call(plan, inputs, weights, None, device)
    computed_at = time.perf_counter()
    notes = _take_notes(computed, [plan.batch_size])[0] if plan.variant.has_notes else ()
    specs, outputs = plan.output_specs, {}
    for name, tensor in in_layout(plan, computed).items():
        dtype, shape = specs[name]
        outputs[name] = RawTensor(dtype, shape, _bytes_in(tensor.contiguous(), dtype))
    split_s = time.perf_counter() - computed_at
    times = Times(loaded_at - started_at, computed_at - loaded_at, split_s)
    return Result(
        outputs, times, backend, batch_size, started_at, notes=notes, peak_bytes=peak_bytes
    )


def _measured_call(
    plan: Plan,
    tensors: Mapping[str, Tensor],
    weights: LayerTensors,
    plane_BH: Tensor | None,
    device: Device,
) -> tuple[dict[str, Tensor], str, int]:
    """Returns the outputs of `call_variant`, and its peak of memory if that is to be measured."""
    if not plan.measurement.peak:
        return *call_variant(plan, tensors, weights, plane_BH), 0
    outputs, peak_bytes = device.measure_peak_bytes(
        lambda: call_variant(plan, tensors, weights, plane_BH)
    )
    return *outputs, peak_bytes


class _Call:
    """A call of a variant for one or more jobs, which the device has begun.

    Args:
        jobs: stacked along B.
        device: runs the call.
        batch_size: number of jobs in the batch.
        path: careful: the numbers select it. ordinary: the check for which jobs that was right
            follows at the end. wide: the same in float64.
    """

    def __init__(
        self, jobs: Sequence[Job], device: Device, batch_size: int, path: _Path = "careful"
    ) -> None:
        self.jobs, self._device, self._batch_size, self._path = jobs, device, batch_size, path
        self.started_at = time.perf_counter()
        plan, self._sizes = jobs[0].plan, [job.plan.batch_size for job in jobs]
        inputs = device.load(
            {name: _host(jobs, self._sizes, name, device) for name in plan.inputs.specs}
        )
        weights = {} if jobs[0].layer is None else _layer_weights(jobs[0], device)
        # an accelerator may still read them when this returns
        self._in_use: tuple[object, ...] = (inputs, weights)
        self._loaded_at = time.perf_counter()
        self._stopwatch: Stopwatch = device.start_stopwatch()
        plane_BH, self._peak_bytes = None, 0
        if len(jobs) > 1 and plan.variant.takes_plane:
            H = plan.inputs.axes.sizes["H"]
            plane_BH = _plane_indices(self._sizes, H, device.torch_device)
        if path != "careful":
            with guards.deferred(sum(self._sizes), is_wide=path == "wide") as collected:
                tensors, self._backend = call_variant(plan, inputs, weights, plane_BH)
            tensors |= {_FITS: collected.fitting_items(device.torch_device)}
        else:
            tensors, self._backend, self._peak_bytes = _measured_call(
                plan, inputs, weights, plane_BH, device
            )
        self._stopwatch.stop()
        self._unloading: Unloading = device.unload(tensors)

    @property
    def can_widen(self) -> bool:
        """True if float64 may be wide enough for jobs that need another path."""
        return can_widen(self.jobs[0].plan)

    def again(self, jobs: Sequence[Job]) -> _Call:
        """Begins a call of some of the jobs in float64."""
        return _Call(jobs, self._device, self._batch_size, "wide")

    def finish(self) -> list[Result | None]:
        """Waits for the outputs of each job; None for a job that must run again, alone."""
        jobs, tensors = self.jobs, self._unloading.wait()
        self._in_use = ()
        unloaded_at = time.perf_counter()
        fits = _each_job(self._sizes, tensors.pop(_FITS)) if _FITS in tensors else [True]
        notes = _take_notes(tensors, self._sizes)
        outputs = _split(jobs, self._sizes, in_layout(jobs[0].plan, tensors))
        load_s, compute_s = self._loaded_at - self.started_at, self._stopwatch.seconds()
        split_s = self._unloading.seconds() + time.perf_counter() - unloaded_at
        results: list[Result | None] = []
        for fit, job_outputs, job_notes in zip(fits, outputs, notes, strict=True):
            times = Times(load_s, compute_s, split_s, stacked_count=sum(fits))
            result = Result(
                job_outputs, times, self._backend, self._batch_size, self.started_at, len(jobs),
                notes=job_notes, peak_bytes=self._peak_bytes,
            )  # fmt: skip
            results.append(result if fit else None)
        return results


def _each_job(sizes: Sequence[int], fits_B: Tensor) -> list[bool]:
    """Returns True for each job all of whose items fit; `sizes` are the numbers of their items."""
    items = fits_B.tolist()
    if all(items):
        return [True] * len(sizes)
    fits, first = [], 0
    for size in sizes:
        fits.append(all(items[first : first + size]))
        first += size
    return fits


def _take_notes(tensors: dict[str, Tensor], sizes: Sequence[int]) -> list[tuple[str, ...]]:
    """Removes the conditions of notes from the outputs; returns the notes that hold for each job.

    `sizes` are the numbers of their items.
    """
    names = [name for name in tensors if name.startswith(NOTE)]
    found: list[tuple[str, ...]] = [()] * len(sizes)
    for name in names:
        holds_B = tensors.pop(name).expand(sum(sizes)).split(list(sizes))
        note = name.removeprefix(NOTE)
        found = [
            (*notes, note) if any(items.tolist()) else notes
            for notes, items in zip(found, holds_B, strict=True)
        ]
    return found


def _host(jobs: Sequence[Job], sizes: Sequence[int], name: str, device: Device) -> Tensor:
    """Returns one input of several jobs on the CPU, stacked along B.

    `sizes` are the numbers of their items.
    """
    plan, raw = jobs[0].plan, jobs[0].tensors[name]
    shape, spec = plan.inputs.shapes[name], plan.variant.inputs.get(name)
    if spec is not None and spec.broadcasts:
        parts = [_expanded(job, name) for job in jobs]
        whole = device.empty_on_host((sum(map(len, parts)), *shape[1:]), parts[0].dtype)
        return torch.cat(parts, out=whole)
    buffers = [job.tensors[name].data for job in jobs[: None if plan.has_batch(name) else 1]]
    if len(buffers) > 1:
        shape = (sum(sizes), *shape[1:])
    whole = device.empty_on_host(shape, _TORCH[raw.dtype])
    into, first = _bytes_of(whole), 0
    for buffer in buffers:  # torch.cat takes four times as long
        into[first : first + buffer.nbytes] = buffer
        first += buffer.nbytes
    return whole


def _expanded(job: Job, name: str) -> Tensor:
    """Returns a mask with an axis B of full size."""
    raw, shape = job.tensors[name], job.plan.inputs.shapes[name]
    return _load(raw, shape).expand(job.plan.batch_size, *shape[1:])


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a dense tensor of the CPU."""
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return bits.numpy().reshape(-1).view(np.uint8).data  # a cast refuses an empty buffer


def _bytes_in(tensor: Tensor, dtype: str) -> memoryview:
    """Returns the bytes of a dense tensor in a dtype. Only projections in float64 have another."""
    wanted = _TORCH[dtype]
    return _bytes_of(tensor if tensor.dtype == wanted else tensor.to(wanted))


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


def _to_dense_tensor(array: np.ndarray, device: Device) -> Tensor:
    """Returns a layer's array, which may be a transposed view, as a dense, aligned tensor."""
    dtype = _TORCH[array.dtype.name]
    bits = array.view(np.int16) if dtype == torch.bfloat16 else array
    aligned = device.empty_on_host(array.shape, dtype)
    seen = aligned.view(torch.int16) if dtype == torch.bfloat16 else aligned
    np.copyto(seen.numpy(), bits)
    return aligned


def _layer_weights(job: Job, device: Device) -> LayerTensors:
    """Returns the arrays of the layer that the variant needs, dense in every layout.

    The device has the weights of a loaded layer.
    """
    layer = job.layer
    assert layer is not None
    if layer.loaded is not None:
        held = device.layer_memory.weights_of(layer)
        return {**held, **_load_arrays(layer.position_arrays, device)}
    unused = set(ROLES).difference(job.plan.roles)
    needed = {n: a for n, a in layer.arrays.items() if n.partition(".")[0] not in unused}
    return _load_arrays(needed, device)


def _load_arrays(arrays: Mapping[str, np.ndarray], device: Device) -> LayerTensors:
    if not arrays:
        return {}
    return device.load({name: _to_dense_tensor(array, device) for name, array in arrays.items()})


def _plane_indices(sizes: Sequence[int], H: int, device: torch.device) -> Tensor:
    """Returns b * H + h of each plane within its own request, for requests of these sizes."""
    plane_BH = torch.arange(max(sizes) * H, device=device).view(-1, H)
    if len(set(sizes)) == 1:
        return plane_BH.repeat(len(sizes), 1)
    return torch.cat([plane_BH[:B] for B in sizes])


def _split(
    jobs: Sequence[Job], sizes: Sequence[int], tensors: Mapping[str, Tensor]
) -> list[dict[str, RawTensor]]:
    """Returns the outputs of each job as views, in the dtypes and shapes of its `output_specs`."""
    outputs: list[dict[str, RawTensor]] = [{} for _ in jobs]
    for name, whole in tensors.items():
        dtype, _ = jobs[0].plan.output_specs[name]
        counts = sizes
        if (spec := jobs[0].plan.variant.inputs.get(name)) is not None and spec.broadcasts:
            parts = _mask_gradients(jobs, sizes, name, whole)
            whole, counts = torch.cat(parts), [len(part) for part in parts]
        data = _bytes_in(whole, dtype)
        item_bytes, first = data.nbytes // sum(counts), 0
        for job, size, job_outputs in zip(jobs, counts, outputs, strict=True):
            _, shape = job.plan.output_specs[name]
            # a single job's tensor may have no axis B
            last = first + item_bytes * size if len(jobs) > 1 else data.nbytes
            job_outputs[name] = RawTensor(dtype, shape, data[first:last])
            first = last
    return outputs


def _mask_gradients(
    jobs: Sequence[Job], sizes: Sequence[int], name: str, whole: Tensor
) -> list[Tensor]:
    """Returns the gradient of each job's mask: a sum over its items where all share one mask."""
    parts = whole.split(list(sizes))
    return [
        part.sum(0, keepdim=True) if job.plan.inputs.shapes[name][0] == 1 else part
        for job, part in zip(jobs, parts, strict=True)
    ]


_TORCH: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "bool": torch.bool,
}
