"""A validated request for gradients: the inputs of a run, and the gradient of its output."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Final

from qkv.attention import catalogue
from qkv.attention.catalogue import Output
from qkv.errors import InvalidContent, NotFound, pointer_to
from qkv.jobs.fields import Fields, fields_of
from qkv.jobs.inputs import Inputs
from qkv.jobs.job import Job, Limits
from qkv.tensors import FLOATING, RawTensor
from qkv.wire.casting import typed
from qkv.wire.message import Message

__all__ = ["GRAD_OUTPUT", "GradientJob"]

GRAD_OUTPUT: Final = "grad_output"
"""What the gradient of the output is called among the inputs."""


@dataclass(frozen=True, eq=False)
class GradientJob(Job):
    """A job whose answer is the gradient of sum(grad_output * output) with respect to each floating
    input and each tensor of the layer.

    Attributes:
        inputs: grad_output among them.
        outputs: the names of what has a gradient.
    """

    is_inference: ClassVar[bool] = False

    @classmethod
    def of(cls, variant_name: str, message: Message, limits: Limits) -> GradientJob:
        """As `Job.of`, and checks `grad_output`.

        Raises:
            NotFound: no such variant or layer, or the variant has no gradients.
            InvalidContent, TooLarge: as `Job.of`.
        """
        variant = catalogue.find(variant_name)
        if variant.backward is None:
            known = ", ".join(v.name for v in catalogue.variants().values() if v.backward)
            raise NotFound(f"{variant.name} has no gradients; {known} have")
        fields = fields_of(message, Fields)
        parameters = variant.parse(fields.parameters)
        tensors = dict(message.tensors)
        came = tensors.pop(GRAD_OUTPUT, None)
        inputs = Inputs.of(variant, parameters, fields, replace(message, tensors=tensors))
        names = [name for name, tensor in inputs.tensors.items() if tensor.dtype in FLOATING]
        if inputs.layer is not None:
            names += inputs.layer.tensors
        if came is None:
            raise InvalidContent(
                "gradients need grad_output, which did not come", pointer="/inputs"
            )
        grad = typed(came, GRAD_OUTPUT, FLOATING, fields.dtype, pointer_to("inputs", GRAD_OUTPUT))
        inputs = _with_grad(inputs, variant.outputs["output"], grad)
        job = cls(variant, parameters, inputs, frozenset(names))
        job._check_size(limits)
        return job

    @cached_property
    def key(self) -> Hashable:
        """As `Job.key`; but the gradient of what a whole request shares is the sum over its own
        items alone."""
        is_shared = not all(
            name in self.inputs.tensors and self.has_batch(name) for name in self.outputs
        )
        return super().key, id(self) if is_shared else None

    @cached_property
    def flops(self) -> int:
        """Twice the run's, since the derivative of a product is two; what is computed once more
        on the way is not counted."""
        return 2 * super().flops

    @property
    def is_fused(self) -> bool:
        """Never: backwards are closed forms."""
        return False

    @property
    def marks(self) -> dict[str, str]:
        """None: there are no weights."""
        return {}

    def dtype_of(self, output: str) -> str:
        """That of what it is the gradient of."""
        came = self.inputs.tensors.get(output)
        return self.inputs.dtype if came is None else came.dtype

    def answer_shape(self, output: str) -> tuple[int, ...]:
        """That of what it is the gradient of."""
        came = self.inputs.tensors.get(output)
        if came is not None:
            return came.shape
        assert self.inputs.layer is not None
        shape: tuple[int, ...] = self.inputs.layer.tensors[output].shape
        return shape


def _with_grad(inputs: Inputs, output: Output, grad: RawTensor) -> Inputs:
    """The inputs with the gradient of the output, which is shaped as the output is."""
    pointer, expected = pointer_to("inputs", GRAD_OUTPUT), inputs.answer_shape(output)
    if grad.dtype != inputs.dtype:
        raise InvalidContent(
            f"grad_output is {grad.dtype} where the inputs are {inputs.dtype}; all of one request "
            "have one dtype",
            pointer=pointer,
        )
    if grad.shape != expected:
        raise InvalidContent(
            f"grad_output has shape {list(grad.shape)}; the output it is the gradient of has "
            f"{list(expected)}",
            pointer=pointer,
        )
    sizes = inputs.bound.sizes
    shape = (
        tuple(sizes[letter] for letter in output.letters)
        if inputs.layer is None
        else inputs.merged_shape(output)
    )
    return inputs._replace(
        tensors={**inputs.tensors, GRAD_OUTPUT: grad},
        shapes={**inputs.shapes, GRAD_OUTPUT: shape},
    )
