"""Tables of a census: what became of each model, and how many of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from census.census import Outcome
from census.comparison import Verdict

__all__ = ["lines_of", "summary"]


def lines_of(outcome: Outcome) -> Iterator[str]:
    """Yields what became of a model, and of each of its layers that is not right."""
    yield f"{outcome.kind:9} {outcome.case.name}{_tally(outcome.verdicts)}"
    if outcome.problem:
        yield f"          {outcome.problem[:600]}"
    yield from _faults(outcome.verdicts)
    if (answered := outcome.answered) is not None:
        yield f"    answered{_tally(answered.verdicts)} {' '.join(answered.text.split())[:300]}"
        if answered.problem:
            yield f"          {answered.problem[:600]}"
        yield from _faults(answered.verdicts)


def _tally(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(verdict.kind for verdict in verdicts)
    return "".join(f", {count} {kind}" for kind, count in sorted(counts.items()))


def _faults(verdicts: Sequence[Verdict]) -> Iterator[str]:
    for verdict in verdicts:
        if verdict.kind != "right":
            error = "" if verdict.error is None else f"error {verdict.error:.1e}"
            kind = "WRONG" if verdict.kind == "wrong" else verdict.kind
            yield f"        {kind} {verdict.layer} {error}{verdict.detail}"


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yields how many models and layers there are of each kind."""
    models = Counter(outcome.kind for outcome in outcomes)
    yield "models: " + ", ".join(f"{count} {kind}" for kind, count in models.most_common())
    layers = Counter(v.kind for outcome in outcomes for v in outcome.verdicts)
    yield "layers served as they are: " + _counts(layers)
    after = [o.answered for o in outcomes if o.answered is not None]
    layers = Counter(v.kind for answered in after for v in answered.verdicts)
    yield f"layers of the {len(after)} models that ask, answered: " + _counts(layers)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common()) or "none"
