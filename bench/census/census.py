"""The census of one model: built, saved, served, and compared."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from transformers import PreTrainedModel

from census.answers import asked_fields, asked_tables, write_answers
from census.comparison import (
    TensorNames,
    Verdict,
    compare,
    places_of_found,
    record_places,
)
from census.real_model import NotBuilt, build, quiet, save
from census.served_model import ServedModel
from qkv.errors import QkvError
from qkv.models.describe.described_model import describe

_ASKS: Final = re.compile(r"; write (below|into) ")
_NO_LAYER: Final = re.compile(r"has 0 attention layers")


class Case(NamedTuple):
    """A model of the census.

    Attributes:
        model_type: of transformers.
        changes: fields of the configuration with other values than their defaults.
        model_class: with a head, by name; "": the model without one.
    """

    model_type: str
    changes: Mapping[str, Any] = {}
    model_class: str = ""

    @property
    def name(self) -> str:
        """Type, class and changes in one line."""
        changes = " ".join(f"{name}={value}" for name, value in self.changes.items())
        return " ".join(part for part in (self.model_type, self.model_class, changes) if part)


class Answered(NamedTuple):
    """Result of a model after all that was asked for was answered.

    Attributes:
        text: of qkv.toml.
        problem: the message, unless it is served.
        verdicts: of the served layers.
    """

    text: str
    problem: str
    verdicts: tuple[Verdict, ...]


class Outcome(NamedTuple):
    """Result of a model.

    Attributes:
        case: the model.
        kind: "served", "asks", "refused", "no layer" or "not built".
        problem: the message, unless it is served.
        verdicts: of the served layers.
        layouts: of the served layers.
        answered: what became of it after answers, if it asked.
    """

    case: Case
    kind: str
    problem: str = ""
    verdicts: tuple[Verdict, ...] = ()
    layouts: tuple[str, ...] = ()
    answered: Answered | None = None

    @classmethod
    def of_problem(cls, case: Case, problem: str) -> Self:
        """Returns the outcome of a model that could not be examined."""
        return cls(case, "not built", problem)

    @property
    def is_wrong(self) -> bool:
        """True if a layer is served with wrong numbers."""
        after = () if self.answered is None else self.answered.verdicts
        return any(verdict.kind == "wrong" for verdict in (*self.verdicts, *after))


class DescribedOutcome(NamedTuple):
    """Result of a model whose layers `qkv describe` described.

    Attributes:
        case: the model.
        refused: what is missing, by the name of each layer without a description.
        problem: the reason why the model is not described at all; "" if it is.
        verdicts: of the described layers, as they are served.
    """

    case: Case
    refused: Mapping[str, str] = {}
    problem: str = ""
    verdicts: tuple[Verdict, ...] = ()

    @classmethod
    def of_problem(cls, case: Case, problem: str) -> Self:
        """Returns the outcome of a model that could not be examined."""
        return cls(case, problem=problem)

    @property
    def is_wrong(self) -> bool:
        """True if a described layer is served with wrong numbers."""
        return any(verdict.kind == "wrong" for verdict in self.verdicts)


def examine_described(case: Case) -> DescribedOutcome:
    """Builds a model, describes it, serves what is described, and compares it."""
    with tempfile.TemporaryDirectory() as name, quiet():
        folder = Path(name)
        try:
            model = build(case.model_type, _class(case.model_class), **case.changes)
            save(model, folder)
            described = describe(folder)
        except (NotBuilt, QkvError) as error:
            return DescribedOutcome.of_problem(case, str(error))
        (folder / "qkv.toml").write_text(described.toml)
        served = ServedModel(folder)
        proofs = {n: served.layers.describe(n)["proof"] for n in served.layers.names}
        compared = compare(model, served, TensorNames(model, folder))
        verdicts = tuple(v for v in compared if proofs.get(v.layer) is not None)
        return DescribedOutcome(case, described.refused, "", verdicts)


def examine(case: Case, *, answers: bool = True) -> Outcome:
    """Builds a model, serves it as it is, and compares its layers.

    Args:
        case: the model.
        answers: answer what the service asks for, and compare again.
    """
    with tempfile.TemporaryDirectory() as name, quiet():
        folder = Path(name)
        try:
            model = build(case.model_type, _class(case.model_class), **case.changes)
            save(model, folder)
        except NotBuilt as error:
            return Outcome.of_problem(case, str(error))
        served = ServedModel(folder)
        problem = served.problem
        names = TensorNames(model, folder)
        verdicts = tuple(compare(model, served, names))
        kind = "served" if served.layers.names else _kind(problem)
        layouts = {served.layers[name].layout.name for name in served.layers.names}
        outcome = Outcome(case, kind, problem, verdicts, tuple(sorted(layouts)))
        if not (answers and _ASKS.search(problem)):
            return outcome
        return outcome._replace(answered=_answered(model, folder, names, problem))


def _answered(model: PreTrainedModel, folder: Path, names: TensorNames, problem: str) -> Answered:
    """Answers until nothing is asked for, and compares."""
    places = places_of_found(names)
    calls = record_places(model, places)
    fields: set[str] = set()
    tables: set[str] = set()
    text = ""
    served = None
    while _ASKS.search(problem):  # a second time for what follows from the first answers
        more = asked_fields(problem) - fields, asked_tables(problem) - tables
        if not any(more):
            break
        fields |= more[0]
        tables |= more[1]
        text = write_answers(model, places, calls, fields, tables)
        (folder / "qkv.toml").write_text(text)
        served = ServedModel(folder)
        problem = served.problem
    verdicts = () if served is None else tuple(compare(model, served, names))
    return Answered(text, problem, verdicts)


def _class(name: str) -> Any:
    import transformers

    return getattr(transformers, name) if name else None


def _kind(problem: str) -> str:
    if _NO_LAYER.search(problem):
        return "no layer"
    return "asks" if _ASKS.search(problem) else "refused"
