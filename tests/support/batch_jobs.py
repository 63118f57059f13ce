"""Random jobs with equal batch keys, for every variant."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from qkv.attention.catalogue import variants
from qkv.attention.signature import fixed_size
from qkv.attention.variant import Variant
from qkv.jobs.gradient_plan import GRAD_OUTPUT, GradientPlan
from qkv.jobs.job import Job
from qkv.jobs.plan import Limits, Plan
from qkv.jobs.weight_forms import query_axis
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.known_requests import DTYPES, FLOATING

LIMITS: Final = Limits(response_bytes=1 << 30, job_bytes=1 << 30)
TINY: Final = (1, 1, 2, 3, 5, 7)
FORMS: Final[tuple[Any, ...]] = ("full", "stats", {"pool": 3}, {"top_k": 1}, {"rows": [0, 0]})
RULES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("linear", ()), ("gated", ("log_decay",)), ("delta", ("beta",)),
    ("gated_delta", ("log_decay", "beta")),
)  # fmt: skip
LENGTHS: Final = (1, 2, 3, 7, 7, 16, 33, 65, 200)
VARIANTS_AND_JOBS: Final = [
    pytest.param(v, kind, id=f"{v.name}-{kind.__name__}")
    for v in variants().values()
    for kind in (Plan, GradientPlan)
    if kind is Plan or v.backward is not None
]


def random_jobs(variant: Variant, kind: type[Plan], seed: int) -> list[Job]:
    """Returns jobs with equal batch keys: small and odd shapes, random dtype and parameters."""
    random = np.random.default_rng(seed)
    sizes = {letter: int(random.choice(TINY)) for letter in "DEGIOR"}
    sizes |= {letter: int(random.choice(LENGTHS)) for letter in "LS"}
    sizes["H"] = sizes["G"] * int(random.choice((1, 1, 2, 3)))
    sizes |= {"J": sizes["H"], "V": sizes["G"], "T": sizes["G"]}
    sizes["Z"] = int(random.choice((1, sizes["D"])))
    sizes["N"] = sizes["S"] + int(random.choice(TINY)) - 1
    dtype = DTYPES[str(random.choice(FLOATING))]
    known = variant.parameters.model_fields
    parameters: dict[str, Any] = {}
    for name, values in (
        ("causal", (True, False)), ("query_offset", (0, 2, "end")), ("normalize", (True, False)),
        ("dropout", (0.0, 0.4)), ("seed", (0, 9)), ("method", ("cumsum", "loop", "softmax")),
    ):  # fmt: skip
        if name in known and random.random() < 0.5:
            parameters[name] = values[int(random.integers(len(values)))]
    gates: tuple[str, ...] = ()
    if "rule" in known:
        parameters["rule"], gates = RULES[seed % len(RULES)]
        parameters["normalize_qk"] = "beta" in gates  # the delta rules grow with large keys
    spread = float(random.choice([0.1, 1.0, 1.0, 5.0]))
    has_lengths = random.random() < 0.5

    def normal(shape: Any) -> RawTensor:
        return RawTensor.from_numpy((random.normal(size=shape) * spread).astype(dtype))

    def gate(name: str, shape: Any) -> RawTensor:
        numbers = np.abs(random.normal(size=shape))
        numbers = -numbers if name == "log_decay" else 1 / (1 + numbers)
        return RawTensor.from_numpy(numbers.astype(dtype))

    # tensors without axis B: requests that differ in them have different batch keys
    shared = {
        i.name: normal([sizes.get(x, 4) for x in i.letters])
        for i in variant.inputs.values()
        if "B" not in i.letters
        and (not i.is_optional or (i.letters == ("H",) and random.random() < 0.3))
    }
    one_row = query_axis(variant.outputs["weights"]) is None
    form = FORMS[seed % (len(FORMS) - one_row)]
    jobs = []
    for _ in range(3):
        own = sizes | {"B": int(random.choice((1, 1, 2, 3)))}
        tensors = dict(shared)
        for i in variant.inputs.values():
            shape = [fixed_size(x) or own.get(x, 4) for x in i.letters]
            if i.name in gates:
                tensors[i.name] = gate(i.name, shape)
            elif "B" in i.letters and not i.is_optional:
                tensors[i.name] = normal(shape)
            elif i.name == "key_lengths" and has_lengths:
                lengths = random.integers(0, sizes["S"] + 1, own["B"])
                tensors[i.name] = RawTensor.from_numpy(lengths)
        if kind is GradientPlan:
            output = variant.outputs["output"].letters
            tensors[GRAD_OUTPUT] = normal([own[x] for x in output])
        fields = {"parameters": parameters} | ({"weights": form} if kind is Plan else {})
        if kind is Plan and variant.steps and max(sizes["L"], sizes["S"]) < 16:
            fields["outputs"] = ["output", "weights", "steps"]
        message = Message(fields, tensors)
        jobs.append(Job.new(kind, variant.name, message, LIMITS))
    return jobs
