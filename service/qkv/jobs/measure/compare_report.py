"""Runs the jobs of a comparison and builds its report and notes."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

from qkv.jobs.annotations import notes_of
from qkv.jobs.job import Job
from qkv.jobs.measure.compare_entry import CompareEntry
from qkv.jobs.measure.compare_request import CompareRequest
from qkv.jobs.measure.variant_report import VariantReport, baseline_weights, compared_weights
from qkv.jobs.plan import PEAK_BYTES
from qkv.tensors import RawTensor
from qkv.wire.responses import (
    BaselineComparison,
    BaselineHead,
    ComparedHead,
    ComparedVariant,
    VariantTiming,
)

__all__ = ["CompareReport", "TimedOutputs", "compare", "summarize_times"]

_NEAR_UNIFORM: Final = 0.05
"""The mean gap in nats between the entropy of a row and of a uniform row, below which a note calls
the rows near uniform. It is the entropy of a uniform row of 95 % as many keys."""


TimedOutputs = tuple[Mapping[str, RawTensor], float, Sequence[str]]
"""The outputs of a job, its compute time in milliseconds, and notes on its numbers."""


class CompareReport(NamedTuple):
    """The fields of a `CompareResponse`, without its timing."""

    anchor: BaselineComparison
    variants: tuple[ComparedVariant, ...]
    notes: tuple[str, ...]


def compare(request: CompareRequest) -> Generator[Job, TimedOutputs, CompareReport]:
    """Yields each job, receives what `TimedOutputs` has by `send`, and returns the report.

    The timed runs of the variants alternate, so that other load affects all variants alike.
    """
    entries = [request.baseline, *request.variants]
    reports = [VariantReport(request) for _ in entries]
    for entry, report in zip(entries, reports, strict=True):
        outputs, *_ = yield entry.peak_memory
        report.peak_bytes = int(outputs[PEAK_BYTES].numpy()[0])
    reference: RawTensor | None = None
    for _ in range(request.repeats):
        for entry, report in zip(entries, reports, strict=True):
            outputs, compute_ms, report.notes = yield entry.timing
            report.times_ms.append(compute_ms)
            if reference is None:
                reference = outputs["output"]
            elif report.output_error is None and report is not reports[0]:
                report.measure_error(outputs["output"], reference)
    if request.has_float64_job:
        outputs, *_ = yield request.float64_job
        assert reference is not None
        reports[0].measure_error(reference, outputs["output"])
    for entry, report in zip(entries[1:], reports[1:], strict=True):
        for job in request.divergence_jobs(entry):
            outputs, *_ = yield job
            report.add_rows(outputs)
    return _report(request, *reports)


def summarize_times(times_ms: Sequence[float]) -> VariantTiming:
    """Returns the statistics of the compute times of several runs."""
    return VariantTiming(
        median_ms=median(times_ms),
        least_ms=min(times_ms),
        most_ms=max(times_ms),
        repeats=len(times_ms),
    )


def _report(
    request: CompareRequest, baseline: VariantReport, *variants: VariantReport
) -> CompareReport:
    # the jobs of every variant compare the same rows of the baseline
    baseline.take_baseline_rows(variants[0])
    pairs = list(zip(request.variants, variants, strict=True))
    every = [(request.baseline, baseline), *pairs]
    notes = [
        *(f"{note}." for entry, _ in every for note in notes_of(entry.plan)),
        *(f"{e.choice.variant.name}: {note}." for e, report in every for note in report.notes),
        *_general_notes(request, baseline, variants),
        *_variant_notes(every),
    ]
    return CompareReport(
        _baseline_comparison(request, baseline),
        tuple(_compared_variant(request, *pair) for pair in pairs),
        tuple(notes),
    )


def _baseline_comparison(request: CompareRequest, report: VariantReport) -> BaselineComparison:
    plan = request.baseline.plan
    heads = tuple(
        BaselineHead(output=error, weights=baseline_weights(stats) if request.rows else None)
        for error, stats in report.heads
    )
    return BaselineComparison(
        variant=plan.variant.name,
        parameters=request.baseline.choice.parameters,
        weights_are=plan.weights_are,
        output=report.output_error,
        weights=baseline_weights(report.row_stats) if request.rows else None,
        timing=summarize_times(report.times_ms),
        flops=plan.flops,
        bytes=plan.bytes,
        peak_bytes=report.peak_bytes,
        heads=heads if request.per_head else None,
    )


def _compared_variant(
    request: CompareRequest, entry: CompareEntry, report: VariantReport
) -> ComparedVariant:
    plan = entry.plan
    heads = tuple(
        ComparedHead(output=error, weights=compared_weights(stats) if request.rows else None)
        for error, stats in report.heads
    )
    return ComparedVariant(
        variant=plan.variant.name,
        parameters=entry.choice.parameters,
        weights_are=plan.weights_are,
        output=report.output_error,
        weights=compared_weights(report.row_stats) if request.rows else None,
        timing=summarize_times(report.times_ms),
        flops=plan.flops,
        bytes=plan.bytes,
        peak_bytes=report.peak_bytes,
        heads=heads if request.per_head else None,
    )


def _general_notes(
    request: CompareRequest, baseline: VariantReport, variants: Sequence[VariantReport]
) -> list[str]:
    notes = []
    name, rows = request.baseline.choice.variant.name, request.rows
    if not request.has_float64_job:
        notes.append(f"{name} ran in float64, the most exact dtype, so its own error is unknown.")
    compared = sum(last - first for first, last in rows)
    if rows and compared < request.row_count:
        notes.append(
            f"{compared} of {request.row_count} rows of each head were compared, evenly spread, "
            "and `worst` is the worst of these. Set `rows` to null to compare all rows."
        )
    reports = [baseline, *variants]
    if rows and all(_is_near_uniform(report) for report in reports):
        notes.append(
            "This comparison is empty: on these inputs every variant, the baseline included, is "
            "close to the mean of the visible values."
        )
    return notes


def _variant_notes(pairs: Sequence[tuple[CompareEntry, VariantReport]]) -> list[str]:
    """Returns one note for each fact that holds for some of the variants."""
    names = [entry.choice.variant.name for entry, _ in pairs]
    kinds = [e.plan.weights_are for e, _ in pairs]
    reports = [report for _, report in pairs]
    uniform = [_is_near_uniform(report) for report in reports]
    gaps = [r.row_stats["unevenness"].mean for r in reports if _is_near_uniform(r)]
    has_rows = [report.row_stats["total_variation"].rows > 0 for report in reports]
    has_no_order = [report.row_stats["rank_correlation"].rows == 0 for report in reports]
    causal = [getattr(e.plan.parameters, "causal", None) for e, _ in pairs]
    facts = {
        "Near uniform on these inputs: {}. The mean entropy of a row is within "
        f"{max(gaps, default=0.0):.2g} nats of the logarithm of its number of visible keys. The "
        "output is close to the mean of the visible values. On random inputs this is expected. If "
        "the baseline distinguishes the keys, these variants do not.": uniform,
        "Causal although the baseline is not, or the reverse: {}. Most of the difference comes "
        "from that. Set the parameter `causal` to the same value for all.": [
            c not in (None, causal[0]) for c in causal
        ],
        "The request has no projections for {}, so random ones were drawn. The figures are those "
        "of the random projections.": [
            bool(e.plan.variant.random_input_names - e.plan.inputs.specs.keys()) for e, _ in pairs
        ],
        "The weights of {} are signed: they have no entropy and no KL or Jensen-Shannon "
        "divergence, and total variation may exceed 1.": _has_kind(has_rows, kinds, "signed"),
        "The weights of {} are unnormalised: they have no entropy and no KL or Jensen-Shannon "
        "divergence, and total variation may exceed 1.": _has_kind(has_rows, kinds, "unnormalised"),
        "Zero weight where the baseline has weight, so the KL divergence is infinite: {}.": [
            report.row_stats["kl_divergence"].most == math.inf for report in reports
        ],
        "All visible keys of each row have the same weight, in the baseline or in {}: there is no "
        "order to correlate.": [r and n for r, n in zip(has_rows, has_no_order, strict=True)],
        "The output of {}, or the output it is compared with, is not finite.": [
            r.output_error is not None and r.output_error.largest_error is None for r in reports
        ],
    }
    return [
        sentence.format(_join_names([n for n, h in zip(names, holds, strict=True) if h]))
        for sentence, holds in facts.items()
        if any(holds)
    ]


def _has_kind(has_rows: Sequence[bool], kinds: Sequence[str], kind: str) -> list[bool]:
    """Returns True per variant if it has rows of weights of this kind."""
    return [k == kind and r for k, r in zip(kinds, has_rows, strict=True)]


def _join_names(names: Sequence[str]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last


def _is_near_uniform(report: VariantReport) -> bool:
    """Returns True if the rows are near uniform on average."""
    return report.row_stats["unevenness"].mean < _NEAR_UNIFORM
