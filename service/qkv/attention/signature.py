"""Reads the signature of a variant's `attend`: its inputs, outputs and parameters.

`read_signature` is the entry point; `catalogue` calls it for each file.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType, UnionType
from typing import Any, Final, NamedTuple

import pydantic
from jaxtyping import AbstractArray

from qkv.attention.call import call_of
from qkv.attention.variant_file import BrokenRule, one_line
from qkv.tensors import DTYPES, FLOATING

STATE: Final = "state."
"""The beginning of the names of a state's tensors."""
TAIL: Final = f"{STATE}tail_"
"""The beginning of the names of the tensors that only the exact form of a state has."""
VERSION: Final = f"{STATE}version"
"""The tensor that says what a state belongs to; the engine adds it to those of the variant."""
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
        letters: one per axis, of the legend in CONTRIBUTING.md; a number is an axis of that size.
        broadcasts: each axis may also be 1, and leading axes may be omitted.
        may_omit_last: its last axis may be omitted; the size is then 1.
        may_be_wider: its dtype may be float32 or float64 beside narrower tensors.
        dtypes: the dtypes it may have.
        is_optional: it may be absent.
    """

    name: str
    argument: str
    letters: tuple[str, ...]
    broadcasts: bool
    dtypes: tuple[str, ...]
    is_optional: bool
    may_omit_last: bool = False
    may_be_wider: bool = False

    @property
    def has_own_dtype(self) -> bool:
        """True if its dtype may be any: of masks, and of numbers per head, which would be too
        coarse in bfloat16."""
        return self.broadcasts or self.letters == ("H",)


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


class State(NamedTuple):
    """The tensors that the next tokens need: an argument of `attend`, and one of its outputs.

    Attributes:
        argument: the name of the argument, which is a NamedTuple of tensors.
        kind: the NamedTuple.
        inputs: its tensors, named `state.<field>`.
    """

    argument: str
    kind: type[Any]
    inputs: Mapping[str, Input]


class Signature(NamedTuple):
    """The contents of the signature of `attend`.

    Attributes:
        inputs: the tensors by wire name: the arguments before the `*`.
        outputs: the tensors that `attend` returns.
        parameters: the arguments after the `*`, as a model that validates them.
        from_engine: the arguments that the engine passes: `outputs`, `plane_BH`.
        returns_tensor: `attend` returns the output itself, not a NamedTuple.
        state: what `attend` takes and returns of the tokens before; None: nothing.
        call: the dataclass whose fields are the arguments of all functions of the file; None: each
            function has them as arguments.
    """

    inputs: Mapping[str, Input]
    outputs: Mapping[str, Output]
    parameters: type[pydantic.BaseModel]
    from_engine: frozenset[str]
    returns_tensor: bool
    state: State | None
    call: type[Any] | None


class _Array(NamedTuple):
    letters: tuple[str, ...]
    broadcasts: bool
    dtypes: tuple[str, ...]
    may_omit_last: bool


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
    hints = _hints(attend)
    call = call_of(attend, hints)
    tensors: list[inspect.Parameter] = []
    options: list[inspect.Parameter] = []
    if call is not None:
        hints = {n: h for n, h in hints.items() if n == "return"} | _hints(call)
    for p in inspect.signature(attend if call is None else call).parameters.values():
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise BrokenRule(f"attend's argument {p} is not allowed: expected named arguments")
        if p.name not in hints and p.name not in _FROM_ENGINE:
            raise BrokenRule(
                f"attend's argument {p.name} has no annotation: expected {_ARRAY} of a tensor, "
                "or the type of a parameter"
            )
        (tensors if p.kind is p.POSITIONAL_OR_KEYWORD else options).append(p)
    wider = getattr(module, "MAY_BE_WIDER", ())
    count = sum(p.name != "state" and p.name not in _FROM_ENGINE for p in options)
    state = next((s for p in tensors if (s := _read_state(p.name, hints[p.name], count))), None)
    inputs = [
        _read_input(p, hints[p.name], wider)
        for p in tensors
        if p.name not in _FROM_ENGINE and (state is None or p.name != state.argument)
    ]
    _check_inputs(inputs)
    outputs, returns_tensor = _read_outputs(hints)
    _check_outputs(inputs, outputs, has_hook=hasattr(module, "infer_sizes"))
    parameters = _parameters_model(
        module,
        name,
        {p.name: (hints[p.name], p.default) for p in options if p.name not in _FROM_ENGINE},
    )
    from_engine = frozenset(p.name for p in options if p.name in _FROM_ENGINE)
    if call is not None:
        from_engine |= {"outputs"}
    return Signature(
        {i.name: i for i in inputs}, {o.name: o for o in outputs}, parameters, from_engine,
        returns_tensor, state, call,
    )  # fmt: skip


def _hints(described: Callable[..., Any]) -> dict[str, Any]:
    """Returns the annotations of `attend`, or of the fields of its `Call`."""
    try:
        return typing.get_type_hints(described, include_extras=True)
    except Exception as error:  # names in annotations that are not imported, and anything else
        raise BrokenRule(f"attend's annotations cannot be evaluated: {one_line(error)}") from None


def _read_input(parameter: inspect.Parameter, hint: Any, wider: Collection[str]) -> Input:
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
    letters, broadcasts, _, may_omit_last = arrays[0]
    _check_letters(argument, letters)
    dtypes = tuple(d for d in DTYPES if any(d in array.dtypes for array in arrays))
    if not dtypes:
        raise BrokenRule(
            f"attend's argument {argument} has no dtype that is served: expected one of "
            f"{', '.join(DTYPES)}"
        )
    name, _, suffix = argument.rpartition("_")
    if not name or suffix != "".join(letters):
        name = argument
    is_optional = parameter.default is not parameter.empty
    return Input(
        name, argument, letters, broadcasts, dtypes, is_optional, may_omit_last, name in wider
    )


def _read_state(argument: str, hint: Any, parameter_count: int) -> State | None:
    """Returns the state of an argument whose annotation is a NamedTuple of arrays, or None.

    Its version has four numbers, and one for each parameter.
    """
    version = Input(
        VERSION, VERSION, ("B", str(4 + parameter_count)), False, ("int64",), is_optional=True
    )
    for kind in typing.get_args(hint):
        if inspect.isclass(kind) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
            fields = typing.get_type_hints(kind)
            specs = [_read_field(name, fields[name]) for name in kind._fields]
            return State(argument, kind, {spec.name: spec for spec in (version, *specs)})
    return None


def _read_field(field: str, hint: Any) -> Input:
    arrays, name = _arrays(hint), f"{STATE}{field}"
    if not arrays:
        raise BrokenRule(f"{name} is no array: got {_type_name(hint)}, expected {_ARRAY}")
    _check_letters(name, arrays[0].letters)
    dtypes = tuple(d for d in DTYPES if any(d in array.dtypes for array in arrays))
    return Input(name, name, arrays[0].letters, False, dtypes, is_optional=True)


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
            marked = [i for i, axis in enumerate(axes, 1) if "#" in axis]
            may_omit_last = marked == [len(axes)]
            yield _Array(
                letters, bool(marked and not may_omit_last), tuple(part.dtypes), may_omit_last
            )


def _type_name(hint: Any) -> str:
    return hint.__name__ if inspect.isclass(hint) else str(hint)
