"""Checks of the calls of a file, whose fields and tensors anyone may have written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor

from qkv.errors import InvalidContent, format_value

__all__ = ["check_call", "check_list", "check_missed"]

_FLOATS: Final = ("float64", "float32", "float16", "bfloat16")
_AXES: Final = {"query": "BHLD", "key": "BGSD", "value": "BGSE", "output": "BHLE"}


def _is_integer(x: object, *, least: float = -math.inf) -> bool:
    """True for an integer of `least` or more; True and False are none."""
    return isinstance(x, int) and not isinstance(x, bool) and x >= least


def _is_finite(x: object) -> bool:
    """True for a number that a float64 can hold."""
    try:
        return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
    except OverflowError:  # an integer of JSON has any number of digits
        return False


def _is_window(x: object) -> bool:
    """True for null, or for two entries that are each null or an integer of 0 or more."""
    return x is None or (
        isinstance(x, list) and len(x) == 2 and all(n is None or _is_integer(n, least=0) for n in x)
    )


def _are_numbers(x: object) -> bool:
    """True for a list of different integers of 0 or more."""
    return isinstance(x, list) and all(_is_integer(n, least=0) for n in x) and len(set(x)) == len(x)


_FIELDS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "layer": (lambda x: isinstance(x, str), "a string"),
    "causal": (lambda x: isinstance(x, bool), "true or false"),
    "query_offset": (
        lambda x: _is_integer(x) and -(2**31) <= x < 2**31,
        "an integer of at least -2**31 and below 2**31",
    ),
    "window": (_is_window, "null or two entries, each null or an integer of 0 or more"),
    "scale": (_is_finite, "a finite number"),
    "softcap": (lambda x: x is None or (_is_finite(x) and x > 0), "null or a finite number over 0"),
    "heads": (_are_numbers, "different integers of 0 or more"),
    "items": (_are_numbers, "different integers of 0 or more"),
    "dropout": (lambda x: _is_finite(x) and 0 <= x < 1, "a number of at least 0 and below 1"),
    "is_self": (lambda x: x is None or isinstance(x, bool), "true, false or null"),
}
_OPTIONAL: Final = ("is_self",)


def check_call(where: str, fields: Any, tensors: Mapping[str, Tensor | None]) -> None:
    """Checks the fields and the tensors of a call, but not the numbers in the tensors.

    Args:
        where: names the file and the call; it begins each error.
        fields: the facts about the call, as JSON has them.
        tensors: query, key, value and output; mask and sinks may be None.

    Raises:
        InvalidContent: a field or a tensor is missing or wrong.
    """
    if not isinstance(fields, dict):
        raise _error(where, "the call", format_value(fields), "an object")
    if isinstance(layer := fields.get("layer"), str):
        where = f"{where}, {format_value(layer)}"
    for name, (is_valid, expected) in _FIELDS.items():
        if name in _OPTIONAL and name not in fields:
            continue
        if name not in fields:
            raise InvalidContent(f"{where}: {name} is missing: expected {expected}")
        if not is_valid(fields[name]):
            raise _error(where, name, format_value(fields[name]), expected)
    sizes = _sizes(where, tensors)
    for name, axis, noun in (("heads", "H", "query heads"), ("items", "B", "sequences")):
        if (count := len(fields[name])) != sizes[axis]:
            raise _error(
                where, name, f"{count} numbers", f"one for each of the {sizes[axis]} {noun}"
            )
    _check_mask(where, tensors.get("mask"), sizes)
    if (sinks := tensors.get("sinks")) is not None:
        _check_dtype(where, "sinks", sinks, _FLOATS)
        if list(sinks.shape) != [sizes["H"]]:
            raise _error(where, "sinks", f"the shape {list(sinks.shape)}", f"{[sizes['H']]}")


def check_list(where: str, name: str, x: Any) -> list[Any]:
    """Returns a value of the metadata that must be a list.

    Raises:
        InvalidContent: it is none.
    """
    if not isinstance(x, list):
        raise _error(where, name, format_value(x), "a list")
    return x


def check_missed(where: str, missed: Any) -> None:
    """Checks the names and the reasons of the layers that were not captured.

    Raises:
        InvalidContent: they are no list of two strings each.
    """
    for each in check_list(where, "qkv_missed", missed):
        if not (
            isinstance(each, list) and len(each) == 2 and all(isinstance(x, str) for x in each)
        ):
            raise _error(where, "qkv_missed", format_value(each), "a layer and a reason")


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
