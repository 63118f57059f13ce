"""Reads every file in `variants/`: inputs, parameters and outputs from its signature, and hooks."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any, Final

import orjson
import pydantic
from jaxtyping import AbstractArray
from torch import Tensor

from qkv.errors import InvalidContent, NotFound, format_value, pointer_to
from qkv.tensors import DTYPES

__all__ = ["Input", "Output", "Variant", "find", "fixed_size", "variants"]

_RESERVED: Final = ("outputs", "plane_BH")  # arguments from the engine, not from the request
_PACKAGE: Final = "qkv.attention.variants"


@dataclass(frozen=True, slots=True)
class Input:
    """An input tensor of a variant.

    Attributes:
        name: its name on the wire.
        argument: its name in the signature, with the shape suffix.
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


@dataclass(frozen=True, eq=False)
class Variant:
    """A variant: its module, and what its signature says.

    Attributes:
        takes_plane: `attend` takes `plane_BH`.
    """

    name: str
    module: ModuleType
    inputs: Mapping[str, Input]
    outputs: Mapping[str, Output]
    parameters: type[pydantic.BaseModel]
    takes_plane: bool

    @property
    def attend(self) -> Callable[..., Any]:
        """The function that computes the outputs."""
        attend: Callable[..., Any] = self.module.attend
        return attend

    def row_block_function(self, arguments: Mapping[str, Any]) -> Callable[[slice], Tensor]:
        """Returns the function that computes a block of rows of the attention matrix.

        Args:
            arguments: tensors and parameters as `attend` takes them; those that the file's
                `weights` does not take are ignored.
        """
        function: Callable[[slice], Tensor] = self.module.weights(
            **_accepted(self.module.weights, arguments)
        )
        return function

    def random_inputs(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments, completed by the tensors that the variant draws at random.

        The file's `random_inputs` draws those optional inputs that the request does not have.
        """
        hook = getattr(self.module, "random_inputs", None)
        return (
            dict(arguments) if hook is None else {**arguments, **hook(**_accepted(hook, arguments))}
        )

    @property
    def random_input_names(self) -> frozenset[str]:
        """The names of the inputs that are drawn at random if the request does not have them."""
        if (hook := getattr(self.module, "random_inputs", None)) is None:
            return frozenset()
        names = inspect.signature(hook).parameters
        optional = (i for i in self.inputs.values() if i.is_optional)
        return frozenset(i.name for i in optional if i.argument in names)

    @property
    def backward(self) -> Callable[..., dict[str, Tensor]] | None:
        """The gradients of sum(grad_output * output) by input name; None if the file has none."""
        return getattr(self.module, "backward", None)

    @property
    def summary(self) -> str:
        """The first sentence of the file's docstring."""
        return inspect.getdoc(self.module).partition("\n")[0]  # type: ignore[union-attr]

    @property
    def refuses(self) -> Mapping[str, str]:
        """Parameters that have no meaning here, with the reason."""
        return typing.cast("Mapping[str, str]", self.module.REFUSES)

    @property
    def stackable_below(self) -> float:
        """The file's STACKABLE_BELOW, or 1e9: requests with larger numbers are not stacked.

        Such numbers may take another path, on which the bits of stacked requests would depend.
        """
        return float(getattr(self.module, "STACKABLE_BELOW", 1e9))

    def flops(self, sizes: Mapping[str, int]) -> int:
        """Returns the floating-point operations of the matrix products for these axis sizes."""
        return int(self.module.flops(sizes))

    def uses_sdpa(
        self,
        sizes: Mapping[str, int],
        parameters: pydantic.BaseModel,
        outputs: frozenset[str],
    ) -> bool:
        """Returns True if torch's SDPA kernel runs (backend "sdpa").

        Its bits do not depend on the number of CPU threads. The file's `uses_sdpa` decides.
        """
        hook = getattr(self.module, "uses_sdpa", None)
        return hook is not None and bool(hook(sizes, parameters, outputs))

    def decided(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        parameters: pydantic.BaseModel,
        outputs: frozenset[str],
    ) -> Callable[..., Any] | None:
        """Returns `attend` specialised for these shapes, parameters and outputs, or None.

        The function takes the inputs by name; their numbers must be below `stackable_below`.
        """
        hook = getattr(self.module, "decided", None)
        return None if hook is None else hook(shapes, parameters, outputs)

    def score_count(self, sizes: Mapping[str, int], parameters: pydantic.BaseModel) -> int:
        """Returns how many pairs of a query and a key are visited one by one.

        The file's `score_count` says so; without one it is the size of the output `scores`.
        """
        if (hook := getattr(self.module, "score_count", None)) is not None:
            return int(hook(sizes, parameters))
        scores = self.outputs.get("scores")
        return 0 if scores is None else math.prod(sizes[letter] for letter in scores.letters)

    def weights_are(self, parameters: pydantic.BaseModel) -> str:
        """Returns stochastic, signed or unnormalised.

        Stochastic weights are not negative, and each row's sum is 1, or 0 if the row sees no key.
        The file's `weights_are` says so; without one it is the first word of its WEIGHTS.
        """
        hook = getattr(self.module, "weights_are", None)
        return str(self.module.WEIGHTS.partition(";")[0] if hook is None else hook(parameters))

    def infer_sizes(
        self, sizes: Mapping[str, int], parameters: pydantic.BaseModel
    ) -> Mapping[str, int]:
        """Returns the sizes of letters that no tensor of the request binds.

        The file's `infer_sizes` computes them from the other sizes and the parameters.

        Raises:
            QkvError: sizes and parameters contradict one another, or exceed a limit.
        """
        hook = getattr(self.module, "infer_sizes", None)
        return {} if hook is None else hook(sizes, parameters)

    def parse(self, parameters: Mapping[str, Any]) -> pydantic.BaseModel:
        """Validates parameters from JSON.

        Raises:
            InvalidContent: a parameter is unknown, refused, mistyped or out of bounds.
        """
        for name in parameters:
            pointer = pointer_to("parameters", name)
            if name in self.refuses:
                raise InvalidContent(
                    f"{self.name} refuses {name!r}: {self.refuses[name]}", pointer=pointer
                )
            if name not in self.parameters.model_fields:
                known = ", ".join(self.parameters.model_fields) or "none"
                raise InvalidContent(
                    f"{self.name} has no parameter {name!r}; its parameters are {known}",
                    pointer=pointer,
                )
        if not parameters:
            return self._defaults
        try:
            return self.parameters.model_validate_json(orjson.dumps(parameters))
        except (pydantic.ValidationError, TypeError) as error:
            raise _parameter_error(error) from None

    @cached_property
    def _defaults(self) -> pydantic.BaseModel:
        return self.parameters()

    def describe(self) -> dict[str, Any]:
        """Returns the variant's entry in the catalogue as JSON."""
        return {
            "variant": self.name,
            "summary": self.summary,
            "formula": self.module.FORMULA,
            "paper": self.module.PAPER,
            "cost": self.module.COST,
            "weights": self.module.WEIGHTS,
            "inputs": {
                i.name: {
                    "shape": list(i.letters),
                    "broadcasts": i.broadcasts,
                    "dtypes": list(i.dtypes),
                    "optional": i.is_optional,
                }
                for i in self.inputs.values()
            },
            "parameters": self.parameters.model_json_schema(),
            "refuses": dict(self.refuses),
            "outputs": {
                o.name: {
                    "shape": list(o.letters),
                    "dtype": "float32, or float64 for float64 inputs"
                    if o.is_exact
                    else "the inputs'",
                }
                for o in self.outputs.values()
            },
            "gradients": [
                i.name
                for i in self.inputs.values()
                if self.backward is not None and "float32" in i.dtypes
            ],
        }


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the arguments that a function takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


def fixed_size(axis: str) -> int | None:
    """Returns the size of an axis that is a number in its annotation; None for a letter."""
    return int(axis) if axis.isdecimal() else None


@cache
def variants() -> Mapping[str, Variant]:
    """Returns every variant by name, sorted: the modules in `variants/`.

    A module whose name begins with an underscore is no variant.
    """
    package = importlib.import_module(_PACKAGE)
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__))
    return {n: _read_variant(n) for n in names if not n.startswith("_")}


