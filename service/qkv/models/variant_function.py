"""A variant as a differentiable function of torch tensors, in process or at a service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qkv.client.client import Client
from qkv.errors import InvalidContent

__all__ = ["VariantFunction"]

_OUTPUT: Final = frozenset({"output"})


class VariantFunction(NamedTuple):
    """A variant with its parameters.

    Attributes:
        variant: its name.
        parameters: by name, as a request has them.
        client: of a service that computes it; None: this process, on the device of the tensors.
    """

    variant: str
    parameters: Mapping[str, Any]
    client: Client | None = None

    def __call__(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the output (B, H, L, E), which autograd can differentiate once.

        Args:
            tensors: the variant's inputs by name, with every axis.

        Raises:
            QkvError: the inputs or parameters are invalid.
        """
        names = tuple(tensors)
        output: Tensor = _Attention.apply(self, names, *tensors.values())  # type: ignore[no-untyped-call]
        return output

    def weights(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the weights (B, H, L, S) in the dtype of the query, without gradients.

        Raises:
            QkvError: the inputs or parameters are invalid.
        """
        weights = self._attend(tensors, "weights")
        return weights.to(tensors["query"].dtype)

    def _attend(self, tensors: Mapping[str, Tensor], output: str) -> Tensor:
        if self.client is None:
            from qkv.engine.tensor_calls import attend

            outputs = attend(self.variant, tensors, self.parameters, frozenset({output}))
            here: Tensor = outputs[output]
            return here
        arguments: dict[str, Any] = {**tensors, **self.parameters}
        run = self.client.attend(self.variant, outputs=[output], **arguments)
        at_service: Tensor = run.outputs[output]
        return at_service

    def _gradients(self, grad_output: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.client is None:
            from qkv.engine.tensor_calls import gradients

            return gradients(self.variant, grad_output, tensors, self.parameters)
        arguments: dict[str, Any] = {**tensors, **self.parameters}
        at_service = self.client.gradients(self.variant, grad_output=grad_output, **arguments)
        return dict(at_service.gradients)


class _Attention(torch.autograd.Function):
    """Attend forward, gradients backward."""

    @staticmethod
    def forward(
        ctx: Any, function: VariantFunction, names: tuple[str, ...], *tensors: Tensor
    ) -> Tensor:
        """Computes the output and keeps the inputs."""
        ctx.function, ctx.names = function, names
        ctx.save_for_backward(*tensors)
        return function._attend(dict(zip(names, tensors, strict=True)), "output")

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of the inputs that need them."""
        if torch.is_grad_enabled():
            # torch's once_differentiable raises only if a second derivative needs this function
            # alone, and leaves its part out otherwise
            raise InvalidContent(
                f"{ctx.function.variant} has no second derivative: leave create_graph out"
            )
        tensors = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        results = ctx.function._gradients(grad_output.contiguous(), tensors)
        gradients: list[Tensor | None] = []
        for (name, x), is_needed in zip(tensors.items(), ctx.needs_input_grad[2:], strict=True):
            if is_needed and name not in results:
                raise InvalidContent(
                    f"{ctx.function.variant} has no gradient of {name}: freeze the parameters that "
                    f"it is computed from"
                )
            gradients.append(results[name].to(x.dtype) if is_needed else None)
        return (None, None, *gradients)
