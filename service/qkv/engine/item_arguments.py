"""The arguments of a variant's functions for some items and heads of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qkv.attention.signature import STATE, Input
from qkv.attention.variant import Variant
from qkv.jobs.axis_sizes import HEADS

Planes = tuple[slice, slice]
"""A range of batch items, and one of heads."""


def place_planes(
    variant: Variant, arguments: Mapping[str, Any], sizes: Mapping[str, int], device: torch.device
) -> dict[str, Any]:
    """Returns the arguments with `plane_BH` if the variant takes it: of one request, if absent."""
    if not variant.takes_plane or arguments.get("plane_BH") is not None:
        return dict(arguments)
    B, H = sizes["B"], sizes["H"]
    return {**arguments, "plane_BH": torch.arange(B * H, device=device).view(B, H)}


def slice_arguments(
    variant: Variant, arguments: Mapping[str, Any], sizes: Mapping[str, int], places: Planes
) -> dict[str, Any]:
    """Returns the arguments of these items and heads only."""
    items, heads = places
    where = {"B": items}
    for letter in HEADS & sizes.keys() if "H" in sizes else ():
        K = sizes["H"] // sizes[letter]
        where[letter] = slice(heads.start // K, -(-heads.stop // K))

    def cut(spec: Input, tensor: Tensor) -> Tensor:
        axes = zip(spec.letters, tensor.shape, strict=True)
        return tensor[
            tuple(slice(None) if n == 1 else where.get(letter, slice(None)) for letter, n in axes)
        ]

    sliced = dict(arguments)
    for spec in variant.inputs.values():
        if (tensor := arguments.get(spec.argument)) is not None:
            sliced[spec.argument] = cut(spec, tensor)
    if variant.state is not None and (past := arguments.get(variant.state.argument)) is not None:
        fields = {n: x for n, x in past._asdict().items() if x is not None}
        specs = variant.state.inputs
        cuts = {n: cut(specs[f"{STATE}{n}"], x) for n, x in fields.items()}
        sliced[variant.state.argument] = past._replace(**cuts)
    if variant.takes_plane:
        sliced["plane_BH"] = arguments["plane_BH"][items, heads]
    return sliced
