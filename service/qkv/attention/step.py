"""A step of a variant: a tensor between its inputs and its output, with words for a page.

A file's `STEPS` describes the steps, and its `steps` computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, Final, NamedTuple

import pydantic
from torch import Tensor

from qkv.attention.signature import Signature
from qkv.attention.variant_file import BrokenRule

STEPS: Final = "steps."
"""The beginning of the names of steps among the outputs."""
MAX_TOKENS: Final = 64
"""The most queries, and the most keys, of a request for steps."""
MAX_ITEMS: Final = 16
"""The most items of such a request: they are computed one by one."""
MAX_BYTES: Final = 1 << 21
"""The most bytes of all steps of such a request, in float64."""

StepValue = Tensor | Callable[[], Tensor]
"""What `steps` returns of a step: its tensor, or a function that computes it. The reference reads
the outputs alone, and calls none: a step may have a number for each row, key and channel."""


class Step(NamedTuple):
    """A step of a variant.

    Attributes:
        name: its name, without `steps.`.
        axes: its letters as in an annotation, B first: "B H L S".
        symbol: the part of the variant's formula that it is; None: the formula does not show it.
        summary: one sentence: what is computed from which earlier steps.
        rows: the letter of the axis whose rows a reader follows one by one; None: there is none.
        needs: the step exists if the request has one of these inputs, or a value of one of these
            parameters other than None, False and 0; empty: it always exists.
        output: the output of `attend` that it is, if not the one of its name.
    """

    name: str
    axes: str
    symbol: str | None
    summary: str
    rows: str | None = None
    needs: tuple[str, ...] = ()
    output: str | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes it may have."""
        return ("float64",)

    @property
    def letters(self) -> tuple[str, ...]:
        """The letter of each axis."""
        return tuple(self.axes.split())

    def exists(self, parameters: pydantic.BaseModel, inputs: Collection[str]) -> bool:
        """Returns True if a request with these parameters and names of inputs has the step."""
        return not self.needs or any(
            name in inputs or getattr(parameters, name, None) for name in self.needs
        )

    def describe(self) -> dict[str, Any]:
        """Returns the step's entry in the catalogue as JSON."""
        return {
            "name": self.name,
            "axes": list(self.letters),
            "symbol": self.symbol,
            "summary": self.summary,
            "rows": self.rows,
            "needs": list(self.needs),
        }


def read_steps(module: ModuleType, signature: Signature) -> Mapping[str, Step]:
    """Returns the steps of a file by the names of their outputs, in order; none without `STEPS`.

    Raises:
        BrokenRule: `STEPS` breaks a rule of `variants/README.md`.
    """
    steps = getattr(module, "STEPS", ())
    if bool(steps) != callable(getattr(module, "steps", None)):
        raise BrokenRule("it has one of STEPS and `steps`: expected both or none")
    if not isinstance(steps, tuple) or not all(isinstance(step, Step) for step in steps):
        raise BrokenRule("STEPS is wrong: expected a tuple of `qkv.attention.step.Step`")
    if len(named := {STEPS + step.name: step for step in steps}) < len(steps):
        raise BrokenRule("STEPS has a name twice")
    letters = {x for i in signature.inputs.values() for x in i.letters}
    letters |= {x for o in signature.outputs.values() for x in o.letters}
    for step in steps:
        if step.letters[:1] != ("B",) or not letters.issuperset(step.letters):
            raise BrokenRule(
                f"the axes of the step {step.name} are wrong: got {step.axes!r}, expected B and "
                f"then letters of inputs or outputs, {', '.join(sorted(letters))}"
            )
        if step.rows not in (None, *step.letters):
            raise BrokenRule(f"rows of the step {step.name} is none of its axes: {step.rows!r}")
        for name in step.needs:
            if name not in signature.inputs and name not in signature.parameters.model_fields:
                raise BrokenRule(f"the step {step.name} needs {name}, which attend does not take")
    if steps and (steps[-1].name, steps[-1].letters) != (
        "output",
        signature.outputs["output"].letters,
    ):
        raise BrokenRule("the last of STEPS must be output, with the axes of the output")
    return named
