"""What comes of a comparison's jobs: figures of each variant, and what is to be said of them."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from statistics import median
from typing import Any, Final

from qkv.jobs.job import Job
from qkv.jobs.measure.compare_request import Comparison, Contender
from qkv.jobs.measure.output_error import Closeness
from qkv.jobs.measure.probe_jobs import PEAK
from qkv.jobs.measure.row_metrics import FIGURES, Spread
from qkv.tensors import RawTensor

__all__ = ["Made", "compare", "times"]

_EVEN: Final = 0.05
"""Nats that entropies fall short of a uniform row's, on average, where a note says so: as many keys
as 95 % of those seen."""
_APART: Final = ("total_variation", "kl_divergence", "js_divergence", "rank_correlation")


Made = tuple[Mapping[str, RawTensor], float]
"""A job's outputs, and the milliseconds that it computed."""


class _Findings:
    """What came of a contender's jobs, bit by bit.

    Attributes:
        times_ms: of each run that was timed.
        peak_bytes: of a run.
        closeness: of its output; None: there is nothing to hold it against.
        spreads: of its weights, and of the anchor's.
    """

    def __init__(self) -> None:
        self.times_ms: list[float] = []
        self.peak_bytes = 0
        self.closeness: Closeness | None = None
        self.spreads = dict.fromkeys(FIGURES, Spread())


def compare(comparison: Comparison) -> Generator[Job, Made, dict[str, Any]]:
    """Yields job after job, is sent what each made, and returns the answer but for its timing.

    Variants take turns at being timed, so that what else the machine does befalls all alike.
    """
    contenders = [comparison.anchor, *comparison.variants]
    found = [_Findings() for _ in contenders]
    for contender, each in zip(contenders, found, strict=True):
        outputs, _ = yield contender.peak
        each.peak_bytes = int(outputs[PEAK].numpy()[0])
    right: RawTensor | None = None
    for _ in range(comparison.repeats):
        for contender, each in zip(contenders, found, strict=True):
            outputs, compute_ms = yield contender.timed
            each.times_ms.append(compute_ms)
            if right is None:
                right = outputs["output"]
            elif each.closeness is None and each is not found[0]:
                each.closeness = Closeness.of(outputs["output"], right)
    if comparison.has_exact:
        outputs, _ = yield comparison.exact
        assert right is not None
        found[0].closeness = Closeness.of(right, outputs["output"])
    for contender, each in zip(contenders[1:], found[1:], strict=True):
        for job in comparison.divergences(contender):
            outputs, _ = yield job
            for name, tensor in outputs.items():
                each.spreads[name] = each.spreads[name].plus(Spread(*tensor.numpy().tolist()))
    return _answer(comparison, *found)


def times(times_ms: Sequence[float]) -> dict[str, Any]:
    """What is said of the times of several runs."""
    return {
        "median_ms": median(times_ms),
        "least_ms": min(times_ms),
        "most_ms": max(times_ms),
        "repeats": len(times_ms),
    }


def _answer(comparison: Comparison, anchor: _Findings, *variants: _Findings) -> dict[str, Any]:
    # each variant's jobs looked at the same rows of the anchor
    anchor.spreads |= {
        name: variants[0].spreads[f"anchor_{name}"] for name in ("entropy", "unevenness")
    }
    pairs = list(zip(comparison.variants, variants, strict=True))
    return {
        "anchor": _entry(comparison, comparison.anchor, anchor, ()),
        "variants": [_entry(comparison, *pair, _APART) for pair in pairs],
        "notes": [
            *_notes_of_all(comparison, anchor, variants),
            *_notes([(comparison.anchor, anchor), *pairs]),
        ],
    }


def _entry(
    comparison: Comparison, contender: Contender, found: _Findings, apart: Sequence[str]
) -> dict[str, Any]:
    job, weights = contender.timed, None
    if comparison.rows:
        weights = {name: _apart(name, found.spreads[name]) for name in apart}
        weights["entropy"] = _whole(found.spreads["entropy"], "least", "most")
    return {
        "variant": job.variant.name,
        "parameters": contender.choice.parameters,
        "weights_are": job.variant.weights_are(job.parameters),
        "output": None if found.closeness is None else found.closeness._asdict(),
        "weights": weights,
        "timing": times(found.times_ms),
        "flops": job.flops,
        "bytes": job.bytes_in + job.bytes_out,
        "peak_bytes": found.peak_bytes,
    }


