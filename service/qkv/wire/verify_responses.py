"""The verdict of `POST /v1/verify` on outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, ConfigDict

from qkv.wire.response import Count, Response, doc
from qkv.wire.tensor_types import Number

_Number: Any = Annotated[float, BeforeValidator(lambda value: value, json_schema_input_type=Number)]


class Figures(Response):
    """The figures of a result; numbers that are not finite are strings in JSON."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    passed: Annotated[bool, doc("True if every number of the result is within budget.")]
    error: Annotated[_Number, doc("The absolute error at the worst index.")]
    budget: Annotated[_Number, doc("The error allowed there.")]
    units: Annotated[_Number, doc("error / budget, the largest of the result.")]
    worst_index: Annotated[tuple[Count, ...], doc("The index of the worst number.")]
    expected: Annotated[_Number, doc("The float64 result there.")]
    got: Annotated[_Number, doc("The number sent there.")]
    cosine: Annotated[
        _Number | None,
        doc("Of the whole result with the expected one; null if a number is not finite."),
    ]
    torch_error: Annotated[
        _Number | None, doc("The largest error of torch's own kernel; null if there is none.")
    ]
    torch_units: Annotated[_Number | None, doc("The same in units of the budget.")]


FIGURES: Final = tuple(Figures.model_fields)
"""The names of the figures of each result."""


class Verdict(Figures):
    """The verdict on the results of a function, compared in float64: the figures of the worst."""

    diagnosis: Annotated[
        tuple[str, ...], doc("Names of known bugs that give these outputs, best first.")
    ]
    result: Annotated[str, doc("The result of the figures: the worst.")]
    results: Mapping[str, Any]
