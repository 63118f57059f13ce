"""The two requests of /v1/verify: `draw_case` draws inputs, `judge_case` judges outputs for them.

Both are slow and run in a thread. The functions keep nothing: a case says how to draw its inputs
again.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Annotated, Any, Final

import pydantic

from qkv.errors import InvalidContent, QkvError, format_value
from qkv.jobs.fields import INTEGER
from qkv.testing.call import Call
from qkv.testing.case_file import GRAD_OUTPUT, CaseFile, read_results
from qkv.testing.case_limits import check_cost
from qkv.testing.case_spec import CaseSpec, input_digest
from qkv.testing.check import Check
from qkv.testing.judgement import check_shapes, judge
from qkv.wire.message import Message
from qkv.wire.tensor_types import FloatingDtype
from qkv.wire.verify_responses import FIGURES, Figures, Verdict

_CONFIG: Final = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)
_DRAWN_SEEDS: Final = 2**53  # every JSON parser reads them exactly
_NAMES: Final = {"worst_index": "worst"}  # of figures that have another name in `Check`


_Seed = Annotated[int, pydantic.Field(ge=0, lt=2**63), INTEGER]


class _SpecFields(pydantic.BaseModel):
    """The fields that a request for a case and the case itself share."""

    model_config = _CONFIG

    family: Annotated[
        str, pydantic.Field(description="The family of inputs, as `qkv oracle --list` lists them.")
    ] = "normal"
    dtype: Annotated[
        FloatingDtype,
        pydantic.Field(description="Of the inputs and outputs."),
    ] = "float32"
    parameters: Annotated[
        dict[str, Any], pydantic.Field(description="Of the variant, without dropout.")
    ] = {}
    sizes: Annotated[
        dict[str, Annotated[int, pydantic.Field(ge=1), INTEGER]],
        pydantic.Field(description="By axis letter; the family chooses the others."),
    ] = {}


class DrawFields(_SpecFields):
    """The fields of a request that draws a case."""

    seed: Annotated[
        _Seed | None,
        pydantic.Field(
            description="The same seed draws the same inputs. By default the service draws one, so "
            "that nobody can foresee the inputs."
        ),
    ] = None
    gradients: Annotated[
        bool,
        pydantic.Field(description="True: the inputs have `grad_output`, that of the output."),
    ] = False


class CaseFields(_SpecFields):
    """The specification of a case: the service draws the same inputs from it again."""

    variant: Annotated[str, pydantic.Field(description="The name of the variant.")]
    seed: Annotated[_Seed, pydantic.Field(description="Of the inputs.")]
    digest: Annotated[
        str,
        pydantic.Field(
            description="Of the inputs. Another version of the service may draw other inputs from "
            "the same specification: it rejects the case."
        ),
    ]


def draw_case(variant: str, fields: DrawFields, message: Message) -> Message:
    """Returns the inputs of a new case, and its specification.

    Args:
        variant: its name.
        fields: of the request.
        message: the request.

    Raises:
        QkvError: the family does not fit, or a size is too large.
    """
    if message.tensors:
        raise InvalidContent("outputs need a case: case is missing", pointer="/case")
    spec = CaseSpec(
        variant,
        fields.family,
        fields.dtype,
        fields.parameters,
        fields.sizes,
        secrets.randbelow(_DRAWN_SEEDS) if fields.seed is None else fields.seed,
    )
    check_cost(spec)
    call = spec.draw()
    if fields.gradients and not call.has_gradients:
        raise InvalidContent(f"{variant} has no gradients", pointer="/gradients")
    inputs = CaseFile(spec, call).to_message().tensors
    if not fields.gradients:
        del inputs[GRAD_OUTPUT]
    spec = replace(spec, parameters=dict(call.parameters))  # a family may draw one
    case = spec.to_json() | {"digest": input_digest(call)}
    return Message({"case": case}, inputs, encoding=message.encoding)


def judge_case(variant: str, case: CaseFields, message: Message) -> Verdict:
    """Returns the verdict on outputs.

    Args:
        variant: its name.
        case: of the request.
        message: the request.

    Raises:
        QkvError: the case is too large or draws other inputs here, or an output is missing,
            unknown, or of another shape or dtype.
    """
    spec, call = _redraw(variant, case)
    check_shapes(call, {n: x.shape for n, x in message.tensors.items()})
    results = read_results(message, call)
    report = judge(call, results, family=spec.family, seed=spec.seed)
    verdicts = {c.result.replace(" ", "_"): _figures(c) for c in report.checks}
    worst = max(report.checks, key=lambda c: c.units)
    name = worst.result.replace(" ", "_")
    return Verdict(
        **verdicts[name].model_dump(exclude={"passed"}),
        passed=report.passed,
        diagnosis=tuple(report.diagnosis),
        result=name,
        results=verdicts,
    )


def _redraw(variant: str, case: CaseFields) -> tuple[CaseSpec, Call]:
    """Returns the spec of a case that a client sends, and its call.

    Raises:
        QkvError: as for `judge_case`.
    """
    if case.variant != variant:
        raise InvalidContent(
            f"case.variant is wrong: got {format_value(case.variant)}, expected {variant!r} as in "
            "the path",
            pointer="/case/variant",
        )
    try:
        spec = CaseSpec(**case.model_dump(exclude={"digest"}))
        check_cost(spec)
        call = spec.draw()
    except QkvError as error:
        error.pointer = f"/case{error.pointer or ''}"
        raise
    if input_digest(call) != case.digest:
        raise InvalidContent(
            f"case.digest is wrong: got {format_value(case.digest)}, expected that of the inputs "
            "which this version draws: send a case unchanged, or draw a new one",
            pointer="/case/digest",
        )
    return spec, call


def _figures(check: Check) -> Figures:
    return Figures(**{name: getattr(check, _NAMES.get(name, name)) for name in FIGURES})
