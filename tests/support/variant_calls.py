"""Calls of every variant, with inputs and parameters from its signature."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from qkv.attention import catalogue
from qkv.attention.signature import fixed_size

VARIANTS: Final = catalogue.variants()
SIZES: Final = {
    "B": 3, "G": 2, "H": 4, "L": 3, "S": 4, "D": 2, "E": 2, "I": 4, "O": 3, "R": 3, "N": 6
}  # fmt: skip
EPS: Final = torch.finfo(torch.float64).eps
OUTPUT: Final = frozenset({"output"})
CAUSAL: Final = {"causal": True}
PARAMETERS: Final[tuple[dict[str, Any], ...]] = (
    {},
    CAUSAL,
    {"causal": False},
    *(CAUSAL | {"query_offset": offset} for offset in ("end", -2, 1, 100, -100)),
    {"normalize": False},
    CAUSAL | {"normalize": False},
    CAUSAL | {"normalize": False, "query_offset": -1},
    {"method": "loop"},
    {"method": "matmul"},
    {"method": "softmax", "causal": False},
    {"rule": "gated", "chunk": 2},
    {"rule": "delta", "scale": -0.7},
    {"rule": "gated_delta", "chunk": 3},
    {"rule": "gated_delta", "normalize_qk": True},
    {"rank": 2, "seed": 5},
    {"bias": -1.5},
    {"scale": -0.7},
    {"scale": 0.0},
    {"softcap": 0.8},
    {"window": (1, 0)},
    {"window": (None, 1), "query_offset": "end"},
    {"dropout": 0.4, "seed": 3},
    CAUSAL
    | {
        "query_offset": "end", "scale": -1.3, "softcap": 0.8, "window": (2, None), "dropout": 0.3,
        "seed": 2**40,
    },
)  # fmt: skip


def known_parameters(name: str) -> list[dict[str, Any]]:
    """Returns those of `PARAMETERS` that a variant takes."""
    fields = VARIANTS[name].parameters.model_fields
    return [parameters for parameters in PARAMETERS if parameters.keys() <= fields.keys()]


def random_inputs(
    name: str, sizes: Mapping[str, int] = SIZES, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Returns normal tensors by argument: all inputs but masks, lengths and terms of heads."""
    return {
        i.argument: torch.randn([fixed_size(a) or sizes.get(a, 2) for a in i.letters]).to(dtype)
        for i in VARIANTS[name].inputs.values()
        if "float32" in i.dtypes and not i.broadcasts and i.letters != ("H",)
    }


def optional_arguments(name: str) -> list[str]:
    """Returns the arguments of `random_inputs` that a request may leave out."""
    inputs = VARIANTS[name].inputs.values()
    return [i.argument for i in inputs if i.is_optional and i.argument in random_inputs(name)]


def head_terms(name: str, heads: int = SIZES["H"]) -> dict[str, Tensor]:
    """Returns normal numbers, one per query head, for each input that has such a shape."""
    inputs = VARIANTS[name].inputs.values()
    return {i.argument: torch.randn(heads).double() for i in inputs if i.letters == ("H",)}


def padded_arguments(name: str) -> list[str]:
    """Returns the arguments with one row for each key of each item: lengths give them padding."""
    inputs = VARIANTS[name].inputs.values()
    return [i.argument for i in inputs if {"B", "S"} <= set(i.letters) and not i.broadcasts]


def with_padding(name: str, tensors: Mapping[str, Tensor], garbage: float) -> dict[str, Tensor]:
    """Returns the tensors with a number in their padding, at most the largest of the dtype."""
    filled = dict(tensors)
    if (lengths := tensors.get("key_lengths_B")) is None:
        return filled
    for argument in tensors.keys() & {*padded_arguments(name)}:
        x = tensors[argument]
        most = torch.finfo(x.dtype).max
        fill = max(-most, min(most, garbage)) if math.isfinite(garbage) else garbage
        padding = torch.arange(x.shape[2]) >= lengths[:, None]
        shape = (len(x), 1, x.shape[2], *(1 for _ in x.shape[3:]))
        filled[argument] = x.masked_fill(padding.view(shape), fill)
    return filled


def forward_output(
    name: str, tensors: Mapping[str, Tensor], parameters: Mapping[str, Any]
) -> Tensor:
    """Returns the output of `attend`."""
    output: Tensor = VARIANTS[name].attend(**tensors, **parameters, outputs=OUTPUT).output
    return output


def gradients(
    name: str, grad: Tensor, tensors: Mapping[str, Tensor], parameters: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Returns the gradients by wire name, with shapes and dtypes checked."""
    variant, before = VARIANTS[name], {a: tensor.clone() for a, tensor in tensors.items()}
    assert variant.backward is not None
    with torch.inference_mode():
        result = variant.backward(grad, **tensors, **parameters)
    by_name = {i.name: i.argument for i in variant.inputs.values()}
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
