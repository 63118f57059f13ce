"""The number of times that the host waits for the device in a batch: once, for the outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import pytest

from qkv.attention.catalogue import variants
from qkv.attention.signature import fixed_size
from qkv.attention.variant import Variant
from qkv.engine.executor import execute
from qkv.jobs.gradient_plan import GRAD_OUTPUT, GradientPlan
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.jobs.result import Result
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.engines import LIMITS, new_job
from support.pretended_device import PretendedDevice, counting, log

SIZES: Final = {
    "B": 2,
    "H": 4,
    "G": 2,
    "J": 4,
    "V": 2,
    "L": 33,
    "S": 70,
    "D": 16,
    "E": 16,
    "I": 20,
    "O": 9,
}
FORMS: Final[tuple[Any, ...]] = (
    "none", "full", "stats", {"rows": [3, 0]}, {"top_k": 2}, {"pool": 3},
)  # fmt: skip
FORWARD: Final = [
    pytest.param(v, form, id=f"{v.name}-{next(iter(form)) if isinstance(form, dict) else form}")
    for v in variants().values()
    for form in FORMS
    if not (isinstance(form, dict) and "rows" in form and v.name == "linear_layer")
]
BACKWARD: Final = [v for v in variants().values() if v.backward is not None]
ENDS: Final = {"causal": True, "query_offset": "end"}


def arrays_of(variant: Variant, seed: int, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Returns normal inputs of a request, and lengths of keys if the variant takes them."""
    random = np.random.default_rng(seed)
    arrays = dict(shared)
    for i in variant.inputs.values():
        if i.name in arrays:
            continue
        if i.name == "key_lengths":
            arrays[i.name] = random.integers(40, SIZES["S"], SIZES["B"])
        elif not i.is_optional:
            arrays[i.name] = normal(random, i.letters)
    return arrays


def normal(random: np.random.Generator, letters: tuple[str, ...]) -> Any:
    """Returns normal numbers for these axes."""
    shape = [fixed_size(x) or SIZES[x] for x in letters]
    return random.normal(size=shape).astype(np.float32)


def run_batch(
    variant: Variant, kind: type[Plan], optional: Collection[str] = (), **fields: Any
) -> tuple[list[Result], int]:
    """Runs three requests as a batch; returns their outputs and the number of waits.

    They share the inputs without an axis B; of the optional ones those that are named.
    """
    shared = {
        i.name: normal(np.random.default_rng(9), i.letters)
        for i in variant.inputs.values()
        if "B" not in i.letters and (not i.is_optional or i.name in optional)
    }
    first: Job | None = None
    jobs = []
    for seed in range(3):
        arrays = arrays_of(variant, seed, shared)
        if kind is GradientPlan:
            letters = variant.outputs["output"].letters
            arrays[GRAD_OUTPUT] = normal(np.random.default_rng(seed + 50), letters)
        job = new_job(arrays, variant.name, kind, **fields)
        first = first or job
        same = {name: first.tensors[name] for name in shared}
        jobs.append(Job(job.plan, {**job.tensors, **same}, job.layer))
    jobs = [job for job in jobs if job.batch_key == jobs[0].batch_key]
    device = PretendedDevice()
    with counting() as counted:
        outputs = execute(jobs, device, stack=True)
    assert device.synchronizations <= counted["sync"], log
    return outputs, counted["sync"]


@pytest.mark.parametrize(("variant", "form"), FORWARD)
def test_forward_waits_once(variant: Variant, form: Any) -> None:
    outputs, waits = run_batch(variant, Plan, outputs=outputs_for(form), weights=form)
    assert waits == 1, log
    assert [o.times.stacked_count for o in outputs] == [3, 3, 3]


each_optional = pytest.mark.parametrize(
    "optional", [("alibi_slopes",), ("sinks",), ("alibi_slopes", "sinks")]
)
each_visibility = pytest.mark.parametrize(
    "parameters", [{}, ENDS, {"dropout": 0.5}], ids=["all", "ends", "drops"]
)


@pytest.mark.parametrize("form", FORMS, ids=str)
@each_optional
@each_visibility
def test_slopes_and_sinks_wait_no_longer(
    form: Any, optional: Collection[str], parameters: dict[str, Any]
) -> None:
    fields = {"outputs": outputs_for(form), "weights": form, "parameters": parameters}
    outputs, waits = run_batch(variants()["softmax"], Plan, optional, **fields)
    assert waits == 1, log
    assert [o.times.stacked_count for o in outputs] == [3, 3, 3]


@each_optional
@each_visibility
def test_gradients_with_slopes_and_sinks_wait_no_longer(
    optional: Collection[str], parameters: dict[str, Any]
) -> None:
    _, waits = run_batch(variants()["softmax"], GradientPlan, optional, parameters=parameters)
    assert waits <= 2, log


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ["softmax", "sigmoid", "linear", "efficient", "taylor"])
def test_forward_also_reads_key_lengths_that_give_positions(name: str, form: Any) -> None:
    """Variants with shared sums cut the keys there: for the output, and for a form."""
    variant = variants()[name]
    fields = {"outputs": outputs_for(form), "weights": form, "parameters": ENDS}
    outputs, waits = run_batch(variant, Plan, **fields)
    assert waits <= (2 if form in ("none", "full") else 3), log
    assert [o.times.stacked_count for o in outputs] == [3, 3, 3]


@pytest.mark.parametrize("variant", BACKWARD, ids=lambda v: v.name)
@pytest.mark.parametrize("parameters", [{}, ENDS], ids=["all", "ends"])
def test_gradients_wait_twice_at_most(variant: Variant, parameters: dict[str, Any]) -> None:
    known = {n: v for n, v in parameters.items() if n in variant.parameters.model_fields}
    outputs, waits = run_batch(variant, GradientPlan, parameters=known)
    assert waits <= 2, log
    assert len(outputs) == outputs[0].times.stacked_count


def outputs_for(form: Any) -> list[str]:
    """Returns the outputs of a request with this form of the weights."""
    return ["output"] if form == "none" else ["output", "weights"]


@pytest.mark.parametrize("kind", [Plan, GradientPlan])
def test_layer_waits_once(kind: type[Plan]) -> None:
    """The guards of the projections are read with the outputs, and so are a layer's gradients."""
    random = np.random.default_rng(0)
    width = SIZES["H"] * SIZES["D"]
    layer = {
        f"W_{role}.{part}": RawTensor.from_numpy(random.normal(size=shape).astype(np.float32) / 8)
        for role in ("query", "key", "value")
        for part, shape in (("weight", (width, 64)), ("bias", (width,)))
    }
    tensors = {"x": RawTensor.from_numpy(random.normal(size=(2, 33, 64)).astype(np.float32))}
    fields: dict[str, Any] = {"layer": {"layout": "v2", "heads": SIZES["H"]}}
    if kind is GradientPlan:
        grad = random.normal(size=(2, 33, width)).astype(np.float32)
        tensors[GRAD_OUTPUT] = RawTensor.from_numpy(grad)
    for name in ("softmax", "sigmoid", "linear", "efficient", "taylor", "linformer"):
        job = Job.new(kind, name, Message(fields, tensors, layer), LIMITS)
        device = PretendedDevice()
        with counting() as counted:
            (output,) = execute([job], device, stack=True)
        assert counted["sync"] == 1, (name, log)
        assert output.outputs.keys() == job.plan.output_specs.keys()
