"""The plan of a gradient request: the inputs of a run and the gradient of its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Self

from qkv.attention import catalogue
from qkv.attention.signature import TAIL, Input, Output
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, NotFound, pointer_to
from qkv.jobs import state
from qkv.jobs.fields import JobFields, parse_fields
from qkv.jobs.inputs import Inputs
from qkv.jobs.layer_inputs import find_loaded
from qkv.jobs.plan import Limits, Plan
from qkv.jobs.run_fields import parse_parameters
from qkv.jobs.state import GRAD_SUMS
from qkv.tensors import FLOATING, RawTensor
from qkv.wire.casting import dtype_of
from qkv.wire.message import Message

GRAD_OUTPUT: Final = "grad_output"
"""The input that holds the gradient of the output."""
_GRAD_SPEC: Final = Input(GRAD_OUTPUT, GRAD_OUTPUT, (), False, FLOATING, False)


@dataclass(frozen=True, eq=False)
class GradientPlan(Plan):
    """The gradients of sum(grad_output * output).

    There is one for each floating input and each tensor of the layer that the request has.

    Attributes:
        inputs: the inputs of the run and grad_output.
        outputs: names of the tensors that have a gradient.
    """

    @classmethod
    def from_message(cls, variant_name: str, message: Message, limits: Limits) -> Self:
        """Checks a request like `Plan.from_message`, and its `grad_output`.

        Raises:
            NotFound: the variant does not exist, or it has no gradients.
            InvalidContent, PayloadTooLarge: as `Plan.from_message`.
        """
        variant = catalogue.find(variant_name)
        if variant.backward is None:
            known = ", ".join(v.name for v in catalogue.variants().values() if v.backward)
            raise NotFound(f"{variant.name} has no gradients: expected {known}")
        fields = parse_fields(message, JobFields)
        loaded = find_loaded(fields, message, limits.layers)
        parameters = parse_parameters(variant, fields, loaded)
        tensors = dict(message.tensors)
        grad, grad_sums = tensors.pop(GRAD_OUTPUT, None), tensors.pop(GRAD_SUMS, None)
        _check_state(variant, tensors, grad_sums)
        message = replace(message, tensors=tensors)
        inputs = Inputs.from_message(variant, parameters, fields, message, loaded)
        fixed = {*variant.tensors} - {*variant.inputs, state.SUMS}  # they have no gradient
        names = [n for n, dtype in inputs.dtypes.items() if dtype in FLOATING and n not in fixed]
        if inputs.layer is not None:
            names += inputs.layer.tensors
        if grad is None:
            raise InvalidContent(
                "gradients need grad_output, the gradient of the output: missing from inputs",
                pointer="/inputs",
            )
        dtype = dtype_of(
            grad, GRAD_OUTPUT, FLOATING, fields.dtype, pointer_to("inputs", GRAD_OUTPUT)
        )
        state.check_tokens(variant, inputs.axes.sizes, ["gradients"])
        inputs = _with_grad(inputs, variant.outputs["output"], dtype, grad.shape)
        if grad_sums is not None:
            inputs = _with_grad_sums(inputs, variant, grad_sums)
        plan = cls(variant, parameters, inputs, frozenset(names), fields=message.fields)
        if plan.has_state or grad_sums is not None:
            state.check_fit(variant, parameters, inputs.axes.sizes, inputs.layer)
        plan.check_size(limits)
        return plan

    @property
    def is_inference(self) -> bool:
        """False: statistics of models count runs."""
        return False

    @cached_property
    def runs_alone(self) -> bool:
        """True with a shared tensor or a layer, whose gradient is a sum over the items of its own
        request only."""
        names = self.inputs.specs
        return not all(name in names and self.has_batch(name) for name in self.outputs)

    @cached_property
    def flops(self) -> int:
        """Twice the operations of the run: the derivative of a product is two products.

        Values that the backward pass recomputes are not counted.
        """
        return 2 * super().flops

    @property
    def output_names(self) -> Sequence[str]:
        """The tensors of the request, and those of its layer."""
        layer = self.inputs.layer
        return [*self.inputs.specs, *(() if layer is None else layer.tensors)]

    def dtype_of(self, output: str) -> str:
        """Returns the dtype of the tensor with this gradient."""
        return self.inputs.dtypes.get(output, self.inputs.dtype)

    def output_shape(self, output: str) -> tuple[int, ...]:
        """Returns the shape of the tensor with this gradient."""
        if output in self.inputs.sent_shapes:
            return self.inputs.sent_shapes[output]
        assert self.inputs.layer is not None
        shape: tuple[int, ...] = self.inputs.layer.tensors[output].shape
        return shape


def _check_state(
    variant: Variant, tensors: Mapping[str, RawTensor], grad_sums: RawTensor | None
) -> None:
    """Checks that a state is sums alone, for a variant that has one.

    Raises:
        InvalidContent: a tensor is not allowed.
    """
    if grad_sums is not None and variant.state is None:
        raise InvalidContent(
            f"{variant.name} has no state: {GRAD_SUMS} is not allowed",
            pointer=pointer_to("inputs", GRAD_SUMS),
        )
    for name in tensors:
        if name.startswith(TAIL):
            raise InvalidContent(
                f"{name} is not allowed: gradients take a compact state, which has no tail",
                pointer=pointer_to("inputs", name),
            )


def _with_grad_sums(inputs: Inputs, variant: Variant, grad: RawTensor) -> Inputs:
    """Adds the gradient of the sums of the compact state behind the tokens to the inputs.

    Raises:
        InvalidContent: the gradient has not the dtype or the shape of the sums.
    """
    spec, pointer = variant.tensors[state.SUMS], pointer_to("inputs", GRAD_SUMS)
    dtype = dtype_of(grad, GRAD_SUMS, spec.dtypes, "float64", pointer)
    if grad.shape != (expected := inputs.output_shape(spec)):
        raise InvalidContent(
            f"{GRAD_SUMS} has the wrong shape: got {list(grad.shape)}, expected {list(expected)} "
            f"as {state.SUMS} has",
            pointer=pointer,
        )
    shape = tuple(inputs.axes.sizes[letter] for letter in spec.letters)
    return inputs._replace(
        specs={**inputs.specs, GRAD_SUMS: replace(spec, name=GRAD_SUMS, is_optional=False)},
        dtypes={**inputs.dtypes, GRAD_SUMS: dtype},
        sent_shapes={**inputs.sent_shapes, GRAD_SUMS: grad.shape},
        shapes={**inputs.shapes, GRAD_SUMS: shape},
    )


def _with_grad(inputs: Inputs, output: Output, dtype: str, grad_shape: tuple[int, ...]) -> Inputs:
    """Adds the gradient of the output to the inputs.

    Raises:
        InvalidContent: the gradient has not the dtype or the shape of the output.
    """
    pointer, expected = pointer_to("inputs", GRAD_OUTPUT), inputs.output_shape(output)
    if dtype != inputs.dtype:
        raise InvalidContent(
            f"grad_output has the wrong dtype: got {dtype}, expected {inputs.dtype} as the "
            "inputs have",
            pointer=pointer,
        )
    if grad_shape != expected:
        raise InvalidContent(
            f"grad_output has the wrong shape: got {list(grad_shape)}, expected {list(expected)} "
            "as the output has",
            pointer=pointer,
        )
    sizes = inputs.axes.sizes
    shape = (
        tuple(sizes[letter] for letter in output.letters)
        if inputs.layer is None
        else inputs.block_shape(output)
    )
    return inputs._replace(
        specs={**inputs.specs, GRAD_OUTPUT: _GRAD_SPEC},
        dtypes={**inputs.dtypes, GRAD_OUTPUT: dtype},
        sent_shapes={**inputs.sent_shapes, GRAD_OUTPUT: grad_shape},
        shapes={**inputs.shapes, GRAD_OUTPUT: shape},
    )
