"""Compares variants on the same inputs: runs their plans, and builds the report and its notes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from qkv.jobs.annotations import notes_of
from qkv.jobs.measure import Runner
from qkv.jobs.measure.compare_request import CompareEntry, CompareRequest
from qkv.jobs.measure.differences import (
    NO_ROWS,
    ErrorSums,
    HeadStats,
    RowStats,
    compare_rows,
    describe_rows,
    sum_errors,
)
from qkv.jobs.plan import Plan
from qkv.jobs.result import Result
from qkv.telemetry.times import Times
from qkv.tensors import RawTensor
from qkv.wire.responses import (
    BaselineComparison,
    BaselineHead,
    BaselineWeights,
    ComparedHead,
    ComparedVariant,
    CompareResponse,
    CompareTiming,
    VariantTiming,
    WeightsComparison,
)

_NEAR_UNIFORM: Final = 0.05
"""The mean gap in nats between the entropy of a row and of a uniform row, below which a note calls
the rows near uniform. It is the entropy of a uniform row of 95 % as many keys."""


@dataclass
class _Measured:
    """What is measured of the baseline or of a variant.

    Attributes:
        times: the sums of those of all its runs.
        runs: their number.
        device: the device of the last one.
        peak_bytes: the peak memory of a run.
        times_ms: the compute time of each timed run.
        notes: on the numbers of a run.
        errors: of the output; None if nothing was to compare it with.
        stats: of the metrics of its rows of weights, by name.
    """

    entry: CompareEntry
    runner: Runner
    times: Times = field(default_factory=Times)
    runs: int = 0
    device: str = ""
    peak_bytes: int = 0
    times_ms: list[float] = field(default_factory=list)
    notes: Sequence[str] = ()
    errors: ErrorSums | None = None
    stats: dict[str, RowStats] = field(default_factory=dict)

    async def run(self, plan: Plan) -> Result:
        """Runs a plan on the tensors of the entry."""
        result = await self.runner.run(plan, self.entry.tensors, self.entry.layer)
        self.times.add(result.times)
        self.runs, self.device = self.runs + 1, result.device
        return result

    async def add_rows(self, compute: Callable[[], Mapping[str, RowStats]]) -> None:
        """Computes the statistics of further rows, and adds them."""
        known, added = self.stats, await self.runner.compute(compute)
        self.stats = {n: known[n].merged(x) if n in known else x for n, x in added.items()}

    @cached_property
    def pooled(self) -> Mapping[str, HeadStats]:
        """The statistics over the rows of all heads, once all rows are added."""
        return {name: x.pooled().heads()[0] for name, x in self.stats.items()}

    def of_all_heads(self, metric: str) -> HeadStats:
        """Returns the statistics of a metric over the rows of all heads."""
        return self.pooled.get(metric, NO_ROWS)

    @property
    def name(self) -> str:
        """The variant."""
        return self.entry.choice.variant.name

    @property
    def weights_are(self) -> str:
        """The kind of the weights."""
        return self.entry.plan.weights_are

    @property
    def is_near_uniform(self) -> bool:
        """True if the rows are near uniform on average."""
        return self.of_all_heads("unevenness").mean < _NEAR_UNIFORM


async def compare(
    request: CompareRequest, runner: Runner, started_at: float
) -> tuple[CompareResponse, Times]:
    """Compares variants with a baseline; returns the response, and the sums of the times.

    Args:
        request: the comparison.
        runner: runs the plans.
        started_at: the start of the whole request, by `time.perf_counter`.

    Raises:
        QkvError: a run failed.
    """
    every = [_Measured(entry, runner) for entry in (request.baseline, *request.variants)]
    for one in every:  # first, so that no first call is timed
        one.peak_bytes = (await one.run(one.entry.plan.measured(peak=True))).peak_bytes
    await _measure_outputs(request, every)
    for rows in request.row_parts:
        await _measure_rows(request, every, rows)
    # many heads have as many figures
    return await runner.compute(partial(_report, request, every, started_at))


async def _measure_outputs(request: CompareRequest, every: Sequence[_Measured]) -> None:
    """Times the runs, and measures the errors of their outputs.

    The timed runs of the variants alternate, so that other load affects all variants alike.
    """
    baseline, *_ = every
    axes, right = request.head_axes, None
    for _ in range(request.repeats):
        for one in every:
            result = await one.run(one.entry.plan)
            one.times_ms.append(result.times.compute_s * 1e3)
            one.notes = result.notes
            if right is None:
                right = result.outputs["output"]
            elif one.errors is None and one is not baseline:
                errors = partial(sum_errors, result.outputs["output"], right, axes)
                one.errors = await one.runner.compute(errors)
    if request.has_reference:
        assert right is not None
        result = await baseline.run(baseline.entry.plan.measured(float64=True))
        errors = partial(sum_errors, right, result.outputs["output"], axes)
        baseline.errors = await baseline.runner.compute(errors)


async def _measure_rows(
    request: CompareRequest, every: Sequence[_Measured], rows: Sequence[int]
) -> None:
    """Compares the weights of some rows in float64, so that rounding does not matter."""
    baseline, *variants = every

    async def weights_of(one: _Measured) -> tuple[Tensor, bool]:
        result = await one.run(one.entry.rows_plan(rows))
        weights_BHRS = _rows_of(request, result.outputs["weights"], rows)
        return weights_BHRS, one.weights_are == "stochastic"

    anchor = await weights_of(baseline)
    await baseline.add_rows(partial(describe_rows, *anchor))
    for one in variants:
        await one.add_rows(partial(compare_rows, *await weights_of(one), *anchor))


def _rows_of(request: CompareRequest, weights: RawTensor, rows: Sequence[int]) -> Tensor:
    """Returns rows of weights, which may come with all other rows."""
    S = weights.shape[-1]
    whole_BHLS = torch.from_numpy(weights.numpy()).view(*request.planes, -1, S)
    return whole_BHLS if whole_BHLS.shape[2] == len(rows) else whole_BHLS[:, :, rows]


def _report(
    request: CompareRequest, every: Sequence[_Measured], started_at: float
) -> tuple[CompareResponse, Times]:
    baseline, *variants = every
    times = Times()
    for one in every:
        times.add(one.times)
    times.total_s = time.perf_counter() - started_at
    response = CompareResponse(
        anchor=BaselineComparison(**_figures(request, baseline, BaselineHead, _baseline_weights)),
        variants=tuple(
            ComparedVariant(**_figures(request, one, ComparedHead, _compared_weights))
            for one in variants
        ),
        notes=(
            *(f"{note}." for one in every for note in notes_of(one.entry.plan)),
            *(f"{one.name}: {note}." for one in every for note in one.notes),
            *_general_notes(request, every),
            *_variant_notes(every),
        ),
        timing=CompareTiming(
            queue_ms=times.queue_s * 1e3,
            transfer_ms=times.transfer_s * 1e3,
            compute_ms=times.compute_s * 1e3,
            runs=sum(one.runs for one in every),
            device=baseline.device,
            total_ms=times.total_s * 1e3,
        ),
    )
    return response, times


def summarize_times(times_ms: Sequence[float]) -> VariantTiming:
    """Returns the statistics of the compute times of several runs."""
    return VariantTiming(
        median_ms=median(times_ms),
        least_ms=min(times_ms),
        most_ms=max(times_ms),
        repeats=len(times_ms),
    )


_Stats = Mapping[str, HeadStats]


def _figures(
    request: CompareRequest,
    one: _Measured,
    head_type: Callable[..., Any],
    weights_of: Callable[[_Stats], Any],
) -> dict[str, Any]:
    """Returns the fields of a variant in the response.

    Args:
        request: the comparison.
        one: the variant, or the baseline.
        head_type: the class of the figures of a head.
        weights_of: returns the figures of weights from their statistics.
    """
    plan, axes, errors = one.entry.plan, request.head_axes, one.errors

    heads = None
    if request.per_head:
        count = request.head_count
        outputs = [None] * count if errors is None or axes is None else errors.heads()
        each = zip(*(x.heads() for x in one.stats.values()), strict=True)
        rows = [weights_of(dict(zip(one.stats, head, strict=True))) for head in each] or [None]
        # one head may stand for all: see `CompareRequest.planes`
        rows = rows if len(rows) == count else rows * count
        pairs = zip(outputs, rows, strict=True)
        heads = tuple(head_type(output=error, weights=figures) for error, figures in pairs)
    return {
        "variant": one.name,
        "parameters": one.entry.choice.parameters,
        "weights_are": one.weights_are,
        "output": None if errors is None else errors.whole(),
        "weights": weights_of(one.pooled) if one.stats else None,
        "timing": summarize_times(one.times_ms),
        "flops": plan.flops,
        "bytes": plan.bytes,
        "peak_bytes": one.peak_bytes,
        "heads": heads,
    }


def _baseline_weights(stats: _Stats) -> BaselineWeights:
    return BaselineWeights(entropy=stats["entropy"].as_entropy())


def _compared_weights(stats: _Stats) -> WeightsComparison:
    return WeightsComparison(
        total_variation=stats["total_variation"].as_divergence("most"),
        kl_divergence=stats["kl_divergence"].as_divergence("most"),
        js_divergence=stats["js_divergence"].as_divergence("most"),
        rank_correlation=stats["rank_correlation"].as_divergence("least"),
        entropy=stats["entropy"].as_entropy(),
    )


def _general_notes(request: CompareRequest, every: Sequence[_Measured]) -> list[str]:
    notes = []
    if not request.has_reference:
        notes.append(
            f"{every[0].name} ran in float64, the most exact dtype, so its own error is unknown."
        )
    if request.rows and len(request.rows) < request.row_count:
        notes.append(
            f"{len(request.rows)} of {request.row_count} rows of each head were compared, evenly "
            "spread, and `worst` is the worst of these. Set `rows` to null to compare all rows."
        )
    if all(one.is_near_uniform for one in every):
        notes.append(
            "This comparison is empty: on these inputs every variant, the baseline included, is "
            "close to the mean of the visible values."
        )
    return notes


def _variant_notes(every: Sequence[_Measured]) -> list[str]:
    """Returns one note for each fact that holds for some of the variants."""
    uniform = [one for one in every if one.is_near_uniform]
    gap = max((one.of_all_heads("unevenness").mean for one in uniform), default=0.0)
    baseline_causal = _causal(every[0])
    facts: dict[str, Callable[[_Measured], bool]] = {
        "Near uniform on these inputs: {}. The mean entropy of a row is within "
        f"{gap:.2g} nats of the logarithm of its number of visible keys. The "
        "output is close to the mean of the visible values. On random inputs this is expected. If "
        "the baseline distinguishes the keys, these variants do not.": uniform.__contains__,
        "Causal although the baseline is not, or the reverse: {}. Most of the difference comes "
        "from that. Set the parameter `causal` to the same value for all.": lambda one: (
            _causal(one) not in (None, baseline_causal)
        ),
        "The request has no projections for {}, so random ones were drawn. The figures are those "
        "of the random projections.": _has_random_inputs,
        "The weights of {} are signed: they have no entropy and no KL or Jensen-Shannon "
        "divergence, and total variation may exceed 1.": lambda one: (
            one.weights_are == "signed" and _has_rows(one)
        ),
        "The weights of {} are unnormalised: they have no entropy and no KL or Jensen-Shannon "
        "divergence, and total variation may exceed 1.": lambda one: (
            one.weights_are == "unnormalised" and _has_rows(one)
        ),
        "Zero weight where the baseline has weight, so the KL divergence is infinite: "
        "{}.": lambda one: one.of_all_heads("kl_divergence").most == math.inf,
        "All visible keys of each row have the same weight, in the baseline or in {}: there is no "
        "order to correlate.": lambda one: (
            _has_rows(one) and not one.of_all_heads("rank_correlation").rows
        ),
        "The output of {}, or the output it is compared with, is not finite.": lambda one: (
            one.errors is not None and one.errors.whole().largest_error is None
        ),
    }
    notes = []
    for sentence, holds in facts.items():
        if names := [one.name for one in every if holds(one)]:
            notes.append(sentence.format(_join_names(names)))
    return notes


def _causal(one: _Measured) -> bool | None:
    return getattr(one.entry.plan.parameters, "causal", None)


def _has_random_inputs(one: _Measured) -> bool:
    plan = one.entry.plan
    return bool(plan.variant.random_input_names - plan.inputs.specs.keys())


def _has_rows(one: _Measured) -> bool:
    """Returns True if rows of a variant were compared."""
    return one.of_all_heads("total_variation").rows > 0


def _join_names(names: Sequence[str]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last
