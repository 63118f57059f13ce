"""The catalogue: what a variant's file says of itself, read once from its signature."""

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

from qkv.attention import variants as attention
from qkv.errors import InvalidContent, NotFound, pointer_to, shown
from qkv.tensors import DTYPES

__all__ = ["Input", "Output", "Variant", "find", "fixed_size", "variants"]

_RESERVED: Final = ("outputs", "place_BH")  # arguments that the engine gives, not the request


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that a request sends.

    Attributes:
        name: as the wire spells it.
        argument: as the signature spells it, with the shape suffix.
        letters: one per axis, of the legend in CONVENTIONS.md; a number is an axis of that size.
        broadcasts: each axis may also be 1, and leading ones may be left out.
        dtypes: the dtypes it may have.
        optional: it may be absent.
    """

    name: str
    argument: str
    letters: tuple[str, ...]
    broadcasts: bool
    dtypes: tuple[str, ...]
    optional: bool


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that an answer holds.

    Attributes:
        letters: one per axis, as an input's.
        exact: float64 for float64 requests and float32 for all others, instead of the
            request's dtype.
    """

    name: str
    letters: tuple[str, ...]
    exact: bool


@dataclass(frozen=True, eq=False)
class Variant:
    """A variant: its module, and the contract that its signature is."""

    name: str
    module: ModuleType
    inputs: Mapping[str, Input]
    outputs: Mapping[str, Output]
    parameters: type[pydantic.BaseModel]
    takes_place: bool

    @property
    def attend(self) -> Callable[..., Any]:
        """The path that serves."""
        attend: Callable[..., Any] = self.module.attend
        return attend

    def rows_of(self, arguments: Mapping[str, Any]) -> Callable[[slice], Tensor]:
        """What makes blocks of rows of the attention matrix, as the file's `weights` has it.

        Args:
            arguments: tensors and parameters as `attend` takes them; those that the matrix does not
                depend on are let be.
        """
        made: Callable[[slice], Tensor] = self.module.weights(
            **_taken(self.module.weights, arguments)
        )
        return made

    def drawn(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The same arguments, with the tensors that the variant draws where they do not come, as
        the file's `drawn` has them."""
        own = getattr(self.module, "drawn", None)
        return dict(arguments) if own is None else {**arguments, **own(**_taken(own, arguments))}

    @property
    def drawn_inputs(self) -> frozenset[str]:
        """The inputs that are drawn at random where they do not come."""
        if (own := getattr(self.module, "drawn", None)) is None:
            return frozenset()
        taken = inspect.signature(own).parameters
        return frozenset(i.name for i in self.inputs.values() if i.optional and i.argument in taken)

    @property
    def backward(self) -> Callable[..., dict[str, Tensor]] | None:
        """The gradients of sum(grad_output * output), by the names of the inputs; None where the
        file has none."""
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
    def ordinary(self) -> float:
        """Numbers from here on may take another path in the file, and so are not stacked with
        others, whose bits would depend on them: its ORDINARY, or 1e9."""
        return float(getattr(self.module, "ORDINARY", 1e9))

    def flops(self, sizes: Mapping[str, int]) -> int:
        """Floating-point operations of the matrix products, from the sizes of each letter."""
        return int(self.module.flops(sizes))

    def fused(
        self,
        sizes: Mapping[str, int],
        parameters: pydantic.BaseModel,
        outputs: frozenset[str],
    ) -> bool:
        """Whether torch's own kernel is to run (then the backend is "sdpa"), with the same bits on
        any number of CPU threads: what a file's `fused` says."""
        own = getattr(self.module, "fused", None)
        return own is not None and bool(own(sizes, parameters, outputs))

    def decided(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        parameters: pydantic.BaseModel,
        outputs: frozenset[str],
    ) -> Callable[..., Any] | None:
        """`attend` for inputs of these shapes and ordinary numbers, all else decided: takes the
        inputs by name. None where a file's `decided` has none, or a file has no `decided`."""
        own = getattr(self.module, "decided", None)
        return None if own is None else own(shapes, parameters, outputs)

    def pairs(self, sizes: Mapping[str, int], parameters: pydantic.BaseModel) -> int:
        """How many pairs of a query and a key are looked at one by one, from the sizes of each
        letter: what a file's `pairs` says; else as many as there are scores, where it has them."""
        if (own := getattr(self.module, "pairs", None)) is not None:
            return int(own(sizes, parameters))
        scores = self.outputs.get("scores")
        return 0 if scores is None else math.prod(sizes[letter] for letter in scores.letters)

    def weights_are(self, parameters: pydantic.BaseModel) -> str:
        """What the weights are with these parameters: stochastic (none negative, and each row's
        sum is 1, or 0 where it sees nothing), signed, or unnormalised; what a file's `weights_are`
        says, else the first word of its WEIGHTS."""
        own = getattr(self.module, "weights_are", None)
        return str(self.module.WEIGHTS.partition(";")[0] if own is None else own(parameters))

    def complete(
        self, sizes: Mapping[str, int], parameters: pydantic.BaseModel
    ) -> Mapping[str, int]:
        """The sizes of the letters that the tensors leave open, from those that they bind: what a
        file's `complete` says; none where it has none.

        Raises:
            QkvError: sizes and parameters contradict one another, or ask for too much.
        """
        own = getattr(self.module, "complete", None)
        return {} if own is None else own(sizes, parameters)

    def parse(self, parameters: Mapping[str, Any]) -> pydantic.BaseModel:
        """Validates parameters as they came in JSON.

        Raises:
            InvalidContent: one is unknown, refused, mistyped or out of bounds.
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
            raise _explained(error) from None

    @cached_property
    def _defaults(self) -> pydantic.BaseModel:
        return self.parameters()

    def describe(self) -> dict[str, Any]:
        """The variant's entry in the catalogue, as JSON."""
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
                    "optional": i.optional,
                }
                for i in self.inputs.values()
            },
            "parameters": self.parameters.model_json_schema(),
            "refuses": dict(self.refuses),
            "outputs": {
                o.name: {
                    "shape": list(o.letters),
                    "dtype": "float32, or float64 for float64 inputs" if o.exact else "the inputs'",
                }
                for o in self.outputs.values()
            },
            "gradients": [
                i.name
                for i in self.inputs.values()
                if self.backward is not None and "float32" in i.dtypes
            ],
        }


