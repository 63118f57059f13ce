"""The census of one model: built, saved, served, and compared."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from census.comparison import TensorNames, Verdict, compare
from census.real_model import NotBuilt, build, quiet, save
from census.served_model import ServedModel

__all__ = ["Case", "Outcome", "examine"]

_ASKS: Final = re.compile(r"; write ")
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


class Outcome(NamedTuple):
    """What became of a model.

    Attributes:
        case: the model.
        kind: "served", "asks", "refused", "no layer" or "not built".
        problem: the message, unless it is served.
        verdicts: of the served layers.
        answers: that were written, if it asked.
    """

    case: Case
    kind: str
    problem: str = ""
    verdicts: tuple[Verdict, ...] = ()
    answers: str = ""

    @property
    def is_wrong(self) -> bool:
        """True if a layer is served with wrong numbers."""
        return any(verdict.kind == "wrong" for verdict in self.verdicts)


def examine(case: Case) -> Outcome:
    """Builds a model, serves it as it is, and compares its layers."""
    with tempfile.TemporaryDirectory() as name, quiet():
        folder = Path(name)
        try:
            model = build(case.model_type, _class(case.model_class), **case.changes)
            save(model, folder)
        except NotBuilt as error:
            return Outcome(case, "not built", str(error))
        served = ServedModel(folder)
        problem = served.checkpoint.problem or ""
        if not served.layers.names:
            return Outcome(case, _kind(problem), problem)
        verdicts = tuple(compare(model, served, TensorNames(model, folder)))
        return Outcome(case, "served", problem, verdicts)


def _class(name: str) -> Any:
    import transformers

    return getattr(transformers, name) if name else None


def _kind(problem: str) -> str:
    if _NO_LAYER.search(problem):
        return "no layer"
    return "asks" if _ASKS.search(problem) else "refused"
