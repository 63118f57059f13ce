"""Loads variant files, and reads docstring and signature: inputs, parameters and outputs.

`catalogue` loads the files of `variants/`, and any other file by its path. `variants/README.md`
has the rules; a file that breaks one raises `BrokenVariant`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
import traceback
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Final, NamedTuple

import pydantic
from jaxtyping import AbstractArray

from qkv.tensors import DTYPES, FLOATING

__all__ = [
    "FOLDER",
    "WEIGHT_KINDS",
    "BrokenVariant",
    "Input",
    "Output",
    "Signature",
    "docstring_field",
    "example",
    "fixed_size",
    "load_module",
    "module_names",
    "read_signature",
    "summary",
]

FOLDER: Final = Path(__file__).parent / "variants"
"""The folder of the variant files."""
WEIGHT_KINDS: Final = ("stochastic", "signed", "unnormalised")
"""The first word of a file's WEIGHTS."""

_PACKAGE: Final = "qkv.attention.variants"
_OUTSIDE: Final = "qkv_variant_"  # begins the module name of a file outside the package
_FROM_ENGINE: Final = ("outputs", "plane_BH")  # arguments from the engine, not from the request
_RESERVED: Final = ("grad_output",)  # inputs that a request has beside the variant's
_PROJECTED: Final = ("query", "key", "value")  # inputs that a layer computes from embeddings
_ARRAY: Final = 'Float[Tensor, "B H S D"]'


