"""Checks of the calls of a file, whose facts and tensors anyone may have written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import pydantic
from pydantic_core import PydanticCustomError
from torch import Tensor

from qkv.errors import InvalidContent
from qkv.jobs.fields import field_error
from qkv.models.model_call import Missed

__all__ = ["CallFacts", "check_tensors", "parse_calls", "parse_missed", "parse_tokens"]

_FLOATS: Final = ("float64", "float32", "float16", "bfloat16")
_AXES: Final = {"query": "BHLD", "key": "BGSD", "value": "BGSE", "output": "BHLE"}


def _check_different(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(numbers)) < len(numbers):
        raise PydanticCustomError("numbers", "expected different numbers")
    return numbers


_Count = Annotated[int, pydantic.Field(ge=0)]
_Numbers = Annotated[tuple[_Count, ...], pydantic.AfterValidator(_check_different)]


class CallFacts(pydantic.BaseModel):
    """The facts about a call that its tensors do not show, as `AttentionCall` has them."""

    model_config = pydantic.ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    layer: str
    causal: bool
    query_offset: Annotated[int, pydantic.Field(ge=-(2**31), lt=2**31)]
    window: tuple[_Count | None, _Count | None] | None
    scale: float
    softcap: Annotated[float, pydantic.Field(gt=0)] | None
    heads: _Numbers
    items: _Numbers
    dropout: Annotated[float, pydantic.Field(ge=0, lt=1)]
    is_self: bool | None = None  # absent in older files


_CALLS: Final = pydantic.TypeAdapter(list[CallFacts])
_MISSED: Final = pydantic.TypeAdapter(list[Missed])
_TOKENS: Final = pydantic.TypeAdapter(dict[_Count, list[str]])


def parse_calls(where: str, text: str) -> list[CallFacts]:
    """Parses the metadata `qkv_calls` of a file.

    Args:
        where: names the file; it begins each error.
        text: JSON.

    Raises:
        InvalidContent: a fact is missing or wrong.
    """
    calls: list[CallFacts] = _parse(where, "qkv_calls", text, _CALLS)
    return calls


def parse_missed(where: str, text: str) -> list[Missed]:
    """Parses the metadata `qkv_missed`; arguments and errors are those of `parse_calls`."""
    missed: list[Missed] = _parse(where, "qkv_missed", text, _MISSED)
    return missed


def parse_tokens(where: str, text: str) -> dict[int, list[str]]:
    """Parses the metadata `qkv_tokens`; arguments and errors are those of `parse_calls`."""
    tokens: dict[int, list[str]] = _parse(where, "qkv_tokens", text, _TOKENS)
    return tokens


def _parse(where: str, key: str, text: str, expected: pydantic.TypeAdapter[Any]) -> Any:
    try:
        return expected.validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        invalid = field_error(error, (), key, nested=CallFacts.model_fields)
        raise InvalidContent(f"{where}: {invalid.detail}") from None


def check_tensors(where: str, facts: CallFacts, tensors: Mapping[str, Tensor | None]) -> None:
    """Checks the tensors of a call, but not the numbers in them.

    Args:
        where: names the file and the call; it begins each error.
        facts: about the call.
        tensors: query, key, value and output; mask and sinks may be None.

    Raises:
        InvalidContent: a tensor is missing or wrong.
    """
    sizes = _sizes(where, tensors)
    for name, numbers, size, noun in (
        ("heads", facts.heads, sizes["H"], "query heads"),
        ("items", facts.items, sizes["B"], "sequences"),
    ):
        if len(numbers) != size:
            raise _error(
                where, name, f"{len(numbers)} numbers", f"one for each of the {size} {noun}"
            )
    _check_mask(where, tensors.get("mask"), sizes)
    if (sinks := tensors.get("sinks")) is not None:
        _check_dtype(where, "sinks", sinks, _FLOATS)
        if list(sinks.shape) != [sizes["H"]]:
            raise _error(where, "sinks", f"the shape {list(sinks.shape)}", f"{[sizes['H']]}")


def _sizes(where: str, tensors: Mapping[str, Tensor | None]) -> dict[str, int]:
    """Returns the size of each axis by its letter; the four tensors must agree on it."""
    sizes: dict[str, int] = {}
    dtype = None
    for name, axes in _AXES.items():
        if (x := tensors.get(name)) is None:
            raise InvalidContent(f"{where}: {name} is missing: expected ({','.join(axes)})")
        _check_dtype(where, name, x, _FLOATS if dtype is None else (dtype,))
        dtype = str(x.dtype).removeprefix("torch.")
        got = f"the shape {list(x.shape)}"
        if x.ndim != 4 or 0 in x.shape:
            raise _error(where, name, got, f"({','.join(axes)}) without an axis of size 0")
        for axis, size in zip(axes, x.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                known = ", ".join(f"{a}={sizes[a]}" for a in axes if a in sizes)
                raise _error(where, name, got, f"({','.join(axes)}) with {known}")
    if sizes["H"] % sizes["G"]:
        raise _error(
            where, "key", f"{sizes['G']} heads", f"a divisor of the {sizes['H']} query heads"
        )
    return sizes


def _check_mask(where: str, mask: Tensor | None, sizes: Mapping[str, int]) -> None:
    """Checks that a mask has a dtype of masks and broadcasts to (B,H,L,S)."""
    if mask is None:
        return
    _check_dtype(where, "mask", mask, ("bool", *_FLOATS))
    whole = [sizes[axis] for axis in "BHLS"]
    if mask.ndim != 4 or any(n not in (1, m) for n, m in zip(mask.shape, whole, strict=True)):
        expected = f"four axes that broadcast to {whole}"
        raise _error(where, "mask", f"the shape {list(mask.shape)}", expected)


def _check_dtype(where: str, name: str, x: Tensor, expected: tuple[str, ...]) -> None:
    if (dtype := str(x.dtype).removeprefix("torch.")) not in expected:
        raise _error(where, name, dtype, " or ".join(expected))


def _error(where: str, name: str, got: str, expected: str) -> InvalidContent:
    return InvalidContent(f"{where}: {name} is invalid: got {got}, expected {expected}")
