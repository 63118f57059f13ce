"""Tables of a census: what became of each model, and how many of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from tables import Cell, Table

from census.census import DescribedOutcome, Outcome
from census.comparison import Verdict

_KINDS: Final = {
    "served": "are served as they are, some with a tower that asks or is refused",
    "asks": "ask for lines of `qkv.toml`",
    "refused": "are refused, with the name of a tensor or a field",
    "no layer": "have no attention that a layout holds",
}


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


def lines_of_described(outcome: DescribedOutcome) -> Iterator[str]:
    """Yields what became of a model that was described, and of each layer that is not right."""
    yield f"{outcome.case.name}{_tally(outcome.verdicts)}, {len(outcome.refused)} refused"
    if outcome.problem:
        yield f"          {outcome.problem[:300]}"
    yield from (f"        {layer}: {why[:200]}" for layer, why in outcome.refused.items())
    yield from _faults(outcome.verdicts)


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


def table_of_kinds(outcomes: Sequence[Outcome]) -> Table:
    """Returns how many model types are served, and how many are not."""
    counts = Counter(outcome.kind for outcome in outcomes)
    rows: list[list[Cell]] = [[f"{text}", counts[kind]] for kind, text in _KINDS.items()]
    layers = Counter(v.kind for o in outcomes for v in o.verdicts)
    after = Counter(v.kind for o in outcomes if o.answered for v in o.answered.verdicts)
    note = (
        f"Of the layers that are served as they are, {layers['right']} are right within 1e-3 of "
        f"the largest number, and {layers['wrong']} are wrong; with the lines that were asked for, "
        f"{after['right']} and {after['wrong']}."
    )
    return Table("types", ["model types that", "count"], rows, note=note)


def table_of_served(outcomes: Sequence[Outcome]) -> Table:
    """Returns the model types that are served as they are, by the layout of their layers."""
    served = [o for o in outcomes if o.kind == "served"]
    names = sorted({_layouts(outcome) for outcome in served})
    rows: list[list[Cell]] = [
        [name, ", ".join(sorted(_name(o) for o in served if _layouts(o) == name))] for name in names
    ]
    return Table("served", ["layout", "model types"], rows, labels=2)


def table_of_described(outcomes: Sequence[DescribedOutcome], type_count: int) -> Table:
    """Returns the model types of which layers are described.

    Args:
        outcomes: of the types that were examined.
        type_count: the number of all types.
    """
    found = [o for o in outcomes if any(v.kind == "right" for v in o.verdicts)]
    rows: list[list[Cell]] = []
    for what, is_part in (("all", False), ("some", True)):
        names = [o.case.model_type for o in found if bool(o.refused) == is_part]
        rows.append([what, ", ".join(sorted(names)), len(names)])
    layers = Counter(v.kind for o in outcomes for v in o.verdicts)
    examined = f"{len(outcomes)} of {type_count}" if len(outcomes) < type_count else f"{type_count}"
    note = (
        f"Of {examined} types, {len(found)} have described layers. Of these layers, as they "
        f"are served, {layers['right']} are right within 1e-3 of the largest number, and "
        f"{layers['wrong']} are wrong."
    )
    return Table(
        "described", ["described layers", "model types", "count"], rows, labels=2, note=note
    )


def _layouts(outcome: Outcome) -> str:
    return " and ".join(f"`{name}`" for name in outcome.layouts)


def _name(outcome: Outcome) -> str:
    """Returns the type, with a star if some of its layers are not served."""
    return outcome.case.model_type + (r"\*" if outcome.problem else "")
