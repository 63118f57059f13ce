"""Times variants over lengths: runs the cells one after another, and finds crossovers."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial

from qkv.attention.signature import STATE
from qkv.errors import PayloadTooLarge, QkvError
from qkv.jobs.measure import Runner
from qkv.jobs.measure.compare import summarize_times
from qkv.jobs.measure.sweep_request import Curve, SweepRequest
from qkv.tensors import RawTensor
from qkv.wire.responses import Cell, Crossover, Done, Progress, VariantTiming

SweepEvent = tuple[str, Progress | Cell | Done]
"""The name of an event and its data."""


async def sweep(request: SweepRequest, runner: Runner) -> AsyncGenerator[SweepEvent]:
    """Yields `progress` before each cell, `cell` after it, and `done` at the end.

    A cell that cannot be measured has a `problem`; the sweep continues. Any other exception than a
    `QkvError` ends it.
    """
    done, total = 0, len(request.curves) * len(request.lengths)
    times: list[dict[int, VariantTiming]] = [{} for _ in request.curves]
    for length in request.lengths:
        for index, curve in enumerate(request.curves):
            name = curve.choice.variant.name
            yield "progress", Progress(done=done, total=total, variant=name, length=length)
            cell = Cell(
                index=index,
                parameters=curve.choice.parameters,
                variant=name,
                length=length,
                way=curve.way,
            )
            try:
                times[index][length], cell = await _measure(request, curve, cell, runner)
            except QkvError as error:
                cell = cell.model_copy(update={"problem": error.problem()})
            except MemoryError:  # from the inputs; the engine reports its own
                problem = PayloadTooLarge("there is no memory for its inputs").problem()
                cell = cell.model_copy(update={"problem": problem})
            done += 1
            yield "cell", cell
    yield "done", Done(cells=done, crossovers=tuple(crossovers(times)))


async def _measure(
    request: SweepRequest, curve: Curve, cell: Cell, runner: Runner
) -> tuple[VariantTiming, Cell]:
    """Returns the times of a cell, and the cell with its measurements.

    Raises:
        QkvError: the variant cannot run.
    """
    plan = request.plan(curve, cell.length)
    held = await _state_before(request, curve, cell.length, runner) if curve.way == "state" else {}
    with runner.reserve(plan.bytes_in):
        tensors = await runner.compute(partial(request.draw, plan, cell.length, held))
        peak_bytes = (await runner.run(plan.measured(peak=True), tensors)).peak_bytes
        runs = [(await runner.run(plan, tensors)).times for _ in range(request.repeats)]
    times = summarize_times([run.compute_s * 1e3 for run in runs])
    measured = {
        **times.model_dump(),
        "flops": plan.flops,
        "bytes": plan.bytes,
        "peak_bytes": peak_bytes,
        "held_bytes": _held_bytes(curve, tensors),
    }
    return times, cell.model_copy(update=measured)


async def _state_before(
    request: SweepRequest, curve: Curve, length: int, runner: Runner
) -> Mapping[str, RawTensor]:
    """Returns the state behind the tokens before the timed one."""
    plan = request.plan_before(curve, length)
    with runner.reserve(plan.bytes):
        tensors = await runner.compute(partial(request.draw, plan, length))
        outputs = (await runner.run(plan, tensors)).outputs
    return {name: x for name, x in outputs.items() if name.startswith(STATE)}


def _held_bytes(curve: Curve, tensors: Mapping[str, RawTensor]) -> int | None:
    """Returns the bytes that are kept from token to token; None for whole calls."""
    if curve.way is None:
        return None
    kept = {"cache": ("key", "value"), "state": (STATE,), "recompute": ()}[curve.way]
    return sum(x.nbytes for name, x in tensors.items() if name.startswith(kept))


def crossovers(curves: Sequence[Mapping[int, VariantTiming]]) -> list[Crossover]:
    """Returns the crossovers of each pair of curves.

    A curve is faster at a length if its slowest repeat is below the fastest repeat of the other
    one. A crossover has a faster curve on both sides, and not the same one; medians that cross
    inside the range of the repeats are noise. Medians cross on straight lines between the measured
    lengths, with both axes logarithmic.

    Args:
        curves: times by length. Two curves are compared at the lengths that both have.

    Returns:
        Crossovers in order of the curves, and then of length.
    """
    crossings = []
    for j in range(len(curves)):
        for i in range(j):
            crossings += _crossovers_of_pair(i, j, curves[i], curves[j])
    return crossings


def _crossovers_of_pair(
    i: int, j: int, one: Mapping[int, VariantTiming], other: Mapping[int, VariantTiming]
) -> list[Crossover]:
    crossings: list[Crossover] = []
    lengths = sorted(one.keys() & other.keys())
    before: tuple[int, int] | None = None  # the last index with a faster curve, and that curve
    for place, length in enumerate(lengths):
        if one[length].most_ms < other[length].least_ms:
            faster, slower = i, j
        elif other[length].most_ms < one[length].least_ms:
            faster, slower = j, i
        else:
            continue
        if before is not None and before[1] == slower:
            section = lengths[before[0] : place + 1]
            crossing = _median_crossing({n: one[n].median_ms / other[n].median_ms for n in section})
            crossings.append(
                Crossover(
                    before=slower, after=faster, length=crossing, between=(section[0], length)
                )
            )
        before = place, faster
    return crossings


def _median_crossing(ratios: Mapping[int, float]) -> float:
    """Returns the first length at which a ratio of medians crosses 1.

    If two medians are equal at a length, they cross there if the ratio is on opposite sides of 1
    before and after it.

    Args:
        ratios: by length, in order; the first and the last are on opposite sides of 1.
    """
    last: tuple[float, float] | None = None  # logarithms of a length and of a ratio other than 1
    equal: float | None = None  # the first length since then with the ratio 1
    for length, ratio in ratios.items():
        at, above = math.log(length), math.log(ratio)
        if above == 0:
            equal = at if equal is None else equal
            continue
        if last is not None and (last[1] > 0) != (above > 0):
            share = last[1] / (last[1] - above)
            return math.exp(last[0] + share * (at - last[0]) if equal is None else equal)
        last, equal = (at, above), None
    raise AssertionError
