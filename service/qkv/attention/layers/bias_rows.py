"""Biases as one more row of a weight, exactly, for embeddings with a column of ones."""

from __future__ import annotations

import numpy as np

from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_weights import ROLES, Array, Weights
from qkv.errors import InvalidContent, pointer_to


def fold(_layer: Layer, weights: Weights) -> dict[str, Array]:
    """Appends each bias to its weight as a last row; a row of zeros where there is none."""
    folded = {n: a for n, a in weights.items() if n.removesuffix(".bias") not in ROLES}
    for role in ROLES:
        weight, bias = weights[f"{role}.weight"], weights.get(f"{role}.bias")
        row = np.zeros_like(weight[:1]) if bias is None else bias
        folded[f"{role}.weight"] = np.vstack([weight, row])
    return folded


def separate(layer: Layer, weights: Weights) -> dict[str, Array]:
    """Inverts `fold`: the last row of each weight becomes a bias.

    Raises:
        InvalidContent: a weight has one row only.
    """
    separated = dict(weights)
    for role in ROLES:
        weight = weights[f"{role}.weight"]
        if len(weight) < 2:
            name = layer.name_of(f"{role}.weight")
            raise InvalidContent(
                f"{name} has no row for a bias: got shape {list(weight.shape)}, expected at "
                "least 2 rows",
                pointer=f"/tensors{pointer_to(name)}",
            )
        separated[f"{role}.weight"], separated[f"{role}.bias"] = weight[:-1], weight[-1]
    return separated
