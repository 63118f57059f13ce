"""Requests to Linformer: axes that no tensor binds, and rejections."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor

from qkv.attention.variants import linformer
from qkv.errors import InvalidContent, PayloadTooLarge
from qkv.jobs.job import Job
from qkv.jobs.plan import Limits, Plan
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.each import each
from support.known_requests import assert_problem
from support.linformer_reference import ALL
from support.service import Server

PATH: Final = "/v1/attention/linformer"
LIMITS: Final = Limits(response_bytes=1 << 30, job_bytes=1 << 30)
INPUTS: Final = {"query": [[1, 0]], "key": [[1, 0], [0, 1]], "value": [[1, 2], [3, 4]]}


def raw(x: Tensor) -> RawTensor:
    return RawTensor.from_numpy(x.numpy())


def job(*tensors: RawTensor, **parameters: Any) -> Job:
    names = ("query", "key", "value", "key_projection", "value_projection")
    fields = {"parameters": parameters, "outputs": sorted(ALL)}
    return Job.new(
        Plan, "linformer", Message(fields, dict(zip(names, tensors, strict=False))), LIMITS
    )


def test_axes_that_no_tensor_binds() -> None:
    tensors = [raw(torch.randn(1, 2, 300, 4)) for _ in range(3)]
    E = raw(torch.randn(9, 301))
    for sent, rank in (
        (job(*tensors), 256),
        (job(*tensors, rank=7), 7),
        (job(*tensors, rank=1000), 1000),
        (job(*tensors, E), 9),
        (job(*tensors, E, rank=9), 9),
        (job(*(raw(torch.randn(1, 2, 30, 4)) for _ in range(3))), 30),
    ):
        L = sent.plan.inputs.axes.sizes["L"]  # equal to S
        assert sent.plan.inputs.axes.sizes["R"] == rank
        assert sent.plan.output_shape("map") == (1, 2, L, rank)
        random_count = 1 if "key_projection" in sent.tensors else 2
        assert sent.plan.score_count == 2 * L * rank + 32 * random_count * rank * L
        assert sent.plan.flops == 2 * 2 * rank * 8 * (L + L)


def test_misfits_are_rejected_before_the_queue() -> None:
    tensors = [raw(torch.randn(1, 1, 8, 4)) for _ in range(3)]
    with pytest.raises(InvalidContent, match=r"columns: got N=7, expected at least S=8"):
        job(*tensors, raw(torch.randn(3, 7)))
    with pytest.raises(
        InvalidContent, match=r"'rank' does not fit the projections: got 4, expected R=3"
    ) as caught:
        job(*tensors, raw(torch.randn(3, 8)), rank=4)
    assert caught.value.pointer == "/parameters/rank"
    with pytest.raises(InvalidContent, match="value_projection has R=4 where key_projection has"):
        job(*tensors, raw(torch.randn(3, 8)), raw(torch.randn(4, 8)))
    with pytest.raises(InvalidContent, match="value_projection has N=9 where key_projection has"):
        job(*tensors, raw(torch.randn(3, 8)), raw(torch.randn(3, 9)))
    message = Message({"parameters": {"rank": 3}}, dict(zip(INPUTS, tensors, strict=True)))
    # 8 x 3 pairs, and two random projections of 3 x 8
    with pytest.raises(PayloadTooLarge, match=f"too many scores: got {24 + 32 * 2 * 24}"):
        Job.new(Plan, "linformer", message, LIMITS._replace(score_count=23))
    Job.new(Plan, "linformer", message, LIMITS._replace(score_count=24 + 32 * 2 * 24))


@each(
    ("S", "width", "rank"),
    [(5000, 4, 65536), (1, 8192, 65536), (1, 1, 1 << 27)],
)
def test_memory_of_projections_is_bounded(S: int, width: int, rank: int) -> None:
    """A large rank turns small inputs into large projections and mixtures."""
    sizes = dict.fromkeys("BHGL", 1) | {"S": S, "D": width, "E": width}

    class Parameters:
        def __init__(self, rank: int | None) -> None:
            self.rank = rank

    if rank > 65536:
        sizes |= {"R": rank, "N": S}
    with pytest.raises(PayloadTooLarge, match="numbers beside the inputs") as caught:
        linformer.infer_sizes(sizes, Parameters(None if rank > 65536 else rank))
    assert caught.value.members == {"limit": 1 << 26}
    sizes |= {"S": 65536, "H": 8, "G": 8, "D": 64, "E": 64, "R": 256, "N": 65536}
    assert linformer.infer_sizes(sizes, Parameters(None)) == {"R": 256}


def test_rank_and_seed_out_of_range_are_rejected(server: Server) -> None:
    for name, value in (("rank", 0), ("rank", 65537), ("rank", 1.5), ("seed", -1), ("seed", 0.5)):
        body = {"inputs": INPUTS, "parameters": {name: value}}
        assert name in assert_problem(server.http.post(PATH, json=body), 422)["detail"]
