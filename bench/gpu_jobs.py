"""Jobs of bench/on_gpu.py: every variant, dtype and kind of run, at the sizes S, M and L."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from bodies import SHAPES

from qkv.attention.catalogue import variants
from qkv.attention.signature import fixed_size
from qkv.attention.variant import Variant
from qkv.jobs.gradient_plan import GRAD_OUTPUT, GradientPlan
from qkv.jobs.job import Job
from qkv.jobs.plan import Limits, Plan
from qkv.tensors import DTYPES, FLOATING, RawTensor
from qkv.wire.message import Message

UNLIMITED: Final = Limits(1 << 62, 1 << 62, 1 << 62)

_RANK: Final = 16  # of projections of keys
_LAYER: Final = {"I": 512, "O": 512}


class Kind(NamedTuple):
    """One kind of run.

    Attributes:
        name: its label in tables.
        outputs: the outputs that the run returns; () for gradients.
    """

    name: str
    outputs: tuple[str, ...]


OUTPUT: Final = Kind("output", ("output",))
KINDS: Final = (OUTPUT, Kind("weights", ("output", "weights")), Kind("gradients", ()))


def kinds_of(variant: Variant) -> list[Kind]:
    """Returns the kinds of runs of a variant."""
    return [kind for kind in KINDS if kind.outputs or variant.backward is not None]


def sizes_of(shape: Sequence[int]) -> dict[str, int]:
    """Returns the size of each letter for a shape (B, H, L, D); L and S are equal."""
    B, H, L, D = shape
    heads = dict.fromkeys("HGJV", H)
    return {"B": B, "L": L, "S": L, "N": L, "D": D, "E": D, "R": _RANK} | heads | _LAYER


def build_jobs(
    variant: str,
    count: int,
    shape: Sequence[int] = SHAPES["S"],
    dtype: str = "float32",
    kind: Kind = OUTPUT,
) -> list[Job]:
    """Returns jobs with equal batch keys and different normal numbers.

    Args:
        variant: its name.
        count: the number of jobs.
        shape: (B, H, L, D).
        dtype: a floating dtype.
        kind: the kind of run.
    """
    found, random = variants()[variant], np.random.default_rng(0)
    sizes, required = sizes_of(shape), [i for i in found.inputs.values() if not i.is_optional]

    def normal(letters: Sequence[str], scale: float = 1.0) -> RawTensor:
        numbers = random.normal(size=[fixed_size(x) or sizes[x] for x in letters]) * scale
        return RawTensor.from_numpy(numbers.astype(DTYPES[dtype]))

    # requests that differ in a tensor without B have different batch keys
    shared = {
        i.name: normal(i.letters, sizes[i.letters[-1]] ** -0.5)
        for i in required
        if "B" not in i.letters
    }
    fields: dict[str, Any] = {"outputs": list(kind.outputs)} if kind.outputs else {}
    jobs: list[Job] = []
    for _ in range(count):
        tensors = shared | {
            i.name: normal(i.letters)
            for i in required
            if i.name not in shared and set(i.dtypes) & set(FLOATING)
        }
        if not kind.outputs:
            tensors[GRAD_OUTPUT] = normal(found.outputs["output"].letters)
        job_type = Plan if kind.outputs else GradientPlan
        job = Job.new(job_type, variant, Message(fields, tensors), UNLIMITED)
        jobs.append(_share(job, jobs[0], list(shared)) if jobs else job)
    return jobs


def _share(job: Job, first: Job, names: Sequence[str]) -> Job:
    """Returns a job with some tensors of the first one: batch keys compare their identity."""
    same = {name: first.tensors[name] for name in names}
    return Job(job.plan, {**job.tensors, **same}, job.layer)
