"""POST /v1/compare: variants on one set of inputs, side by side."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request, Response

from qkv.closeness import Closeness
from qkv.comparison import Comparison, Contender
from qkv.findings import Findings, answer
from qkv.job import Job
from qkv.measured import PEAK
from qkv.routes.body import elsewhere, read
from qkv.routes.runs import SERVER_TIMING, Runs, unless_left
from qkv.settings import Settings
from qkv.tensors import RawTensor
from qkv.wire import json, require

__all__ = ["router"]

_PARTS = ("queue_ms", "transfer_ms", "compute_ms")


def router(runs: Runs, settings: Settings) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["attention"])

    @routes.post(
        "/v1/compare",
        operation_id="compare",
        summary="Runs variants on one set of inputs, and says how far they are from one another.",
        description="Output errors are those of the outputs as they are answered, summed up in "
        "float64; weights are compared row by row in float64. All logarithms are natural. Each run "
        "waits for its turn by itself, so that others are answered in between.",
    )
    async def compare(request: Request) -> Response:
        require(", ".join(request.headers.getlist("accept")), json.MEDIA_TYPE)
        wait_s = runs.patience_of(request)
        with await runs.enter(request) as place:
            received = await read(request, "inputs", settings.max_body_bytes, place.grow)
            message = received.message
            every = (*message.tensors.values(), *message.layer.values())
            size = sum(tensor.nbytes for tensor in every if tensor.literal)
            comparison = await elsewhere(size, lambda: Comparison(message, runs.limits))
        measuring = _Measuring(runs, comparison, wait_s)
        body = await unless_left(request, asyncio.ensure_future(measuring.body()))
        timing = measuring.timing | {"total_ms": (time.perf_counter() - received.at) * 1e3}
        return Response(
            json.dump(body | {"timing": timing}),
            media_type=json.MEDIA_TYPE,
            headers={"Server-Timing": SERVER_TIMING % timing},
        )

    return routes


class _Measuring:
    """Has the jobs of a comparison run, one after the other.

    Attributes:
        timing: what they took together.
    """

    def __init__(self, runs: Runs, comparison: Comparison, wait_s: float | None) -> None:
        self._runs, self._comparison, self._wait_s = runs, comparison, wait_s
        self.timing: dict[str, Any] = dict.fromkeys(_PARTS, 0.0) | {"runs": 0}

    async def body(self) -> dict[str, Any]:
        """The answer, but for its timing."""
        asked = self._comparison
        contenders = [asked.anchor, *asked.variants]
        found = [Findings() for _ in contenders]
        for contender, findings in zip(contenders, found, strict=True):
            peak = (await self._run(contender.peak))[PEAK]
            findings.peak_bytes = int(peak.numpy()[0])
        await self._time(contenders, found)
        for contender, findings in zip(contenders[1:], found[1:], strict=True):
            for job in asked.divergences(contender):
                findings.add(await self._run(job))
        return answer(asked, found[0], found[1:])

    async def _time(self, contenders: list[Contender], found: list[Findings]) -> None:
        """Takes turns, so that what else the machine does befalls all alike."""
        right: RawTensor | None = None
        for turn in range(self._comparison.repeats):
            for contender, findings in zip(contenders, found, strict=True):
                before = self.timing["compute_ms"]
                output = (await self._run(contender.timed))["output"]
                findings.times_ms.append(self.timing["compute_ms"] - before)
                if turn == 0:
                    if right is not None:
                        findings.closeness = await _closeness(output, right)
                    else:
                        right = output
        if self._comparison.has_exact and right is not None:
            size = self._comparison.anchor.timed.bytes_in
            exact = await elsewhere(size, self._comparison.exact)
            found[0].closeness = await _closeness(right, (await self._run(exact))["output"])

    async def _run(self, job: Job) -> dict[str, RawTensor]:
        ran = await self._runs.measure(job, self._wait_s)
        for part in _PARTS:
            self.timing[part] += ran.timing[part]
        self.timing["runs"] += 1
        self.timing["device"] = ran.timing["device"]
        return ran.outputs


async def _closeness(made: RawTensor, right: RawTensor) -> Closeness:
    return await elsewhere(made.nbytes, lambda: Closeness.of(made, right))
