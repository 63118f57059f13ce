"""Variants in this process or at a service: their signatures, runs and differentiable functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from qkv.client.client import Client
from qkv.client.request_builders import build_inputs_message
from qkv.client.results import Run
from qkv.errors import InvalidContent, NotFound
from qkv.models.masks import Part, parts_of, whole_of
from qkv.models.model_call import ModelCall


class VariantSignature(NamedTuple):
    """The inputs and parameters of a variant.

    Attributes:
        name: the variant's name.
        inputs: names of its tensors.
        parameters: names of its parameters.
    """

    name: str
    inputs: frozenset[str]
    parameters: frozenset[str]

    @classmethod
    def find(cls, name: str, client: Client | None = None) -> Self:
        """Returns the signature of a variant of a service, or of this process.

        Raises:
            NotFound: there is no such variant.
        """
        return cls.find_all([name], client)[name]

    @classmethod
    def find_all(cls, names: Iterable[str], client: Client | None = None) -> dict[str, Self]:
        """Returns the signatures of several variants by name, with one request at most.

        Raises:
            NotFound: there is no such variant.
        """
        if client is None:
            from qkv.attention import catalogue

            variants = {name: catalogue.find(name) for name in names}
            return {
                name: cls(name, frozenset(v.inputs), frozenset(v.parameters.model_fields))
                for name, v in variants.items()
            }
        known = {entry["variant"]: entry for entry in client.variants()}
        signatures = {}
        for name in names:
            if name not in known:
                raise NotFound(f"there is no variant {name!r:.60}")
            inputs, schema = known[name]["inputs"], known[name]["parameters"]
            taken = frozenset(schema.get("properties", {}))
            signatures[name] = cls(name, frozenset(inputs), taken)
        return signatures

    def problem(self, part: Part) -> str | None:
        """Returns the reason why the variant cannot see what a part sees; None if it can."""
        if not {"query", "key", "value"} <= self.inputs:
            return f"{self.name} takes no query, key and value"
        if part.mask is not None and "mask" not in self.inputs:
            return f"{self.name} takes no mask, and the mask is not only causality and padding"
        if part.causal and "causal" not in self.parameters:
            return f"{self.name} is never causal"
        if part.causal and part.query_offset and "query_offset" not in self.parameters:
            return f"{self.name} takes no query_offset"
        if part.window is not None and "window" not in self.parameters:
            return f"{self.name} takes no window"
        return None

    def arguments_of(self, call: ModelCall) -> dict[str, Any]:
        """Returns the arguments of the whole batch of a call.

        Raises:
            InvalidContent: the variant cannot see what the call sees.
        """
        # the default bias of `sigmoid` counts the keys that a mask hides
        takes_mask = "mask" in self.inputs and "bias" not in self.parameters
        if call.mask is None or takes_mask:
            return self.arguments(call, whole_of(call))
        parts = parts_of(call)
        for part in parts:
            if part.is_whole(call) or self.problem(part) is not None:
                return self.arguments(call, part)  # raises if there is a problem
        lengths = _lengths(call, parts)
        if lengths is None or "key_lengths" not in self.inputs:
            raise InvalidContent(
                f"{self.name} cannot run on all sequences of {call.layer or 'the model'} at once, "
                "because their padding or masks differ: capture them one by one, or use "
                "Calls.compare"
            )
        whole = parts[0]._replace(items=tuple(range(len(call.query))), queries=None, keys=None)
        return {**self.arguments(call, whole), "key_lengths": torch.tensor(lengths)}

    def arguments(self, call: ModelCall, part: Part) -> dict[str, Any]:
        """Returns the arguments of a part of a call.

        Raises:
            InvalidContent: the variant cannot see what the part sees.
        """
        if (reason := self.problem(part)) is not None:
            raise InvalidContent(f"{call.layer or 'the model'}: {reason}")
        tensors = {
            "query": part.select(call.query, part.queries),
            "key": part.select(call.key, part.keys),
            "value": part.select(call.value, part.keys),
            "mask": part.mask,
            "sinks": call.sinks,
        }
        dtype = call.query.dtype  # under autocast those of queries and values may differ
        taken = {
            n: x.to(dtype) if x.is_floating_point() else x
            for n, x in tensors.items()
            if n in self.inputs and x is not None
        }
        return {**taken, **self.options(call, part)}

    def options(self, call: ModelCall, part: Part) -> dict[str, Any]:
        """Returns the parameters for a part of a call, of those that the variant takes."""
        offset = part.query_offset if part.causal or part.window is not None else 0
        options = {
            "causal": part.causal,
            "query_offset": offset,
            "scale": call.scale,
            "softcap": call.softcap,
            "window": None if part.window is None else list(part.window),
        }
        return {n: x for n, x in options.items() if n in self.parameters and x}


def _lengths(call: ModelCall, parts: list[Part]) -> list[int] | None:
    """Returns the number of keys of each sequence; None if more than padding at the end differs."""
    lengths = [0] * len(call.query)
    for part in parts:
        if part.mask is not None or part[3:6] != parts[0][3:6]:
            return None
        size = call.key.shape[2] if part.keys is None else len(part.keys)
        if part.keys is not None and not torch.equal(part.keys, torch.arange(size)):
            return None
        for item in part.items:
            lengths[item] = size
    return lengths


def variant_run(
    variant: str,
    arguments: Mapping[str, Any],
    *,
    outputs: list[str] | None,
    weights: str | Mapping[str, Any] | None,
    client: Client | None,
) -> Run:
    """Runs a variant at a service, or in this process.

    Raises:
        QkvError: the arguments are invalid.
    """
    if client is not None:
        return client.attend(variant, outputs=outputs, weights=weights, **arguments)
    from qkv.local import attend

    fields = {"outputs": outputs, "weights": weights}
    message, from_raw = build_inputs_message(
        None, arguments, {name: value for name, value in fields.items() if value is not None}
    )
    reply = attend(variant, message)
    return Run(
        reply.fields["variant"],
        {name: from_raw(raw) for name, raw in reply.tensors.items()},
        reply.fields["timing"],
        reply.fields.get("weights_are"),
        weights or "full",
    )


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
