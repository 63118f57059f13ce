"""The types of tensors, numbers and dtypes in the models of bodies and responses.

Each is one component of the OpenAPI document: generators of clients make a class of it. The codecs
of `wire` read the numbers; a model gets each tensor as a `RawTensor`.
"""

from __future__ import annotations

from functools import reduce
from typing import Annotated, Any, Final, Literal

import pydantic
from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from qkv.tensors import DTYPES, FLOATING, RawTensor

_AXES: Final = 4  # (B, H, L, D): recursive types do not exist in most languages


def enumeration(name: str, *values: str) -> Any:
    """Returns the type of texts with these values only, a component of that name."""
    return TypeAliasType(name, Literal[values])  # known at run time


Dtype: Any = enumeration("Dtype", *DTYPES)
FloatingDtype: Any = enumeration("FloatingDtype", *FLOATING)
NonFiniteNumber = TypeAliasType("NonFiniteNumber", Literal["NaN", "Infinity", "-Infinity"])
Number = TypeAliasType("Number", float | NonFiniteNumber)


Encoding: Any = enumeration("Encoding", "lists", "base64")


class Base64Tensor(pydantic.BaseModel):
    """Little-endian, row-major bytes in base64, to match dtype and shape."""

    model_config = pydantic.ConfigDict(extra="forbid")

    dtype: Dtype
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=8)]
    data: Annotated[
        str,
        Field(pattern="^[A-Za-z0-9+/]*={0,2}$", json_schema_extra={"contentEncoding": "base64"}),
    ]


def _nested(leaf: Any, axes: int = _AXES) -> Any:
    """Returns the union of a type, and of nested lists of each rank."""
    ranks = [leaf]
    for _ in range(axes):
        leaf = list[leaf]
        ranks.append(leaf)
    return reduce(lambda one, other: one | other, ranks)


def _require_raw(value: Any) -> RawTensor:
    if isinstance(value, RawTensor):
        return value
    raise PydanticCustomError("tensor_type", "expected a tensor")


def _tensor(name: str, json_type: Any, description: str | None = None) -> Any:
    """Returns the type of a tensor whose JSON has that type."""
    validator = PlainValidator(_require_raw, json_schema_input_type=json_type)
    return TypeAliasType(
        name,
        Annotated[Any, validator, Field(description=description)],
    )


Tensor: Any = _tensor(
    "Tensor",
    _nested(Number) | Base64Tensor,
    "A number, nested lists of numbers that are not ragged, or base64.",
)
TensorOfFiveAxes: Any = _tensor(
    "TensorOfFiveAxes",
    _nested(Number, 5) | Base64Tensor,
    "The same with one axis more, (B, H, L, S, E).",
)
IntegerTensor: Any = _tensor("IntegerTensor", _nested(int) | Base64Tensor)
MaskTensor: Any = _tensor("MaskTensor", _nested(bool) | _nested(Number) | Base64Tensor)
InferData: Any = TypeAliasType(
    "InferData",
    Annotated[
        Any,
        PlainValidator(
            lambda value: value,
            json_schema_input_type=_nested(list[Number], _AXES - 1)
            | _nested(list[bool], _AXES - 1),
        ),
        Field(description="Flat, or nested as in the shape."),
    ],
)