class BrokenVariant(Exception):
    """A variant file cannot be used. The message has the file, the problem and an example.

    Args:
        path: the file.
        problem: what is missing or wrong, one sentence without a full stop.
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"{path} is no variant and is not served: {problem}. A complete variant file:\n\n"
            f"{textwrap.indent(example(), '    ')}"
        )
        self.path, self.problem = path, problem


class _Problem(Exception):
    """A rule that a file breaks."""


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


def example() -> str:
    """Returns the smallest variant file: the first block of Python in `variants/README.md`."""
    page = FOLDER / "README.md"
    text = page.read_text() if page.exists() else ""
    found = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return "" if found is None else found[1]


def fixed_size(axis: str) -> int | None:
    """Returns the size of an axis that is a number in its annotation; None for a letter."""
    return int(axis) if axis.isdecimal() else None


def module_names() -> list[str]:
    """Returns the names of the files in `variants/`, sorted, without those that begin with "_"."""
    return sorted(f.stem for f in FOLDER.glob("*.py") if not f.stem.startswith("_"))


def load_module(path: Path) -> ModuleType:
    """Imports a variant file, of this package or any other.

    Raises:
        BrokenVariant: the file cannot be imported, or its name is no identifier.
    """
    name = path.stem
    try:
        if not name.isidentifier() or path.suffix != ".py":
            raise _Problem(
                f"the file's name is the variant's name: got {path.name!r}, expected letters, "
                'digits and "_", then ".py"'
            )
        if path.resolve().parent == FOLDER.resolve():
            return importlib.import_module(f"{_PACKAGE}.{name}")
        return _load_file(path, _OUTSIDE + name)
    except _Problem as problem:
        raise BrokenVariant(path, str(problem)) from None
    except SyntaxError as error:
        reason = f"line {error.lineno} is no Python: {error.msg}"
        raise BrokenVariant(path, reason) from None
    except (Exception, SystemExit) as error:  # the file may raise anything
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).name == path.name
        ]
        where = f"line {lines[-1]}" if lines else "the file"
        reason = f"{where} raises {type(error).__name__} at import: {_one_line(error)}"
        raise BrokenVariant(path, reason) from None


def _load_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # annotations of its NamedTuples are looked up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def summary(module: ModuleType) -> str:
    """Returns the first sentence of a file's docstring; empty without one."""
    paragraph = " ".join((inspect.getdoc(module) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0]


def docstring_field(module: ModuleType, name: str) -> str | None:
    """Returns the text of a `Name: text` paragraph of a file's docstring; None without one.

    It ends before the next such line or an empty line; its last full stop is left out.
    """
    text = inspect.getdoc(module) or ""
    found = re.search(rf"^{name}:(.*(?:\n(?![A-Z]\w*:|\s*$).*)*)", text, re.MULTILINE)
    return None if found is None else " ".join(found[1].split()).removesuffix(".") or None


def read_signature(module: ModuleType, path: Path) -> Signature:
    """Reads and checks a file's docstring, the signature of its `attend` and its constants.

    Raises:
        BrokenVariant: the file breaks a rule of `variants/README.md`.
    """
    try:
        return _read_signature(module)
    except _Problem as problem:
        raise BrokenVariant(path, str(problem)) from None


def _read_signature(module: ModuleType) -> Signature:
    if not summary(module):
        raise _Problem("it has no docstring: expected one sentence that says what the variant is")
    _check_constants(module)
    attend = getattr(module, "attend", None)
    if not inspect.isfunction(attend):
        raise _Problem("it has no function `attend`")
    try:
        hints = typing.get_type_hints(attend, include_extras=True)
    except Exception as error:  # names in annotations that are not imported, and anything else
        raise _Problem(f"attend's annotations cannot be evaluated: {_one_line(error)}") from None
    tensors: list[inspect.Parameter] = []
    options: list[inspect.Parameter] = []
    for p in inspect.signature(attend).parameters.values():
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise _Problem(f"attend's argument {p} is not allowed: expected named arguments")
        if p.name not in hints and p.name not in _FROM_ENGINE:
            raise _Problem(
                f"attend's argument {p.name} has no annotation: expected {_ARRAY} of a tensor, "
                "or the type of a parameter"
            )
        (tensors if p.kind is p.POSITIONAL_OR_KEYWORD else options).append(p)
    inputs = [_read_input(p, hints[p.name]) for p in tensors if p.name not in _FROM_ENGINE]
    _check_inputs(inputs)
    outputs, returns_tensor = _read_outputs(hints)
    _check_outputs(inputs, outputs, has_hook=hasattr(module, "infer_sizes"))
    parameters = _parameters_model(
        module, {p.name: (hints[p.name], p.default) for p in options if p.name not in _FROM_ENGINE}
    )
    from_engine = frozenset(p.name for p in options if p.name in _FROM_ENGINE)
    return Signature(
        {i.name: i for i in inputs}, {o.name: o for o in outputs}, parameters, from_engine,
        returns_tensor,
    )  # fmt: skip


def _check_constants(module: ModuleType) -> None:
    for name in ("FORMULA", "PAPER", "COST", "WEIGHTS"):
        value = getattr(module, name, "some")
        if not isinstance(value, str) or not value.strip():
            raise _Problem(f"{name} is no text: got {value!r:.60}")
    kind = getattr(module, "WEIGHTS", None) or docstring_field(module, "Weights")
    if kind is not None and kind.partition(";")[0] not in WEIGHT_KINDS:
        raise _Problem(
            f"the weights are of an unknown kind: got {kind!r:.60}, expected "
            f"{', '.join(WEIGHT_KINDS[:-1])} or {WEIGHT_KINDS[-1]}"
        )
    refuses = getattr(module, "REFUSES", {})
    if not isinstance(refuses, Mapping) or not all(
        isinstance(text, str) and text for item in refuses.items() for text in item
    ):
        raise _Problem("REFUSES is wrong: expected a dictionary from parameter names to reasons")
    for name in ("weights", "reference", "backward", "flops"):
        if not callable(getattr(module, name, len)):
            raise _Problem(f"{name} is no function")


def _read_input(parameter: inspect.Parameter, hint: Any) -> Input:
    argument, arrays = parameter.name, _arrays(hint)
    if not arrays:
        raise _Problem(
            f"attend's argument {argument} is no array: got {_type_name(hint)}, expected {_ARRAY}, "
            "or the argument after a `*` if it is a parameter"
        )
    if parameter.default not in (parameter.empty, None):
        raise _Problem(
            f"attend's argument {argument} has a default other than None: got "
            f"{parameter.default!r:.60}, expected None, or no default"
        )
    letters, broadcasts, _ = arrays[0]
    _check_letters(argument, letters)
    dtypes = tuple(d for d in DTYPES if any(d in known for *_, known in arrays))
    if not dtypes:
        raise _Problem(
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
        raise _Problem("attend takes no tensor")
    first = inputs[0]
    if first.is_optional or first.letters[0] != "B" or not set(first.dtypes) & set(FLOATING):
        raise _Problem(
            f"attend's first argument {first.argument} must be a floating tensor without a "
            'default whose first axis is "B"'
        )
    for spec in inputs:
        if spec.name in _RESERVED:
            raise _Problem(f"attend's argument {spec.argument} has a reserved name")
        if spec.name in _PROJECTED and (len(spec.letters) != 4 or spec.letters[0] != "B"):
            raise _Problem(
                f"attend's argument {spec.argument} has axes {' '.join(spec.letters)}: expected "
                'four, the batch first: "B H L D"'
            )


def _read_outputs(hints: Mapping[str, Any]) -> tuple[list[Output], bool]:
    """Returns the outputs, and whether `attend` returns the output itself."""
    expected = f"expected the output's shape, {_ARRAY.replace('S D', 'L E')}, or a NamedTuple"
    if "return" not in hints:
        raise _Problem(f"attend has no return annotation: {expected}")
    hint = hints["return"]
    if arrays := _arrays(hint):
        fields, returns_tensor = {"output": arrays[0]}, True
    else:
        if not (inspect.isclass(hint) and issubclass(hint, tuple) and hasattr(hint, "_fields")):
            raise _Problem(f"attend returns no array: got {_type_name(hint)}, {expected}")
        try:
            types = typing.get_type_hints(hint)
        except Exception as error:
            raise _Problem(
                f"the annotations of {hint.__name__} cannot be evaluated: {_one_line(error)}"
            ) from None
        fields, returns_tensor = {n: a[0] for n, t in types.items() if (a := _arrays(t))}, False
    if "output" not in fields:
        raise _Problem(f"{_type_name(hint)} has no array named output: {expected} with one")
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
                raise _Problem(
                    f"the size of axis {letter} of {output.name} is unknown: no required tensor "
                    "has it, and there is no `infer_sizes`"
                )
        if output.name != "output":
            continue
        if output.letters[0] != "B":
            raise _Problem('the first axis of output must be "B"')
        is_projected = any(i.name in _PROJECTED for i in inputs)
        if is_projected and len(output.letters) != 4:
            raise _Problem(f'output has axes {" ".join(output.letters)}: expected four, "B H L E"')


def _parameters_model(
    module: ModuleType, fields: Mapping[str, tuple[Any, Any]]
) -> type[pydantic.BaseModel]:
    for name, (_, default) in fields.items():
        if default is inspect.Parameter.empty:
            raise _Problem(f"attend's parameter {name} has no default")
        if name in getattr(module, "REFUSES", {}):
            raise _Problem(f"attend has the parameter {name}, and REFUSES names it")
    everything: dict[str, Any] = dict(fields)
    try:
        return pydantic.create_model(
            f"{module.__name__.rpartition('.')[2].removeprefix(_OUTSIDE)}_parameters",
            __config__=pydantic.ConfigDict(
                frozen=True, extra="forbid", strict=True, allow_inf_nan=False
            ),
            **everything,
        )
    except Exception as error:  # pydantic knows many
        raise _Problem(f"attend's parameters cannot be validated: {_one_line(error)}") from None


def _check_letters(name: str, letters: tuple[str, ...]) -> None:
    for letter in letters:
        if fixed_size(letter) is None and not (len(letter) == 1 and "A" <= letter <= "Z"):
            raise _Problem(
                f"an axis of {name} is no letter: got {letter!r}, expected one capital letter "
                "(B batch, H heads, L queries, S keys, D width, E value width) or a number"
            )
    if not letters:
        raise _Problem(f"{name} has no axes")


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


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