def find(name: str) -> Variant:
    """Returns the variant of that name.

    Raises:
        NotFound: the variant does not exist.
    """
    variant = variants().get(name)
    if variant is None:
        raise NotFound(f"no variant {name!r}; there are {', '.join(variants())}")
    return variant


def _read_variant(name: str) -> Variant:
    module = importlib.import_module(f"{_PACKAGE}.{name}")
    hints = typing.get_type_hints(module.attend, include_extras=True)
    signature = inspect.signature(module.attend).parameters.values()
    tensors = [p for p in signature if p.kind is p.POSITIONAL_OR_KEYWORD]
    options = [p for p in signature if p.kind is p.KEYWORD_ONLY]
    inputs = [_read_input(p.name, hints[p.name], p.default is not p.empty) for p in tensors]
    fields: dict[str, Any] = {
        p.name: (hints[p.name], p.default) for p in options if p.name not in _RESERVED
    }
    return Variant(
        name=name,
        module=module,
        inputs={i.name: i for i in inputs},
        outputs={
            o: Output(o, letters, is_exact="float16" not in dtypes)
            for o, hint in typing.get_type_hints(hints["return"]).items()
            for letters, _, dtypes in _array_types(hint)[:1]
        },
        parameters=pydantic.create_model(
            f"{name}_parameters",
            __config__=pydantic.ConfigDict(
                frozen=True, extra="forbid", strict=True, allow_inf_nan=False
            ),
            **fields,
        ),
        takes_plane=any(p.name == "plane_BH" for p in options),
    )


