"""Calls of the `backward` of every variant, and inputs for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from qkv.attention import catalogue

BACKWARDS: Final = {
    name: variant
    for name, variant in catalogue.variants().items()
    if hasattr(variant.module, "backward")
}
SIZES: Final = {
    "B": 3, "G": 2, "H": 4, "L": 3, "S": 4, "D": 2, "E": 2, "I": 4, "O": 3, "R": 3, "N": 6
}  # fmt: skip
EPS: Final = torch.finfo(torch.float64).eps
OUTPUT: Final = frozenset({"output"})


def random_inputs(
    name: str, sizes: Mapping[str, int] = SIZES, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Returns normal tensors by argument: all inputs but masks, lengths and terms of heads."""
    return {
        i.argument: torch.randn([sizes.get(a, 2) for a in i.letters]).to(dtype)
        for i in BACKWARDS[name].inputs.values()
        if i.name not in ("mask", "key_lengths") and i.letters != ("H",)
    }


def forward_output(
    name: str, tensors: Mapping[str, Tensor], parameters: Mapping[str, Any]
) -> Tensor:
    output: Tensor = BACKWARDS[name].attend(**tensors, **parameters, outputs=OUTPUT).output
    return output


def gradients(
    name: str, grad: Tensor, tensors: Mapping[str, Tensor], parameters: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Returns the gradients by wire name, with shapes and dtypes checked."""
    before = {argument: tensor.clone() for argument, tensor in tensors.items()}
    with torch.inference_mode():
        result: dict[str, Tensor] = BACKWARDS[name].module.backward(grad, **tensors, **parameters)
    by_name = {i.name: i.argument for i in BACKWARDS[name].inputs.values()}
    floating = {n: tensors[a] for n, a in by_name.items() if a in tensors}
    floating = {n: tensor for n, tensor in floating.items() if tensor.is_floating_point()}
    assert result.keys() == floating.keys()
    for n, gradient in result.items():
        assert gradient.shape == floating[n].shape
        assert gradient.dtype in (torch.float32, torch.float64)
        if floating[n].dtype == torch.float64:
            assert gradient.dtype == torch.float64
    for argument, tensor in tensors.items():
        assert torch.equal(tensor.nan_to_num(7), before[argument].nan_to_num(7))
    return result
