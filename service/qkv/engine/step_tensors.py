"""The steps of a job, item by item: so an item has the same bits alone and in a batch.

The forward pass calls `compute_steps`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from qkv.attention.variant import Variant
from qkv.engine.item_arguments import place_planes, slice_arguments
from qkv.jobs.float64 import to_float64


def compute_steps(
    variant: Variant,
    names: Collection[str],
    arguments: Mapping[str, Any],
    sizes: Mapping[str, int],
) -> dict[str, Tensor]:
    """Returns steps by the names of their outputs, in float64.

    Args:
        variant: computes the steps.
        names: of the steps to return.
        arguments: keyword arguments of the variant's `attend`, without `outputs` and a state.
        sizes: of every letter of one request. B is read from the tensors, which several requests
            may share.
    """
    complete = variant.random_inputs(arguments)
    first = complete[next(iter(variant.inputs.values())).argument]  # its first axis is B
    sizes = {**sizes, "B": len(first)}
    wide = {n: to_float64(x) if isinstance(x, Tensor) else x for n, x in complete.items()}
    placed = place_planes(variant, wide, sizes, first.device)
    heads = slice(0, sizes.get("H", 1))
    items = [
        variant.compute_steps(**slice_arguments(variant, placed, sizes, (slice(b, b + 1), heads)))
        for b in range(sizes["B"])
    ]
    return {name: torch.cat([item[name] for item in items]).double() for name in names}
