"""Runs the jobs of a comparison and builds its report and notes."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from statistics import median
from typing import Any, Final

from qkv.jobs.job import Job
from qkv.jobs.measure.compare_request import CompareEntry, CompareRequest
from qkv.jobs.measure.output_error import OutputError
from qkv.jobs.measure.probe_jobs import PEAK_BYTES
from qkv.jobs.measure.row_metrics import ROW_METRICS, RunningStats
from qkv.tensors import RawTensor

__all__ = ["TimedOutputs", "compare", "summarize_times"]

_NEAR_UNIFORM: Final = 0.05
"""A note calls rows near uniform if, on average, their entropy is within so many nats of a uniform
row's: that of 95 % as many keys."""
_DIVERGENCES: Final = ("total_variation", "kl_divergence", "js_divergence", "rank_correlation")


TimedOutputs = tuple[Mapping[str, RawTensor], float]
"""The outputs of a job, and its compute time in milliseconds."""


class VariantReport:
    """The measurements of a variant.

    Attributes:
        times_ms: compute time of each timed run.
        peak_bytes: peak memory of a run.
        output_error: error of its output; None if there is no reference.
        row_stats: statistics of its weights and of the baseline's.
    """

    def __init__(self) -> None:
        self.times_ms: list[float] = []
        self.peak_bytes = 0
        self.output_error: OutputError | None = None
        self.row_stats = dict.fromkeys(ROW_METRICS, RunningStats())


def compare(request: CompareRequest) -> Generator[Job, TimedOutputs, dict[str, Any]]:
    """Yields each job, is sent its outputs and time, and returns the report without its timing.

    The timed runs of the variants alternate, so that other load affects all of them alike.
    """
    entries = [request.baseline, *request.variants]
    reports = [VariantReport() for _ in entries]
    for entry, report in zip(entries, reports, strict=True):
        outputs, _ = yield entry.peak_memory
        report.peak_bytes = int(outputs[PEAK_BYTES].numpy()[0])
    reference: RawTensor | None = None
    for _ in range(request.repeats):
        for entry, report in zip(entries, reports, strict=True):
            outputs, compute_ms = yield entry.timing
            report.times_ms.append(compute_ms)
            if reference is None:
                reference = outputs["output"]
            elif report.output_error is None and report is not reports[0]:
                report.output_error = OutputError.measure(outputs["output"], reference)
    if request.has_float64_job:
        outputs, _ = yield request.float64_job
        assert reference is not None
        reports[0].output_error = OutputError.measure(reference, outputs["output"])
    for entry, report in zip(entries[1:], reports[1:], strict=True):
        for job in request.divergence_jobs(entry):
            outputs, _ = yield job
            for name, tensor in outputs.items():
                report.row_stats[name] = report.row_stats[name].merge(
                    RunningStats(*tensor.numpy().tolist())
                )
    return _report(request, *reports)


def summarize_times(times_ms: Sequence[float]) -> dict[str, Any]:
    """Returns the statistics of the compute times of several runs."""
    return {
        "median_ms": median(times_ms),
        "least_ms": min(times_ms),
        "most_ms": max(times_ms),
        "repeats": len(times_ms),
    }


def _report(
    request: CompareRequest, baseline: VariantReport, *variants: VariantReport
) -> dict[str, Any]:
    # the jobs of each variant compared the same rows of the baseline
    baseline.row_stats |= {
        name: variants[0].row_stats[f"baseline_{name}"] for name in ("entropy", "unevenness")
    }
    pairs = list(zip(request.variants, variants, strict=True))
    return {
        "anchor": _variant_section(request, request.baseline, baseline, ()),
        "variants": [_variant_section(request, *pair, _DIVERGENCES) for pair in pairs],
        "notes": [
            *_general_notes(request, baseline, variants),
            *_variant_notes([(request.baseline, baseline), *pairs]),
        ],
    }


def _variant_section(
    request: CompareRequest, entry: CompareEntry, report: VariantReport, divergences: Sequence[str]
) -> dict[str, Any]:
    job, weights = entry.timing, None
    if request.rows:
        weights = {name: _mean_and_worst(name, report.row_stats[name]) for name in divergences}
        weights["entropy"] = _finite_stats(report.row_stats["entropy"], "least", "most")
    return {
        "variant": job.variant.name,
        "parameters": entry.choice.parameters,
        "weights_are": job.variant.weights_are(job.parameters),
        "output": None if report.output_error is None else report.output_error._asdict(),
        "weights": weights,
        "timing": summarize_times(report.times_ms),
        "flops": job.flops,
        "bytes": job.bytes_in + job.bytes_out,
        "peak_bytes": report.peak_bytes,
    }


