"""Runs a variant on torch tensors of this process, on their device, without a job.

`qkv.substitute` uses it inside a user's model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qkv.attention import catalogue
from qkv.attention.variant import Variant


def attend(
    variant_name: str,
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, Any],
    outputs: frozenset[str],
) -> dict[str, Tensor]:
    """Returns outputs of a variant by name.

    Args:
        variant_name: the variant.
        tensors: its inputs by name, with every axis, of one dtype and on one device.
        parameters: its parameters by name, as a request has them.
        outputs: the names of the outputs.

    Raises:
        NotFound: there is no such variant.
        InvalidContent: a parameter is invalid.
    """
    variant = catalogue.find(variant_name)
    arguments = _arguments(variant, tensors, parameters)
    with torch.no_grad(), _full_precision(tensors):
        result = variant.attend(**arguments, outputs=outputs)
    return {name: getattr(result, name) for name in outputs}


def gradients(
    variant_name: str,
    grad_output: Tensor,
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Returns the gradients of sum(grad_output * output), by the names of the inputs.

    Args:
        variant_name: the variant.
        grad_output: (B, H, L, E).
        tensors, parameters: those of `attend`.

    Raises:
        NotFound: there is no such variant.
        InvalidContent: a parameter is invalid.
    """
    variant = catalogue.find(variant_name)
    assert variant.backward is not None
    with torch.no_grad(), _full_precision(tensors):
        return variant.backward(grad_output, **_arguments(variant, tensors, parameters))


def _full_precision(tensors: Mapping[str, Tensor]) -> torch.autocast:
    """Turns autocast off: it would narrow the sums that variants keep wide."""
    return torch.autocast(next(iter(tensors.values())).device.type, enabled=False)


def _arguments(
    variant: Variant, tensors: Mapping[str, Tensor], parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a variant's functions."""
    parsed = variant.parse(parameters)
    named = {name: getattr(parsed, name) for name in type(parsed).model_fields}
    inputs = {variant.inputs[name].argument: x.detach() for name, x in tensors.items()}
    return variant.random_inputs({**inputs, **named})