def _taken(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a function names."""
    named = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in named}


def fixed_size(axis: str) -> int | None:
    """The size of an axis that is a number in its annotation; None for a letter."""
    return int(axis) if axis.isdecimal() else None


@cache
def variants() -> Mapping[str, Variant]:
    """Every variant there is, by name, sorted: the files in `qkv/attention`."""
    names = sorted(m.name for m in pkgutil.iter_modules(attention.__path__))
    return {n: _read(n) for n in names if not n.startswith("_")}


def find(name: str) -> Variant:
    """The variant of that name.

    Raises:
        NotFound: there is none.
    """
    found = variants().get(name)
    if found is None:
        raise NotFound(f"no variant {name!r}; there are {', '.join(variants())}")
    return found


def _read(name: str) -> Variant:
    module = importlib.import_module(f"{attention.__name__}.{name}")
    hints = typing.get_type_hints(module.attend, include_extras=True)
    signature = inspect.signature(module.attend).parameters.values()
    tensors = [p for p in signature if p.kind is p.POSITIONAL_OR_KEYWORD]
    options = [p for p in signature if p.kind is p.KEYWORD_ONLY]
    inputs = [_input(p.name, hints[p.name], p.default is not p.empty) for p in tensors]
    fields: dict[str, Any] = {
        p.name: (hints[p.name], p.default) for p in options if p.name not in _RESERVED
    }
    return Variant(
        name=name,
        module=module,
        inputs={i.name: i for i in inputs},
        outputs={
            o: Output(o, letters, exact="float16" not in dtypes)
            for o, hint in typing.get_type_hints(hints["return"]).items()
            for letters, _, dtypes in _arrays(hint)[:1]
        },
        parameters=pydantic.create_model(
            f"{name}_parameters",
            __config__=pydantic.ConfigDict(
                frozen=True, extra="forbid", strict=True, allow_inf_nan=False
            ),
            **fields,
        ),
        takes_place=any(p.name == "place_BH" for p in options),
    )


def _input(argument: str, hint: Any, optional: bool) -> Input:
    arrays = _arrays(hint)
    letters, broadcasts, _ = arrays[0]
    dtypes = tuple(d for d in DTYPES if any(d in known for *_, known in arrays))
    name = argument.rpartition("_")[0] if argument.rpartition("_")[2].isupper() else argument
    return Input(name, argument, letters, broadcasts, dtypes, optional)


def _arrays(hint: Any) -> list[tuple[tuple[str, ...], bool, tuple[str, ...]]]:
    """Letters, whether they broadcast, and dtypes, of each array type in an annotation."""
    found = []
    for part in typing.get_args(hint) or (hint,):
        if inspect.isclass(part) and issubclass(part, AbstractArray):
            axes = part.dim_str.split()
            letters = tuple(axis.lstrip("#") for axis in axes)
            found.append((letters, any("#" in axis for axis in axes), tuple(part.dtypes)))
    return found


def _explained(error: pydantic.ValidationError | TypeError) -> InvalidContent:
    """The first fault, in a sentence; a union's branches are one fault."""
    if isinstance(error, TypeError):  # orjson: an integer past 64 bits
        return InvalidContent(f"parameters: {error}", pointer="/parameters")
    faults = error.errors(include_url=False, include_context=False)
    name = faults[0]["loc"][0]
    # below the parameter, loc names items by number and a union's branches by words
    path = [name, *(part for part in faults[0]["loc"][1:] if isinstance(part, int))]
    reasons = dict.fromkeys(f["msg"] for f in faults if f["loc"][0] == name)
    return InvalidContent(
        f"parameter {name!r} came as {shown(faults[0]['input'])}: {'; or: '.join(reasons)}",
        pointer=pointer_to("parameters", *path),
    )
