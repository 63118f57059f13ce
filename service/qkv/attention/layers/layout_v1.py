"""Layout v1: plain parameters W_query, W_key, W_value, each (in, out), applied as x @ W.

Source: S. Raschka, Build a Large Language Model (From Scratch), listing 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from qkv.attention.layers.projections import Array, Projection, Projections, checked, take
from qkv.errors import InvalidContent

SUFFIXES: Final[tuple[str, ...]] = ("",)


def read(tensors: Mapping[str, Array], pointer: str = "/tensors") -> Projections:
    """Reads the layout's tensors.

    Raises:
        InvalidContent: a tensor is missing, unknown, or not a floating (in, out).
    """
    return Projections(
        *(
            Projection(name, checked(name, weight, 2, pointer))
            for name, (weight,) in take(tensors, SUFFIXES, pointer)
            if weight is not None
        )
    )


def write(projections: Projections) -> dict[str, Array]:
    """Returns the layout's tensors.

    Raises:
        InvalidContent: a projection has a bias, which this layout cannot hold.
    """
    for p in projections:
        if p.bias is not None:
            raise InvalidContent(
                f"{p.name}.bias has no place in v1, whose layer is x @ {p.name}. "
                'Set "bias" to "augment" to store it as one more row of the weight, exactly, for x '
                "with a column of ones",
                pointer=f"/tensors/{p.name}.bias",
            )
    return {p.name: np.ascontiguousarray(p.weight) for p in projections}


def forward(projections: Projections, x_LM: tuple[Tensor, Tensor, Tensor], heads: int) -> Tensor:
    """Runs the layer as in listing 3.1, head by head: (L, heads * E). Only for checks.

    Args:
        projections: a result of `read`, without biases.
        x_LM: embeddings of query, key and value.
        heads: query heads; the key's width determines the number of key heads.
    """
    query, key, value = (
        x @ torch.from_numpy(p.weight) for x, p in zip(x_LM, projections, strict=True)
    )
    width = query.shape[-1] // heads
    groups = key.shape[-1] // width
    parts = []
    for h in range(heads):
        g = h * groups // heads
        q, k = query[:, h * width :][:, :width], key[:, g * width :][:, :width]
        v = value.unflatten(-1, (groups, -1))[:, g]
        parts.append(torch.softmax(q @ k.T / width**0.5, dim=-1) @ v)
    return torch.cat(parts, dim=-1)


def fold_biases(projections: Projections) -> Projections:
    """Appends each bias to its weight as a last row, exactly, for x with a column of ones."""
    return Projections(
        *(
            Projection(
                p.name,
                np.vstack([p.weight, np.zeros_like(p.weight[:1]) if p.bias is None else p.bias]),
            )
            for p in projections
        )
    )


def separate_biases(projections: Projections) -> Projections:
    """Inverts `fold_biases`: the last row of each weight becomes a bias."""
    for p in projections:
        if len(p.weight) < 2:
            raise InvalidContent(
                f"{p.name} has no row for a bias: got shape {list(p.weight.shape)}, expected at "
                "least 2 rows",
                pointer=f"/tensors/{p.name}",
            )
    return Projections(*(Projection(p.name, p.weight[:-1], p.weight[-1]) for p in projections))