def _read_input(argument: str, hint: Any, is_optional: bool) -> Input:
    arrays = _array_types(hint)
    letters, broadcasts, _ = arrays[0]
    dtypes = tuple(d for d in DTYPES if any(d in known for *_, known in arrays))
    name = argument.rpartition("_")[0] if argument.rpartition("_")[2].isupper() else argument
    return Input(name, argument, letters, broadcasts, dtypes, is_optional)


def _array_types(hint: Any) -> list[tuple[tuple[str, ...], bool, tuple[str, ...]]]:
    """Returns letters, whether they broadcast, and dtypes of each array type in an annotation."""
    types = []
    for part in typing.get_args(hint) or (hint,):
        if inspect.isclass(part) and issubclass(part, AbstractArray):
            axes = part.dim_str.split()
            letters = tuple(axis.lstrip("#") for axis in axes)
            types.append((letters, any("#" in axis for axis in axes), tuple(part.dtypes)))
    return types


def _parameter_error(error: pydantic.ValidationError | TypeError) -> InvalidContent:
    """Returns the first error as a sentence; the branches of a union are one error."""
    if isinstance(error, TypeError):  # orjson: an integer past 64 bits
        return InvalidContent(f"parameters: {error}", pointer="/parameters")
    errors = error.errors(include_url=False, include_context=False)
    name = errors[0]["loc"][0]
    # below the parameter, loc names items by number and a union's branches by words
    path = [name, *(part for part in errors[0]["loc"][1:] if isinstance(part, int))]
    reasons = dict.fromkeys(e["msg"] for e in errors if e["loc"][0] == name)
    return InvalidContent(
        f"parameter {name!r} came as {format_value(errors[0]['input'])}: {'; or: '.join(reasons)}",
        pointer=pointer_to("parameters", *path),
    )
