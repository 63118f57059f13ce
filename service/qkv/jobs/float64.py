"""Tensors and arguments of a variant in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qkv.attention.signature import VERSION
from qkv.attention.variant import Variant


def float64_arguments(
    variant: Variant, tensors: Mapping[str, Tensor], parameters: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """Returns the arguments of a variant's functions in float64.

    Random tensors of the variant have the values drawn for the dtype of the request.

    Args:
        variant: the variant.
        tensors: its inputs by name, in float64.
        parameters: its parameters by name.
        dtype: the dtype of the inputs in the request.
    """
    wide = {
        spec.argument: tensors[name]
        for name, spec in variant.tensors.items()
        if name in tensors and name != VERSION
    }
    request_dtype = getattr(torch, dtype)
    narrow = {n: t.to(request_dtype) if t.is_floating_point() else t for n, t in wide.items()}
    complete = variant.random_inputs({**narrow, **parameters})
    random = {
        n: to_float64(v) if isinstance(v, Tensor) else v
        for n, v in complete.items()
        if n not in wide
    }
    return variant.with_state(random | wide)


def to_float64(tensor: Tensor) -> Tensor:
    """Converts a floating tensor to float64; returns any other tensor unchanged."""
    return tensor.double() if tensor.is_floating_point() else tensor
