"""What comes of a comparison's jobs: figures of each variant, and what is to be said of them."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from statistics import median
from typing import Any, Final

from qkv.closeness import Closeness
from qkv.comparison import Comparison, Contender
from qkv.job import Job
from qkv.measured import PEAK
from qkv.spread import FIGURES, Spread
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
        outputs, _ = yield comparison.exact()
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
            *(note for pair in [(comparison.anchor, anchor), *pairs] for note in _notes(*pair)),
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
            "and the worst is the worst of these; rows: null compares all."
        )
    every = [anchor, *variants]
    if rows and all(_is_even(found) for found in every):
        notes.append(
            "This comparison is empty: on these inputs each of them, the anchor too, is about the "
            "mean of what it sees."
        )
    return notes


def _notes(contender: Contender, found: _Findings) -> list[str]:
    job, spreads, notes = contender.timed, found.spreads, []
    name, kind = job.variant.name, job.variant.weights_are(job.parameters)
    if _is_even(found):
        short = max(spreads["unevenness"].mean, 0.0)
        notes.append(
            f"{name} is near uniform on these inputs: on average the entropy of a row is within "
            f"{short:.2g} nats of the logarithm of how many keys it sees. What is compared is "
            f"about the mean, and says little of {name}: take inputs that mean something."
        )
    if spreads["total_variation"].rows and kind != "stochastic":
        notes.append(
            f"The weights of {name} are {kind}: they have no entropy, and no KL or Jensen-Shannon "
            "divergence."
        )
    if spreads["kl_divergence"].most == math.inf:
        notes.append(
            f"{name} gives no weight to keys that the anchor gives some: its KL divergence is "
            "infinite."
        )
    if spreads["total_variation"].rows and not spreads["rank_correlation"].rows:
        notes.append(
            f"{name} or the anchor weighs all seen keys of each row alike: there is no order to "
            "correlate."
        )
    if found.closeness is not None and found.closeness.largest_error is None:
        notes.append(f"The output of {name}, or what it is held against, is not finite.")
    return notes


def _is_even(found: _Findings) -> bool:
    """Whether its rows are near uniform, on average."""
    return found.spreads["unevenness"].mean < _EVEN
