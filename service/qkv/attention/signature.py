"""Reads the signature of a variant's `attend`: its inputs, outputs and parameters.

`read_signature` is the entry point; `catalogue` calls it for each file.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType, UnionType
from typing import Any, Final, NamedTuple

import pydantic
from jaxtyping import AbstractArray

from qkv.attention.variant_file import BrokenRule, one_line
from qkv.tensors import DTYPES, FLOATING

__all__ = ["Input", "Output", "Signature", "fixed_size", "read_signature"]

_FROM_ENGINE: Final = ("outputs", "plane_BH")  # arguments from the engine, not from the request
_RESERVED: Final = ("grad_output",)  # inputs that a request has beside the variant's
_PROJECTED: Final = ("query", "key", "value")  # inputs that a layer computes from embeddings
_ARRAY: Final = 'Float[Tensor, "B H S D"]'


@dataclass(frozen=True, slots=True)
class Input:
    """An input tensor of a variant.

    Attributes:
        name: its name on the wire.
        argument: its name in the signature, which may have a shape suffix.
        letters: one per axis, of the legend in CONVENTIONS.md; a number is an axis of that size.
        broadcasts: each axis may also be 1, and leading axes may be omitted.
        dtypes: the dtypes it may have.
        is_optional: it may be absent.
    """

    name: str
    argument: str
    letters: tuple[str, ...]
    broadcasts: bool
    dtypes: tuple[str, ...]
    is_optional: bool


@dataclass(frozen=True, slots=True)
class Output:
    """An output tensor of a variant.

    Attributes:
        letters: one per axis, as of an input.
        is_exact: its dtype is float64 for float64 requests and float32 for all others, instead of
            the request's dtype.
    """

    name: str
    letters: tuple[str, ...]
    is_exact: bool


class Signature(NamedTuple):
    """The contents of the signature of `attend`.

    Attributes:
        inputs: the tensors by wire name: the arguments before the `*`.
        outputs: the tensors that `attend` returns.
        parameters: the arguments after the `*`, as a model that validates them.
        from_engine: the arguments that the engine passes: `outputs`, `plane_BH`.
        returns_tensor: `attend` returns the output itself, not a NamedTuple.
    """

    inputs: Mapping[str, Input]
    outputs: Mapping[str, Output]
    parameters: type[pydantic.BaseModel]
    from_engine: frozenset[str]
    returns_tensor: bool


class _Array(NamedTuple):
    letters: tuple[str, ...]
    broadcasts: bool
    dtypes: tuple[str, ...]


def fixed_size(axis: str) -> int | None:
    """Returns the size of an axis that is a number in its annotation; None for a letter."""
    return int(axis) if axis.isdecimal() else None


def read_signature(module: ModuleType, name: str) -> Signature:
    """Reads and checks the signature of a file's `attend`.

    Args:
        module: the imported file.
        name: of the variant.

    Raises:
        BrokenRule: the signature breaks a rule of `variants/README.md`.
    """
    attend = getattr(module, "attend", None)
    if not inspect.isfunction(attend):
        raise BrokenRule("it has no function `attend`")
    try:
        hints = typing.get_type_hints(attend, include_extras=True)
    except Exception as error:  # names in annotations that are not imported, and anything else
        raise BrokenRule(f"attend's annotations cannot be evaluated: {one_line(error)}") from None
    tensors: list[inspect.Parameter] = []
    options: list[inspect.Parameter] = []
    for p in inspect.signature(attend).parameters.values():
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise BrokenRule(f"attend's argument {p} is not allowed: expected named arguments")
        if p.name not in hints and p.name not in _FROM_ENGINE:
            raise BrokenRule(
                f"attend's argument {p.name} has no annotation: expected {_ARRAY} of a tensor, "
                "or the type of a parameter"
            )
        (tensors if p.kind is p.POSITIONAL_OR_KEYWORD else options).append(p)
    inputs = [_read_input(p, hints[p.name]) for p in tensors if p.name not in _FROM_ENGINE]
    _check_inputs(inputs)
    outputs, returns_tensor = _read_outputs(hints)
    _check_outputs(inputs, outputs, has_hook=hasattr(module, "infer_sizes"))
    parameters = _parameters_model(
        module,
        name,
        {p.name: (hints[p.name], p.default) for p in options if p.name not in _FROM_ENGINE},
    )
    from_engine = frozenset(p.name for p in options if p.name in _FROM_ENGINE)
    return Signature(
        {i.name: i for i in inputs}, {o.name: o for o in outputs}, parameters, from_engine,
        returns_tensor,
    )  # fmt: skip


def _read_input(parameter: inspect.Parameter, hint: Any) -> Input:
    argument, arrays = parameter.name, _arrays(hint)
    if not arrays:
        raise BrokenRule(
            f"attend's argument {argument} is no array: got {_type_name(hint)}, expected {_ARRAY}, "
            "or the argument after a `*` if it is a parameter"
        )
    if parameter.default not in (parameter.empty, None):
        raise BrokenRule(
            f"attend's argument {argument} has a default other than None: got "
            f"{parameter.default!r:.60}, expected None, or no default"
        )
    letters, broadcasts, _ = arrays[0]
    _check_letters(argument, letters)
    dtypes = tuple(d for d in DTYPES if any(d in known for *_, known in arrays))
    if not dtypes:
        raise BrokenRule(
            f"attend's argument {argument} has no dtype that is served: expected one of "
            f"{', '.join(DTYPES)}"
        )
    name, _, suffix = argument.rpartition("_")
    if not name or suffix != "".join(letters):
        name = argument
    is_optional = parameter.default is not parameter.empty
    return Input(name, argument, letters, broadcasts, dtypes, is_optional)


def _check_inputs(inputs: list[Input]) -> None:
    if not inputs:
        raise BrokenRule("attend takes no tensor")
    first = inputs[0]
    if first.is_optional or first.letters[0] != "B" or not set(first.dtypes) & set(FLOATING):
        raise BrokenRule(
            f"attend's first argument {first.argument} must be a floating tensor without a "
            'default whose first axis is "B"'
        )
    for spec in inputs:
        if spec.name in _RESERVED:
            raise BrokenRule(f"attend's argument {spec.argument} has a reserved name")
        if spec.name in _PROJECTED and (len(spec.letters) != 4 or spec.letters[0] != "B"):
            raise BrokenRule(
                f"attend's argument {spec.argument} has axes {' '.join(spec.letters)}: expected "
                'four, the batch first: "B H L D"'
            )


def _read_outputs(hints: Mapping[str, Any]) -> tuple[list[Output], bool]:
    """Returns the outputs, and whether `attend` returns the output itself."""
    expected = f"expected the output's shape, {_ARRAY.replace('S D', 'L E')}, or a NamedTuple"
    if "return" not in hints:
        raise BrokenRule(f"attend has no return annotation: {expected}")
    hint = hints["return"]
    if arrays := _arrays(hint):
        fields, returns_tensor = {"output": arrays[0]}, True
    else:
        if not (inspect.isclass(hint) and issubclass(hint, tuple) and hasattr(hint, "_fields")):
            raise BrokenRule(f"attend returns no array: got {_type_name(hint)}, {expected}")
        try:
            types = typing.get_type_hints(hint)
        except Exception as error:
            raise BrokenRule(
                f"the annotations of {hint.__name__} cannot be evaluated: {one_line(error)}"
            ) from None
        fields, returns_tensor = {n: a[0] for n, t in types.items() if (a := _arrays(t))}, False
    if "output" not in fields:
        raise BrokenRule(f"{_type_name(hint)} has no array named output: {expected} with one")
    outputs = [
        Output(name, array.letters, is_exact="float16" not in array.dtypes)
        for name, array in fields.items()
    ]
    return outputs, returns_tensor


def _check_outputs(inputs: list[Input], outputs: list[Output], has_hook: bool) -> None:
    bound = {letter for i in inputs if not i.is_optional for letter in i.letters}
    for output in outputs:
        _check_letters(output.name, output.letters)
        for letter in output.letters:
            if letter not in bound and fixed_size(letter) is None and not has_hook:
                raise BrokenRule(
                    f"the size of axis {letter} of {output.name} is unknown: no required tensor "
                    "has it, and there is no `infer_sizes`"
                )
        if output.name != "output":
            continue
        if output.letters[0] != "B":
            raise BrokenRule('the first axis of output must be "B"')
        is_projected = any(i.name in _PROJECTED for i in inputs)
        if is_projected and len(output.letters) != 4:
            raise BrokenRule(
                f'output has axes {" ".join(output.letters)}: expected four, "B H L E"'
            )


def _parameters_model(
    module: ModuleType, variant_name: str, fields: Mapping[str, tuple[Any, Any]]
) -> type[pydantic.BaseModel]:
    for name, (_, default) in fields.items():
        if default is inspect.Parameter.empty:
            raise BrokenRule(f"attend's parameter {name} has no default")
        if name in getattr(module, "REFUSES", {}):
            raise BrokenRule(f"attend has the parameter {name}, and REFUSES names it")
    everything: dict[str, Any] = dict(fields)
    try:
        return pydantic.create_model(
            f"{variant_name}_parameters",
            __config__=pydantic.ConfigDict(
                frozen=True, extra="forbid", strict=True, allow_inf_nan=False
            ),
            **everything,
        )
    except Exception as error:  # pydantic knows many
        raise BrokenRule(f"attend's parameters cannot be validated: {one_line(error)}") from None


def _check_letters(name: str, letters: tuple[str, ...]) -> None:
    for letter in letters:
        if fixed_size(letter) is None and not (len(letter) == 1 and "A" <= letter <= "Z"):
            raise BrokenRule(
                f"an axis of {name} is no letter: got {letter!r}, expected one capital letter "
                "(B batch, H heads, L queries, S keys, D width, E value width) or a number"
            )
    if not letters:
        raise BrokenRule(f"{name} has no axes")


def _arrays(hint: Any) -> list[_Array]:
    """Returns the array types of an annotation, in order; none for other types."""
    return list(_each_array(hint))


def _each_array(hint: Any) -> Iterator[_Array]:
    is_union = typing.get_origin(hint) in (typing.Union, UnionType)
    for part in typing.get_args(hint) if is_union else (hint,):
        if inspect.isclass(part) and issubclass(part, AbstractArray):
            axes = part.dim_str.split()
            letters = tuple(axis.lstrip("#") for axis in axes)
            yield _Array(letters, any("#" in axis for axis in axes), tuple(part.dtypes))


def _type_name(hint: Any) -> str:
    return hint.__name__ if inspect.isclass(hint) else str(hint)
