"""Runs requests in this process, without a service (`--local`).

Each function takes a request's message or fields, and returns a message, JSON or events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch

from qkv.attention import catalogue, contract_results
from qkv.attention.layers import layer_reader, layout_catalogue
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_sizes import sizes_of
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.device_errors import to_client_error
from qkv.engine.executor import execute
from qkv.errors import InvalidContent
from qkv.jobs.annotations import annotate
from qkv.jobs.convert import convert_message
from qkv.jobs.float64 import float64_arguments, to_float64
from qkv.jobs.gradient_plan import GradientPlan
from qkv.jobs.job import Job
from qkv.jobs.measure import compare as comparisons
from qkv.jobs.measure import sweep as sweeps
from qkv.jobs.measure.compare_request import CompareRequest
from qkv.jobs.measure.sweep import SweepEvent
from qkv.jobs.measure.sweep_request import SweepRequest
from qkv.jobs.plan import Limits, Plan
from qkv.jobs.result import Result
from qkv.tensors import FLOATING, RawTensor
from qkv.wire.message import Message

__all__ = [
    "attend",
    "check_variant",
    "compare",
    "convert_message",
    "detect",
    "find_prefix",
    "gradients",
    "layers",
    "reference",
    "sweep",
    "variants",
]

_T = TypeVar("_T")

_UNLIMITED: Final = Limits(response_bytes=1 << 62, job_bytes=1 << 62)


def attend(variant: str, message: Message) -> Message:
    """Runs a variant on the CPU.

    Raises:
        QkvError: as the service would respond.
    """
    return _run(Job.new(Plan, variant, message, _UNLIMITED), "outputs")


def gradients(variant: str, message: Message) -> Message:
    """Computes the gradients of a variant on the CPU.

    Raises:
        QkvError: as the service would respond.
    """
    return _run(Job.new(GradientPlan, variant, message, _UNLIMITED), "gradients")


def reference(variant: str, message: Message) -> Message:
    """Computes all outputs of a variant by its float64 reference, on the CPU.

    A variant without steps runs in float64.

    Args:
        variant: its name.
        message: inputs of any dtype and parameters, as `attend` takes them; no layer.

    Raises:
        QkvError: as the service would respond.
    """
    message = replace(message, fields={**message.fields, "weights": "none"})
    job = Job.new(Plan, variant, message, _UNLIMITED)
    plan = job.plan
    if job.layer is not None:
        raise InvalidContent("the reference takes no layer: project queries, keys and values first")
    wide = {}
    for name, raw in job.tensors.items():
        array = raw.numpy().reshape(plan.inputs.shapes[name])
        array = array.astype(np.float64) if raw.dtype in FLOATING else array.copy()
        wide[name] = torch.from_numpy(array)
    arguments = float64_arguments(plan.variant, wide, plan.arguments, plan.inputs.dtype)
    started_at = time.perf_counter()
    with torch.inference_mode():
        result = plan.variant.reference(**arguments)
    compute_ms = (time.perf_counter() - started_at) * 1e3
    outputs = {}
    for name in plan.variant.outputs:
        if (tensor := getattr(result, name, None)) is not None:
            array = to_float64(tensor).contiguous().numpy().reshape(plan.output_shape(name))
            outputs[name] = RawTensor.from_numpy(array)
    kind = {"weights_are": plan.weights_are} if "weights" in outputs else {}
    timing = {"compute_ms": compute_ms, "device": "cpu", "backend": "reference"}
    return Message({"variant": variant, "outputs": None, **kind, "timing": timing}, outputs)


def check_variant(path: Path) -> Iterator[tuple[str, str, str]]:
    """Loads a variant file and yields the result of each check of its contract.

    Returns:
        The check's name, its status ("pass", "FAIL" or "skip") and the reason.
    """
    yield from contract_results.check_file(path)


def layers(shapes: Mapping[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    """Returns the attention layers of a model: prefix, layouts and sizes of each, as JSON.

    Args:
        shapes: of the model's tensors, by name.
    """
    return [
        {
            "prefix": layer.prefix.rstrip("."),
            "layouts": list(layer.layouts),
            **sizes_of(layout_catalogue.known()[layer.layouts[0]], layer.shapes)._asdict(),
        }
        for layer in layout_catalogue.find_layers(shapes)
    ]


def find_prefix(layout: object, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Returns the prefix of the only attention layer, with its last dot.

    Args:
        layout: of the layer, or "auto".
        shapes: of a model's tensors, by name.

    Raises:
        InvalidContent: there are several layers, or none.
    """
    known = None if layout == layout_catalogue.AUTO else layout_catalogue.find(layout, "/from")
    prefix = layer_reader.find_prefix(None, known, shapes, "")
    if known is None and not layout_catalogue.find_layers(shapes):
        layout_catalogue.recognize(shapes, prefix, "/from")  # raises: none fits
    return prefix


