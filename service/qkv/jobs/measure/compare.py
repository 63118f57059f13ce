"""Compares variants on the same inputs: runs their plans, and builds the report and its notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qkv.jobs.annotations import notes_of
from qkv.jobs.measure import Runner
from qkv.jobs.measure.compare_request import CompareEntry, CompareRequest
from qkv.jobs.measure.differences import (
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
    Divergence,
    Entropy,
    VariantTiming,
    WeightsComparison,
)

__all__ = ["Comparison", "compare", "summarize_times"]

_NEAR_UNIFORM: Final = 0.05
"""The mean gap in nats between the entropy of a row and of a uniform row, below which a note calls
the rows near uniform. It is the entropy of a uniform row of 95 % as many keys."""


class Comparison(NamedTuple):
    """The fields of a `CompareResponse`, with the sums of the times of all runs.

    Attributes:
        times: the sums.
        runs: the number of runs.
        device: that of the runs.
    """

    anchor: BaselineComparison
    variants: tuple[ComparedVariant, ...]
    notes: tuple[str, ...]
    times: Times
    runs: int
    device: str

    def response(self, total_s: float) -> CompareResponse:
        """Returns the response to a request that took `total_s` seconds."""
        timing = CompareTiming(
            queue_ms=self.times.queue_s * 1e3,
            transfer_ms=self.times.transfer_s * 1e3,
            compute_ms=self.times.compute_s * 1e3,
            runs=self.runs,
            device=self.device,
            total_ms=total_s * 1e3,
        )
        return CompareResponse(
            anchor=self.anchor, variants=self.variants, notes=self.notes, timing=timing
        )


@dataclass
class _Measured:
    """What was measured of the baseline or of a variant.

    Attributes:
        peak_bytes: the peak memory of a run.
        times_ms: the compute time of each timed run.
        notes: on the numbers of a run.
        errors: of the output; None if nothing was to compare it with.
        stats: of the metrics of its rows of weights, by name.
    """

    entry: CompareEntry
    peak_bytes: int = 0
    times_ms: list[float] = field(default_factory=list)
    notes: Sequence[str] = ()
    errors: ErrorSums | None = None
    stats: dict[str, RowStats] = field(default_factory=dict)

    def add_rows(self, stats: Mapping[str, RowStats]) -> None:
        """Adds the statistics of further rows."""
        known = self.stats
        self.stats = {n: known[n].merged(x) if n in known else x for n, x in stats.items()}

    def pooled(self, metric: str) -> HeadStats | None:
        """Returns the statistics of a metric over the rows of all heads; None: it has none."""
        stats = self.stats.get(metric)
        return stats.pooled().heads()[0] if stats is not None else None

    def has_rows(self, metric: str) -> bool:
        """Returns True if some of the rows have a metric."""
        pooled = self.pooled(metric)
        return pooled is not None and pooled.rows > 0

    @property
    def name(self) -> str:
        """The variant."""
        return self.entry.choice.variant.name

    @property
    def weights_are(self) -> str:
        """The kind of the weights."""
        return self.entry.plan.weights_are

    @property
    def is_stochastic(self) -> bool:
        """True if no weight is negative, and each row sums to 1."""
        return self.weights_are == "stochastic"

    @property
    def unevenness(self) -> float:
        """The mean unevenness of the rows; NaN if they have none."""
        pooled = self.pooled("unevenness")
        return math.nan if pooled is None else pooled.mean

    @property
    def is_near_uniform(self) -> bool:
        """True if the rows are near uniform on average."""
        return self.unevenness < _NEAR_UNIFORM


class _Runs:
    """Runs plans of entries, and adds up what the runs took."""

    def __init__(self, runner: Runner) -> None:
        self._run = runner.run
        self.times, self.count, self.device = Times(), 0, ""

    async def __call__(self, plan: Plan, entry: CompareEntry) -> Result:
        result = await self._run(plan, entry.tensors, entry.layer)
        self.times.add(result.times)
        self.count, self.device = self.count + 1, result.device
        return result


async def compare(request: CompareRequest, runner: Runner) -> Comparison:
    """Compares variants with a baseline.

    Raises:
        QkvError: a run failed.
    """
    run = _Runs(runner)
    every = [_Measured(entry) for entry in (request.baseline, *request.variants)]
    for one in every:  # first, so that no first call is timed
        one.peak_bytes = (await run(one.entry.plan.measured(peak=True), one.entry)).peak_bytes
    await _measure_outputs(request, every, run, runner)
    for rows in request.row_parts:
        await _measure_rows(request, every, rows, run, runner)
    # the statistics of many heads take as long as the figures of rows
    return await runner.compute(partial(_report, request, every, run))


async def _measure_outputs(
    request: CompareRequest, every: Sequence[_Measured], run: _Runs, runner: Runner
) -> None:
    """Times the runs, and measures the errors of their outputs.

    The timed runs of the variants alternate, so that other load affects all variants alike.
    """
    baseline, *_ = every
    axes, right = request.head_axes, None
    for _ in range(request.repeats):
        for one in every:
            result = await run(one.entry.plan, one.entry)
            one.times_ms.append(result.times.compute_s * 1e3)
            one.notes = result.notes
            if right is None:
                right = result.outputs["output"]
            elif one.errors is None and one is not baseline:
                errors = partial(sum_errors, result.outputs["output"], right, axes)
                one.errors = await runner.compute(errors)
    if request.has_reference:
        assert right is not None
        result = await run(baseline.entry.plan.measured(float64=True), baseline.entry)
        errors = partial(sum_errors, right, result.outputs["output"], axes)
        baseline.errors = await runner.compute(errors)


async def _measure_rows(
    request: CompareRequest,
    every: Sequence[_Measured],
    rows: Sequence[int],
    run: _Runs,
    runner: Runner,
) -> None:
    """Compares the weights of some rows in float64, so that rounding does not matter."""
    baseline, *variants = every

    async def weights_of(one: _Measured) -> Tensor:
        result = await run(one.entry.rows_plan(rows), one.entry)
        return _rows_of(request, result.outputs["weights"], rows)

    baseline_BHRS, is_stochastic = await weights_of(baseline), baseline.is_stochastic
    baseline.add_rows(await runner.compute(partial(describe_rows, baseline_BHRS, is_stochastic)))
    for one in variants:
        kinds = one.is_stochastic, is_stochastic
        compared = partial(compare_rows, await weights_of(one), baseline_BHRS, kinds)
        one.add_rows(await runner.compute(compared))


def _rows_of(request: CompareRequest, weights: RawTensor, rows: Sequence[int]) -> Tensor:
    """Returns rows of weights, which may come with all other rows."""
    S = weights.shape[-1]
    whole_BHLS = torch.from_numpy(weights.numpy()).view(*request.planes, -1, S)
    return whole_BHLS if whole_BHLS.shape[2] == len(rows) else whole_BHLS[:, :, rows]


def _report(request: CompareRequest, every: Sequence[_Measured], run: _Runs) -> Comparison:
    baseline, *variants = every
    return Comparison(
        BaselineComparison(**_figures(request, baseline, BaselineHead, _baseline_weights)),
        tuple(
            ComparedVariant(**_figures(request, one, ComparedHead, _compared_weights))
            for one in variants
        ),
        (
            *(f"{note}." for one in every for note in notes_of(one.entry.plan)),
            *(f"{one.name}: {note}." for one in every for note in one.notes),
            *_general_notes(request, every),
            *_variant_notes(every),
        ),
        run.times,
        run.count,
        run.device,
    )


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

    def weights(stats: Mapping[str, RowStats]) -> list[Any]:
        """Returns the figures of each head of these statistics."""
        heads = zip(*(x.heads() for x in stats.values()), strict=True)
        return [weights_of(dict(zip(stats, each, strict=True))) for each in heads]

    heads = None
    if request.per_head:
        count = request.head_count
        outputs = [None] * count if errors is None or axes is None else errors.heads()
        rows = weights(one.stats) or [None]
        # one head may stand for all: see `CompareRequest.planes`
        rows = rows if len(rows) == count else rows * count
        pairs = zip(outputs, rows, strict=True)
        heads = tuple(head_type(output=error, weights=figures) for error, figures in pairs)
    (pooled,) = weights({n: x.pooled() for n, x in one.stats.items()}) or [None]
    return {
        "variant": one.name,
        "parameters": one.entry.choice.parameters,
        "weights_are": one.weights_are,
        "output": None if errors is None else errors.whole(),
        "weights": pooled,
        "timing": summarize_times(one.times_ms),
        "flops": plan.flops,
        "bytes": plan.bytes,
        "peak_bytes": one.peak_bytes,
        "heads": heads,
    }


def _baseline_weights(stats: _Stats) -> BaselineWeights:
    return BaselineWeights(entropy=_entropy(stats))


def _compared_weights(stats: _Stats) -> WeightsComparison:
    return WeightsComparison(
        total_variation=_divergence(stats["total_variation"], "most"),
        kl_divergence=_divergence(stats["kl_divergence"], "most"),
        js_divergence=_divergence(stats["js_divergence"], "most"),
        rank_correlation=_divergence(stats["rank_correlation"], "least"),
        entropy=_entropy(stats),
    )


def _divergence(stats: HeadStats, worst: str) -> Divergence | None:
    values = _finite_stats(stats, worst)
    return None if values is None else Divergence(mean=values[0], worst=values[1])


def _entropy(stats: _Stats) -> Entropy | None:
    values = _finite_stats(stats["entropy"], "least", "most")
    if values is None:
        return None
    mean, least, most = values
    return Entropy(mean=mean, least=least, most=most)


def _finite_stats(stats: HeadStats, *names: str) -> list[float] | None:
    """Returns the mean and the named statistics; None if one is not finite or there are no rows."""
    values = [stats.mean, *(getattr(stats, name) for name in names)]
    return values if all(map(math.isfinite, values)) else None


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
    gap = max((one.unevenness for one in every if one.is_near_uniform), default=0.0)
    baseline_causal = _causal(every[0])
    facts: dict[str, Callable[[_Measured], bool]] = {
        "Near uniform on these inputs: {}. The mean entropy of a row is within "
        f"{gap:.2g} nats of the logarithm of its number of visible keys. The "
        "output is close to the mean of the visible values. On random inputs this is expected. If "
        "the baseline distinguishes the keys, these variants do not.": lambda one: (
            one.is_near_uniform
        ),
        "Causal although the baseline is not, or the reverse: {}. Most of the difference comes "
        "from that. Set the parameter `causal` to the same value for all.": lambda one: (
            _causal(one) not in (None, baseline_causal)
        ),
        "The request has no projections for {}, so random ones were drawn. The figures are those "
        "of the random projections.": _has_random_inputs,
        "The weights of {} are signed: they have no entropy and no KL or Jensen-Shannon "
        "divergence, and total variation may exceed 1.": lambda one: (
            one.weights_are == "signed" and one.has_rows("total_variation")
        ),
        "The weights of {} are unnormalised: they have no entropy and no KL or Jensen-Shannon "
        "divergence, and total variation may exceed 1.": lambda one: (
            one.weights_are == "unnormalised" and one.has_rows("total_variation")
        ),
        "Zero weight where the baseline has weight, so the KL divergence is infinite: {}.": (
            _has_infinite_divergence
        ),
        "All visible keys of each row have the same weight, in the baseline or in {}: there is no "
        "order to correlate.": lambda one: (
            one.has_rows("total_variation") and not one.has_rows("rank_correlation")
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


def _has_infinite_divergence(one: _Measured) -> bool:
    divergence = one.pooled("kl_divergence")
    return divergence is not None and divergence.most == math.inf


def _join_names(names: Sequence[str]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last
