"""A variant: its file's functions, inputs, outputs and parameters, with defaults for absent parts.

`catalogue` creates one of each file.
"""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import ModuleType
from typing import Any, Final

import orjson
import pydantic
import torch
from torch import Tensor

from qkv.attention import defaults, variant_file
from qkv.attention.call import attend_by_fields, new_call
from qkv.attention.identity_weights import IdentityWeights
from qkv.attention.json_integers import takes_integers, to_integer
from qkv.attention.reference import Reference
from qkv.attention.signature import STATE, TAIL, VERSION, Input, Output, State
from qkv.attention.step import STEPS, Step
from qkv.errors import InvalidContent, format_value, pointer_to

_OUTPUT: Final = frozenset({"output"})
_PYDANTIC_PREFIX: Final = "Input should be "


@dataclass(frozen=True, eq=False)
class Variant:
    """A variant: its module, and the contents of its signature.

    Attributes:
        outputs: the outputs that `attend` returns, and `weights` if they can be computed.
        returned: the outputs that `attend` returns; None: it returns the output itself.
        from_engine: the arguments of `attend` that the engine passes.
        state: what `attend` takes and returns of the tokens before; None: nothing.
        call: the dataclass of the arguments of the file's functions; None: they take arguments.
        steps: the tensors between inputs and output, `steps.<name>`, in order; empty: none.
    """

    name: str
    module: ModuleType
    inputs: Mapping[str, Input]
    outputs: Mapping[str, Output]
    parameters: type[pydantic.BaseModel]
    returned: frozenset[str] | None
    from_engine: frozenset[str]
    state: State | None = None
    call: type[Any] | None = None
    steps: Mapping[str, Step] = field(default_factory=dict)

    @cached_property
    def has_notes(self) -> bool:
        """True if `attend` returns notes on its numbers, besides outputs."""
        returned = typing.get_type_hints(self.module.attend)["return"]
        return "notes" in getattr(returned, "_fields", ())

    @cached_property
    def tensors(self) -> Mapping[str, Input]:
        """The inputs, and the tensors of a state."""
        return self.inputs if self.state is None else {**self.inputs, **self.state.inputs}

    @cached_property
    def groups(self) -> Mapping[str, Mapping[str, Input | Step]]:
        """The outputs that are not those of `attend`, by the name that a request has for all."""
        state = {} if self.state is None else self.state.inputs
        return {n: specs for n, specs in (("state", state), ("steps", self.steps)) if specs}

    def group_names(
        self, parameters: pydantic.BaseModel, inputs: Collection[str]
    ) -> dict[str, list[str]]:
        """Returns the names of each group that a request may have, in their order.

        Args:
            parameters: those of the request.
            inputs: the names of its tensors.
        """
        steps = [name for name, step in self.steps.items() if step.exists(parameters, inputs)]
        groups = {"state": self.state_names(parameters), "steps": steps}
        return {group: names for group, names in groups.items() if names}

    def state_names(self, parameters: pydantic.BaseModel) -> list[str]:
        """Returns the names of the tensors of a state for these parameters, in their order."""
        if self.state is None:
            return []
        names = list(self.state.inputs)
        if (hook := getattr(self.module, "state_fields", None)) is not None:
            fields = hook(parameters)
            names = [n for n in names if n == VERSION or n.removeprefix(STATE) in fields]
        if getattr(parameters, "state") == "compact":  # noqa: B009
            names = [n for n in names if not n.startswith(TAIL)]
        return names

    @property
    def state_needs(self) -> Mapping[str, Any]:
        """The values that parameters of a request with a state have: the file's STATE_NEEDS."""
        return typing.cast("Mapping[str, Any]", getattr(self.module, "STATE_NEEDS", {}))

    def for_weights(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of `attend` without a state that the weights do not depend on."""
        if self.state is None or getattr(self.module, "STATE_CHANGES_WEIGHTS", True):
            return dict(arguments)
        return {n: x for n, x in arguments.items() if n != self.state.argument}

    def with_state(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of `attend`, with the tensors of a state as one of them."""
        if self.state is None:
            return dict(arguments)
        rest = {n: x for n, x in arguments.items() if n not in self.state.inputs}
        given = {n.removeprefix(STATE): x for n, x in arguments.items() if n not in rest}
        return {**rest, self.state.argument: self.state.kind(**given)} if given else rest

    @cached_property
    def attend(self) -> Callable[..., Any]:
        """The function that computes the outputs; takes the set `outputs` beside its arguments."""
        attend: Callable[..., Any] = self.module.attend
        if self.call is not None:
            attend = attend_by_fields(attend, self.call)
        if "outputs" in self.from_engine and self.returned == frozenset(self.outputs):
            return attend
        return defaults.CompleteAttend(
            self.name,
            attend,
            self.inputs,
            self.outputs,
            self.returned,
            "outputs" in self.from_engine,
            self.row_block_function,
        )

    @cached_property
    def takes_plane(self) -> bool:
        """True if `attend` takes `plane_BH`."""
        return "plane_BH" in self.from_engine

    @property
    def has_row_blocks(self) -> bool:
        """True if the file's `weights` computes rows of any heads of any items by themselves."""
        return hasattr(self.module, "weights")

    @property
    def has_free_value_width(self) -> bool:
        """True if `attend` takes values of any width."""
        value = self.inputs.get("value")
        others = (i.letters for i in self.inputs.values() if i is not value)
        return value is not None and not any(value.letters[-1] in letters for letters in others)

    @property
    def has_closed_form_gradients(self) -> bool:
        """True if the file has a `backward`."""
        return hasattr(self.module, "backward")

    def row_block_function(self, arguments: Mapping[str, Any]) -> Callable[[slice], Tensor]:
        """Returns the function that computes a block of rows of the attention matrix.

        Args:
            arguments: tensors and parameters as `attend` takes them; those that the file's
                `weights` does not take are ignored.
        """
        if self.has_row_blocks:
            function: Callable[[slice], Tensor] = self._run(self.module.weights, arguments)
            return function
        if self.returned is not None and "weights" in self.returned:
            whole = self.attend(**arguments, outputs=frozenset({"weights"})).weights
            return lambda rows: whole[..., rows, :]
        return IdentityWeights(self._compute_output, self.inputs, self.outputs["output"], arguments)

    def random_inputs(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments, completed by the tensors that the variant draws at random.

        The file's `random_inputs` draws those optional inputs that the request does not have.
        """
        hook = getattr(self.module, "random_inputs", None)
        return (
            dict(arguments) if hook is None else {**arguments, **hook(**_accepted(hook, arguments))}
        )

    def required_names(self, parameters: pydantic.BaseModel) -> list[str]:
        """Returns the inputs that every request with these parameters has, in their order.

        The file's `needed_inputs` names optional inputs that are among them.
        """
        hook = getattr(self.module, "needed_inputs", None)
        needed = () if hook is None else hook(parameters)
        return [i.name for i in self.inputs.values() if not i.is_optional or i.name in needed]

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
        """The gradients of sum(grad_output * output) by input name: the file's, or by autograd.

        None if no input is floating.
        """
        if self.has_closed_form_gradients:
            backward = self.module.backward if self.call is None else self._closed_form_gradients
            return typing.cast("Callable[..., dict[str, Tensor]]", backward)
        if not any("float32" in i.dtypes for i in self.inputs.values()):
            return None
        return partial(defaults.backward_by_autograd, self._compute_output, self.inputs)

    def reference(self, **arguments: Any) -> Any:
        """Computes the outputs in float64: by the file's `steps`, else by `attend`.

        Args:
            **arguments: as `attend` takes them, in any dtype.
        """
        wide = {n: _to_float64(x) for n, x in self.random_inputs(arguments).items()}
        if not self.steps:
            return self.attend(**wide, outputs=frozenset(self.outputs))
        if self.takes_plane and wide.get("plane_BH") is None:
            query = wide[self.inputs["query"].argument]
            B, H = query.shape[:2]
            wide["plane_BH"] = torch.arange(B * H, device=query.device).view(B, H)
        return self._step_reference.run(wide)

    @cached_property
    def _step_reference(self) -> Reference:
        return Reference(
            partial(self._run, self.module.steps), self.steps, self.inputs, self.outputs,
            self.state, "query_offset" in self.parameters.model_fields,
        )  # fmt: skip

    def compute_steps(self, **arguments: Any) -> dict[str, Tensor]:
        """Computes the steps in float64, by the names of their outputs.

        Args:
            **arguments: as `attend` takes them, floating tensors in float64, without a state; with
                `plane_BH` if the variant takes it.
        """
        steps = self._run(self.module.steps, arguments)
        return {STEPS + name: x() if callable(x) else x for name, x in steps.items()}

    def _run(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Calls a function of the file with those of the arguments that it takes."""
        if self.call is not None:
            return function(new_call(self.call, arguments))
        return function(**_accepted(function, arguments))

    def _closed_form_gradients(
        self, grad_output: Tensor, grad_state: Any = None, **arguments: Any
    ) -> dict[str, Tensor]:
        """Calls the `backward` of a file with a `Call`."""
        assert self.call is not None
        call, backward = new_call(self.call, arguments), self.module.backward
        with_state = () if self.state is None else (grad_state,)
        return typing.cast("dict[str, Tensor]", backward(call, grad_output, *with_state))

    def _compute_output(self, **arguments: Any) -> Tensor:
        output: Tensor = self.attend(**arguments, outputs=_OUTPUT).output
        return output

    @property
    def summary(self) -> str:
        """The first sentence of the file's docstring."""
        return variant_file.summary(self.module)

    @property
    def formula(self) -> str:
        """The file's FORMULA, or its docstring's `Formula:`."""
        return self._text("FORMULA", "not given")

    @property
    def paper(self) -> str:
        """The file's PAPER, or its docstring's `Paper:`."""
        return self._text("PAPER", "not given")

    @property
    def cost(self) -> str:
        """The file's COST, or its docstring's `Cost:`."""
        return self._text("COST", "not given")

    @property
    def weights_text(self) -> str:
        """The file's WEIGHTS, or its docstring's `Weights:`."""
        return self._text("WEIGHTS", "unnormalised")

    def _text(self, name: str, default: str) -> str:
        constant: str | None = getattr(self.module, name, None)
        return constant or variant_file.docstring_field(self.module, name.capitalize()) or default

    @property
    def refuses(self) -> Mapping[str, str]:
        """Parameters that have no meaning here, with the reason."""
        return typing.cast("Mapping[str, str]", getattr(self.module, "REFUSES", {}))

    @property
    def stackable_below(self) -> float:
        """The file's STACKABLE_BELOW, or 0: requests with numbers from there on are not stacked.

        A file with the constant promises that only `guards` select its paths. A file without it has
        promised nothing about stacked requests.
        """
        return float(getattr(self.module, "STACKABLE_BELOW", 0.0))

    def flops(self, sizes: Mapping[str, int]) -> int:
        """Returns the floating-point operations of the matrix products for these axis sizes."""
        return int(self._flops(sizes))

    @cached_property
    def _flops(self) -> Callable[[Mapping[str, int]], int]:
        if hasattr(self.module, "flops"):
            return typing.cast("Callable[[Mapping[str, int]], int]", self.module.flops)
        return defaults.flop_counter(self._compute_output, self.inputs, self.outputs.get("weights"))

    def uses_sdpa(
        self,
        sizes: Mapping[str, int],
        parameters: pydantic.BaseModel,
        outputs: frozenset[str],
        inputs: Collection[str],
    ) -> bool:
        """Returns True if torch's SDPA kernel runs (backend "sdpa").

        Its bits do not depend on the number of CPU threads. The file's `uses_sdpa` decides.
        `inputs` are the names of the tensors that the request has.
        """
        if (hook := getattr(self.module, "uses_sdpa", None)) is None:
            return False
        known = {"sizes": sizes, "parameters": parameters, "outputs": outputs, "inputs": inputs}
        return bool(hook(**_accepted(hook, known)))

    def score_count(self, sizes: Mapping[str, int], parameters: pydantic.BaseModel) -> int:
        """Returns how many pairs of a query and a key are visited one by one.

        The file's `score_count` says so. Without one it is the size of the output `scores`; if the
        file has no `weights` either, `attend` may visit each pair: the size of the weights.
        """
        if (hook := getattr(self.module, "score_count", None)) is not None:
            return int(hook(sizes, parameters))
        scores = self.outputs.get("scores" if self.has_row_blocks else "weights")
        return 0 if scores is None else math.prod(sizes[letter] for letter in scores.letters)

    def weights_are(self, parameters: pydantic.BaseModel, inputs: Collection[str] = ()) -> str:
        """Returns stochastic, signed or unnormalised.

        Stochastic weights are not negative, and each row's sum is 1, or 0 if the row sees no key.
        The file's `weights_are` says so; without one it is the first word of `weights_text`.

        Args:
            parameters: those of the request.
            inputs: the names of the tensors that the request has.
        """
        if (hook := getattr(self.module, "weights_are", None)) is None:
            return self.weights_text.partition(";")[0]
        return str(hook(**_accepted(hook, {"parameters": parameters, "inputs": inputs})))

    def infer_sizes(
        self,
        sizes: Mapping[str, int],
        parameters: pydantic.BaseModel,
        inputs: Collection[str] = (),
    ) -> Mapping[str, int]:
        """Returns the sizes of letters that no tensor of the request binds.

        The file's `infer_sizes` computes them from the other sizes, the parameters, and the names
        of the tensors that the request has.

        Raises:
            QkvError: sizes, parameters and inputs contradict one another, or exceed a limit.
        """
        if (hook := getattr(self.module, "infer_sizes", None)) is None:
            return {}
        known = {"sizes": sizes, "parameters": parameters, "inputs": inputs}
        found: Mapping[str, int] = hook(**_accepted(hook, known))
        return found

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
            if name in self.inputs and name not in self.parameters.model_fields:
                raise InvalidContent(
                    f"{self.name} has no parameter {name!r}: got an input among the parameters, "
                    f"expected {name} as a tensor among the inputs",
                    pointer=pointer,
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
            plain = {n: to_integer(v) if n in self._integers else v for n, v in parameters.items()}
            return self.parameters.model_validate_json(orjson.dumps(plain))
        except (pydantic.ValidationError, TypeError) as error:
            raise _parameter_error(error) from None

    @cached_property
    def _integers(self) -> frozenset[str]:
        fields = self.parameters.model_fields
        return frozenset(n for n, f in fields.items() if takes_integers(f.annotation))

    @cached_property
    def _defaults(self) -> pydantic.BaseModel:
        return self.parameters()


def _to_float64(x: Any) -> Any:
    """Returns floating tensors, also those of a state, in float64; anything else as it is."""
    if isinstance(x, Tensor):
        return x.double() if x.is_floating_point() else x
    is_state = isinstance(x, tuple) and hasattr(x, "_fields")
    return type(x)(*map(_to_float64, x)) if is_state else x


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the arguments that a function takes."""
    names = _argument_names(function)
    return {name: value for name, value in arguments.items() if name in names}


@functools.lru_cache(256)
def _argument_names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _parameter_error(error: pydantic.ValidationError | TypeError) -> InvalidContent:
    """Returns the first error as a sentence; the branches of a union are one error."""
    if isinstance(error, TypeError):  # orjson: an integer past 64 bits
        return InvalidContent(f"parameters: {error}", pointer="/parameters")
    errors = error.errors(include_url=False, include_context=False)
    name = errors[0]["loc"][0]
    # below the parameter, loc names items by number and a union's branches by words
    path = [name, *(part for part in errors[0]["loc"][1:] if isinstance(part, int))]
    reasons = dict.fromkeys(e["msg"] for e in errors if e["loc"][0] == name)
    if all(reason.startswith(_PYDANTIC_PREFIX) for reason in reasons):
        choices = " or ".join(reason.removeprefix(_PYDANTIC_PREFIX) for reason in reasons)
        expectation = f"expected {choices}"
    else:
        expectation = "; or: ".join(reasons)
    return InvalidContent(
        f"parameter {name!r} is invalid: got {format_value(errors[0]['input'])}, {expectation}",
        pointer=pointer_to("parameters", *path),
    )
