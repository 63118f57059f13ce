"""The path of a request depends on its own numbers, not on those of others in its batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest

from qkv.attention.catalogue import variants
from qkv.attention.signature import fixed_size
from qkv.attention.variant import Variant
from qkv.engine.device.device import Device
from qkv.engine.executor import execute
from qkv.jobs.gradient_plan import GRAD_OUTPUT, GradientPlan
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.jobs.result import Result
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.engines import CPU, LIMITS, new_job
from support.known_requests import DTYPES
from support.pretended_device import PretendedDevice

SIZES: Final = {
    "B": 2, "H": 2, "G": 1, "J": 2, "V": 1, "L": 7, "S": 9, "D": 8, "E": 8, "I": 6, "O": 5
}  # fmt: skip
ALL_TINY: Final = 1e-31  # of all numbers; other scales are those of every third number
SCALES: Final = (1.0, ALL_TINY, 30.0, 300.0, 2e9, 1e30, 0.0, float("nan"), float("inf"), 1e-30, 1.0)
OF_FLOAT16: Final = tuple(s for s in SCALES if s not in (2e9, 1e30, 1e-30))  # infinity, and 0
FEW_SCALES: Final = (1.0, 300.0, 1e30, float("nan"), 1.0)  # beside numbers that all jobs share
KINDS: Final = [
    pytest.param(v, kind, id=f"{v.name}-{kind.__name__}")
    for v in variants().values()
    for kind in (Plan, GradientPlan)
    if "B" in next(iter(v.inputs.values())).letters and v.name != "linear_layer"
]


def jobs_of(
    variant: Variant,
    kind: type[Plan],
    dtype: str,
    parameters: dict[str, Any],
    scales: tuple[float, ...] = SCALES,
) -> list[Job]:
    """Returns jobs with equal batch keys, whose numbers need different paths."""
    jobs = []
    for seed, scale in enumerate(scales):
        random = np.random.default_rng(seed)
        arrays = {}
        with np.errstate(over="ignore", invalid="ignore"):
            for i in variant.inputs.values():
                if not i.is_optional:
                    shape = [fixed_size(x) or SIZES[x] for x in i.letters]
                    arrays[i.name] = random.normal(size=shape).astype(DTYPES[dtype])
                    step = 1 if scale == ALL_TINY else 3
                    arrays[i.name].flat[::step] *= DTYPES[dtype].type(scale)
        if kind is GradientPlan:
            shape = [SIZES[x] for x in variant.outputs["output"].letters]
            arrays[GRAD_OUTPUT] = random.normal(size=shape).astype(DTYPES[dtype])
        jobs.append(new_job(arrays, variant.name, kind, parameters=parameters))
    assert len({job.batch_key for job in jobs}) == 1
    return jobs


def assert_as_alone(jobs: Sequence[Job], together: Sequence[Result], device: Device) -> None:
    """Each job has the path that it has alone, and its numbers within rounding."""
    for job, output in zip(jobs, together, strict=True):
        (alone,) = execute([job], device, stack=True)
        assert output.backend == alone.backend
        for name, raw in output.outputs.items():
            one, other = raw.numpy(), alone.outputs[name].numpy()
            finite = np.abs(other[np.isfinite(other)].astype(np.float64))
            eps = np.finfo(other.dtype).eps if other.dtype.kind == "f" else 0.0
            bound = 64 * eps * finite.max(initial=0)
            np.testing.assert_allclose(one, other, rtol=0, atol=bound, err_msg=name)


@pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param(CPU, "float32", id="cpu-float32"),
        pytest.param(PretendedDevice(), "float32", id="pretended-float32"),
        # a CPU that stacks is of tests alone: once is enough
        pytest.param(PretendedDevice(), "float64", id="pretended-float64", marks=pytest.mark.slow),
        pytest.param(PretendedDevice(), "float16", id="pretended-float16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("variant", "kind"), KINDS)
def test_job_takes_the_path_that_it_takes_alone(
    variant: Variant, kind: type[Plan], device: Device, dtype: str
) -> None:
    """Also if it runs again, in float64 or alone."""
    has_causal = "causal" in variant.parameters.model_fields
    for parameters in ({}, {"causal": True}) if has_causal else ({},):
        scales = OF_FLOAT16 if dtype == "float16" else SCALES
        jobs = jobs_of(variant, kind, dtype, parameters, scales)
        together = execute(jobs, device, stack=True)
        assert_as_alone(jobs, together, device)


SUMMARIES: Final[tuple[Any, ...]] = ("stats", {"rows": [3, 0]}, {"top_k": 2}, {"pool": 3})
LAYERS: Final = ("sigmoid", "efficient", "taylor", "linformer", "gated", "softmax", "linear")
"""The last two have each summary of the weights, of blocks of scores and without scores: the path
of a projection does not depend on the form."""


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, form) for name in LAYERS for form in ("none", "full")),
        *((name, form) for name in LAYERS[-2:] for form in SUMMARIES),
        *zip(LAYERS[:-2], (*SUMMARIES, SUMMARIES[0]), strict=True),
    ],
    ids=str,
)
def test_layer_takes_the_path_that_it_takes_alone(name: str, form: Any) -> None:
    """Projections of large embeddings need float64, or their own call."""
    random = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> RawTensor:
        return RawTensor.from_numpy((random.normal(size=shape) * scale).astype(np.float32))

    weights = {f"W_{role}": normal(16, 16) for role in ("query", "key", "value")}
    outputs = ["output"] if form == "none" else ["output", "weights"]
    fields = {"outputs": outputs, "weights": form, "layer": {"layout": "v1", "heads": 2}}
    first, *others = (
        Job.new(Plan, name, Message(fields, {"x": normal(2, 9, 16, scale=scale)}, weights), LIMITS)
        for scale in (1.0, 30.0, 1e9, 1e16, 1e30, 1.0)
    )
    layer = first.layer
    jobs = [first, *(Job(job.plan, job.tensors, layer) for job in others)]
    device = PretendedDevice()
    together = execute(jobs, device, stack=True)
    assert_as_alone(jobs, together, device)


@pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param(CPU, "float32", id="cpu-float32"),
        *(pytest.param(PretendedDevice(), dtype, id=f"pretended-{dtype}")
          for dtype in ("float32", "float64", "bfloat16")),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("slopes", "sinks"),
    [
        ((0.5, -0.25), (1.0, -2.0)), ((3e38, 0.0), (0.0, 0.0)), ((0.0, 1.0), (3e38, -3e38)),
        ((0.5, 0.5), (np.inf, 1.0)), ((0.0, 1.0), (-np.inf, np.inf)),
    ],
)  # fmt: skip
def test_slopes_and_sinks_select_the_path_too(
    slopes: tuple[float, ...], sinks: tuple[float, ...], dtype: str, device: Device
) -> None:
    """All jobs of a batch share them; huge ones need float64."""
    variant = variants()["softmax"]
    terms = {"alibi_slopes": np.array(slopes, "f4"), "sinks": np.array(sinks, "f4")}
    shared = {name: RawTensor.from_numpy(array) for name, array in terms.items()}
    for parameters in ({}, {"causal": True, "query_offset": 10**7}):
        jobs = []
        for job in jobs_of(variant, Plan, dtype, parameters, FEW_SCALES):
            fields = {"parameters": parameters, "outputs": ["output", "weights"]}
            message = Message(fields, {**job.tensors, **shared})
            jobs.append(Job.new(Plan, "softmax", message, LIMITS))
        assert len({job.batch_key for job in jobs}) == 1
        together = execute(jobs, device, stack=True)
        assert_as_alone(jobs, together, device)
        alone = execute([jobs[0]], CPU, stack=False)[0].outputs["weights"].numpy()
        found = together[0].outputs["weights"].numpy()
        eps = np.finfo(found.dtype).eps
        np.testing.assert_allclose(found, alone, rtol=0, atol=1e3 * eps)