def _apart(name: str, spread: Spread) -> dict[str, float] | None:
    """Its mean and its worst; the least correlation is the worst."""
    worst = "least" if name == "rank_correlation" else "most"
    said = _whole(spread, worst)
    return None if said is None else {"mean": said["mean"], "worst": said[worst]}


def _whole(spread: Spread, *names: str) -> dict[str, float] | None:
    """The mean and what is named; None where any of them is no number, as where there are no
    rows."""
    said = {"mean": spread.mean} | {name: getattr(spread, name) for name in names}
    return said if all(map(math.isfinite, said.values())) else None


def _notes_of_all(
    comparison: Comparison, anchor: _Findings, variants: Sequence[_Findings]
) -> list[str]:
    notes = []
    name, rows = comparison.anchor.choice.variant.name, comparison.rows
    if not comparison.has_exact:
        notes.append(
            f"{name} ran in float64 itself: there is nothing more exact to find its error by."
        )
    compared = sum(last - first for first, last in rows)
    if rows and compared < comparison.length:
        notes.append(
            f"Of each head {compared} of {comparison.length} rows were compared, evenly spread, "
            "and the worst is the worst of these; all are where `rows` is null."
        )
    every = [anchor, *variants]
    if rows and all(_is_even(found) for found in every):
        notes.append(
            "This comparison is empty: on these inputs each of them, the anchor too, is about the "
            "mean of what it sees."
        )
    return notes


def _notes(pairs: Sequence[tuple[Contender, _Findings]]) -> list[str]:
    """What is to be said of some of them, each thing once."""
    names = [contender.choice.variant.name for contender, _ in pairs]
    kinds = [c.timed.variant.weights_are(c.timed.parameters) for c, _ in pairs]
    every = [found for _, found in pairs]
    even = [_is_even(found) for found in every]
    short = max((f.spreads["unevenness"].mean for f in every if _is_even(f)), default=0.0)
    rows = [found.spreads["total_variation"].rows > 0 for found in every]
    none = [found.spreads["rank_correlation"].rows == 0 for found in every]
    sees = [getattr(c.timed.parameters, "causal", None) for c, _ in pairs]
    facts = {
        "Near uniform on these inputs: {}. On average the entropy of a row is within "
        f"{max(short, 0.0):.2g} nats of the logarithm of how many keys it sees: what is compared "
        "is about the mean. On random inputs that says nothing; on inputs whose keys the anchor "
        "tells apart, that these do not.": even,
        "Causal where the anchor is not, or the other way about: {}. What is compared is mostly "
        "that; `causal` is among the parameters.": [s not in (None, sees[0]) for s in sees],
        "Of {} projections did not come and were drawn at random: what is compared is theirs.": [
            bool(c.timed.variant.drawn_inputs - c.timed.inputs.tensors.keys()) for c, _ in pairs
        ],
        "The weights of {} are signed: there is no entropy of them, no KL or Jensen-Shannon "
        "divergence, and total variation may be above 1.": _both(rows, kinds, "signed"),
        "The weights of {} are unnormalised: there is no entropy of them, no KL or Jensen-Shannon "
        "divergence, and total variation may be above 1.": _both(rows, kinds, "unnormalised"),
        "No weight where the anchor has some, so that the KL divergence is infinite: {}.": [
            found.spreads["kl_divergence"].most == math.inf for found in every
        ],
        "All seen keys of each row weigh alike, in the anchor or in {}: there is no order to "
        "correlate.": [r and n for r, n in zip(rows, none, strict=True)],
        "The output of {}, or what it is held against, is not finite.": [
            f.closeness is not None and f.closeness.largest_error is None for f in every
        ],
    }
    return [
        sentence.format(_listed([n for n, is_so in zip(names, are, strict=True) if is_so]))
        for sentence, are in facts.items()
        if any(are)
    ]


def _both(rows: Sequence[bool], kinds: Sequence[str], kind: str) -> list[bool]:
    """Of whom there are rows of weights of this kind."""
    return [k == kind and r for k, r in zip(kinds, rows, strict=True)]


def _listed(names: Sequence[str]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last


def _is_even(found: _Findings) -> bool:
    """Whether its rows are near uniform, on average."""
    return found.spreads["unevenness"].mean < _EVEN