def _run(job: Job, group: str) -> Message:
    output, plan = _execute(job), job.plan
    timing = {
        "compute_ms": output.times.compute_s * 1e3,
        "device": "cpu",
        "backend": output.backend,
        "flops": plan.flops,
        "bytes": plan.bytes,
    }
    known = annotate(plan, output.notes)
    fields = {"variant": plan.variant.name, group: None, **known, "timing": timing}
    return Message(fields, output.outputs)


def _execute(job: Job) -> Result:
    threads = torch.get_num_threads()
    try:
        with torch.autocast("cpu", enabled=False):  # of the caller, in the same thread
            return execute([job], CpuDevice(), stack=False)[0]
    finally:
        torch.set_num_threads(threads)  # the rest of this process goes on with its threads


def compare(message: Message) -> dict[str, Any]:
    """Compares variants on the CPU.

    Raises:
        QkvError: as the service would respond.
    """
    request, started_at = CompareRequest(message, _UNLIMITED), time.perf_counter()
    response, _ = _complete(comparisons.compare(request, _DirectRunner(), started_at))
    return response.model_dump(mode="json")


def sweep(fields: Mapping[str, Any]) -> Generator[SweepEvent]:
    """Times variants over lengths on the CPU, and yields each event at once.

    Args:
        fields: of the request's body, as `POST /v1/sweep` takes them.

    Raises:
        QkvError: as the service would respond.
    """
    events = sweeps.sweep(SweepRequest(fields, _UNLIMITED), _CellRunner())
    try:
        while True:
            yield _complete(events.__anext__())
    except StopAsyncIteration:
        return
    finally:
        _complete(events.aclose())


class _DirectRunner:
    """Runs each plan at once, in this thread. One process has no other requests."""

    async def run(
        self, plan: Plan, tensors: Mapping[str, RawTensor], layer: Layer | None = None
    ) -> Result:
        result = _execute(Job(plan, tensors, layer))
        result.device = "cpu"
        return result

    async def compute(self, work: Callable[[], _T]) -> _T:
        return work()

    def reserve(self, size: int) -> AbstractContextManager[None]:
        return nullcontext()


class _CellRunner(_DirectRunner):
    """The same with errors as the service has them: a cell that fails does not end a sweep."""

    async def run(
        self, plan: Plan, tensors: Mapping[str, RawTensor], layer: Layer | None = None
    ) -> Result:
        try:
            return await super().run(plan, tensors, layer)
        except Exception as error:
            raise to_client_error(error, CpuDevice()) from None


def _complete(work: Coroutine[Any, Any, _T]) -> _T:
    """Returns the result of a coroutine that waits for nothing, without an event loop."""
    try:
        work.send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    raise AssertionError


def detect(message: Message) -> list[dict[str, Any]]:
    """Finds layout, heads and rotary order of the tensors in a message that has a check.

    Raises:
        QkvError: as the service would respond.
    """
    fields = {"check": {}, **message.fields}
    response = convert_message(replace(message, fields=fields))
    detected: list[dict[str, Any]] = response.fields["detected"]
    return detected


def variants() -> list[dict[str, Any]]:
    """Returns the description of each variant."""
    return [catalogue.describe(v) for v in catalogue.variants().values()]
