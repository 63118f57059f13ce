"""Random jobs with equal batch keys, for every variant."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, Final

import pytest
import torch

from qkv.attention.catalogue import variants
from qkv.attention.variant import Variant
from qkv.client.arrays import to_raw
from qkv.jobs.gradient_plan import GRAD_OUTPUT, GradientPlan
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.jobs.weight_forms import query_axis
from qkv.wire.message import Message
from support.drawn_requests import Request, sample
from support.engines import LIMITS

FORMS: Final[tuple[Any, ...]] = ("full", "stats", {"pool": 3}, {"top_k": 1}, {"rows": [0, 0]})
LENGTHS: Final = (1, 2, 3, 7, 7, 16, 33, 65, 200)
VARIANTS_AND_JOBS: Final = [
    pytest.param(v, kind, id=f"{v.name}-{kind.__name__}")
    for v in variants().values()
    for kind in (Plan, GradientPlan)
    if kind is Plan or v.backward is not None
]


def random_jobs(variant: Variant, kind: type[Plan], seed: int) -> list[Job]:
    """Returns jobs with equal batch keys, but for those of tensors without axis B."""
    random = Random(f"jobs {seed}")  # independent of the choices of `sample`
    lengths = {letter: random.choice(LENGTHS) for letter in "LS"}
    first = sample(variant, seed, lengths, is_tame=True)
    fields: dict[str, Any] = {"parameters": dict(first.parameters)}
    if kind is Plan:
        one_row = query_axis(variant.outputs["weights"]) is None
        fields["weights"] = FORMS[seed % (len(FORMS) - one_row)]
        if variant.steps and max(lengths.values()) < 16:
            fields["outputs"] = ["output", "weights", "steps"]
    jobs: list[Job] = []
    for _ in range(3):
        sizes = {**first.sizes, "B": random.choice((1, 1, 2, 3))}
        request = replace(first, sizes=sizes, item_seed=random.getrandbits(32))
        job = _job(variant, kind, request, fields)
        # one object: a batch key has the object of a tensor without axis B, not its numbers
        shared = {i.name for i in variant.inputs.values() if "B" not in i.letters}
        same = {n: x for n, x in jobs[0].tensors.items() if n in shared} if jobs else {}
        jobs.append(Job(job.plan, {**job.tensors, **same}, job.layer))
    return jobs


def _job(variant: Variant, kind: type[Plan], request: Request, fields: dict[str, Any]) -> Job:
    tensors = {name: to_raw(tensor) for name, tensor in request.named_tensors().items()}
    if kind is GradientPlan:
        shape = [request.sizes[letter] for letter in variant.outputs["output"].letters]
        generator = torch.Generator().manual_seed(request.item_seed)
        grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[GRAD_OUTPUT] = to_raw(grad.to(request.dtype))
    return Job.new(kind, variant.name, Message(fields, tensors), LIMITS)