def _mean_and_worst(name: str, stats: RunningStats) -> dict[str, float] | None:
    """Returns the mean and the worst value; the least correlation is the worst."""
    worst = "least" if name == "rank_correlation" else "most"
    values = _finite_stats(stats, worst)
    return None if values is None else {"mean": values["mean"], "worst": values[worst]}


def _finite_stats(stats: RunningStats, *names: str) -> dict[str, float] | None:
    """Returns the mean and the named statistics; None if any is not finite, as without rows."""
    values = {"mean": stats.mean} | {name: getattr(stats, name) for name in names}
    return values if all(map(math.isfinite, values.values())) else None


def _general_notes(
    request: CompareRequest, baseline: VariantReport, variants: Sequence[VariantReport]
) -> list[str]:
    notes = []
    name, rows = request.baseline.choice.variant.name, request.rows
    if not request.has_float64_job:
        notes.append(
            f"{name} ran in float64 itself: there is nothing more exact to find its error by."
        )
    compared = sum(last - first for first, last in rows)
    if rows and compared < request.row_count:
        notes.append(
            f"Of each head {compared} of {request.row_count} rows were compared, evenly spread, "
            "and the worst is the worst of these; all are where `rows` is null."
        )
    reports = [baseline, *variants]
    if rows and all(_is_near_uniform(report) for report in reports):
        notes.append(
            "This comparison is empty: on these inputs each of them, the anchor too, is about the "
            "mean of what it sees."
        )
    return notes


def _variant_notes(pairs: Sequence[tuple[CompareEntry, VariantReport]]) -> list[str]:
    """Returns one note for each fact that holds for some of the variants."""
    names = [entry.choice.variant.name for entry, _ in pairs]
    kinds = [e.timing.variant.weights_are(e.timing.parameters) for e, _ in pairs]
    reports = [report for _, report in pairs]
    uniform = [_is_near_uniform(report) for report in reports]
    gaps = [r.row_stats["unevenness"].mean for r in reports if _is_near_uniform(r)]
    has_rows = [report.row_stats["total_variation"].rows > 0 for report in reports]
    has_no_order = [report.row_stats["rank_correlation"].rows == 0 for report in reports]
    causal = [getattr(e.timing.parameters, "causal", None) for e, _ in pairs]
    facts = {
        "Near uniform on these inputs: {}. On average the entropy of a row is within "
        f"{max(gaps, default=0.0):.2g} nats of the logarithm of how many keys it sees: what is "
        "compared is about the mean. On random inputs that says nothing; on inputs whose keys the "
        "anchor tells apart, that these do not.": uniform,
        "Causal where the anchor is not, or the other way about: {}. What is compared is mostly "
        "that; `causal` is among the parameters.": [c not in (None, causal[0]) for c in causal],
        "Of {} projections did not come and were drawn at random: what is compared is theirs.": [
            bool(e.timing.variant.random_input_names - e.timing.inputs.tensors.keys())
            for e, _ in pairs
        ],
        "The weights of {} are signed: there is no entropy of them, no KL or Jensen-Shannon "
        "divergence, and total variation may be above 1.": _has_kind(has_rows, kinds, "signed"),
        "The weights of {} are unnormalised: there is no entropy of them, no KL or Jensen-Shannon "
        "divergence, and total variation may be above 1.": _has_kind(
            has_rows, kinds, "unnormalised"
        ),
        "No weight where the anchor has some, so that the KL divergence is infinite: {}.": [
            report.row_stats["kl_divergence"].most == math.inf for report in reports
        ],
        "All seen keys of each row weigh alike, in the anchor or in {}: there is no order to "
        "correlate.": [r and n for r, n in zip(has_rows, has_no_order, strict=True)],
        "The output of {}, or what it is held against, is not finite.": [
            r.output_error is not None and r.output_error.largest_error is None for r in reports
        ],
    }
    return [
        sentence.format(_join_names([n for n, h in zip(names, holds, strict=True) if h]))
        for sentence, holds in facts.items()
        if any(holds)
    ]


def _has_kind(has_rows: Sequence[bool], kinds: Sequence[str], kind: str) -> list[bool]:
    """Returns per variant whether it has rows of weights of this kind."""
    return [k == kind and r for k, r in zip(kinds, has_rows, strict=True)]


def _join_names(names: Sequence[str]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last


def _is_near_uniform(report: VariantReport) -> bool:
    """Returns True if its rows are near uniform, on average."""
    return report.row_stats["unevenness"].mean < _NEAR_UNIFORM
