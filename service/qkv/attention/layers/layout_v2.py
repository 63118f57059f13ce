"""Layout v2: W_query, W_key, W_value as in nn.Linear: weight (out, in), and optionally a bias.

Source: S. Raschka, Build a Large Language Model (From Scratch), listing 3.2; torch.nn.Linear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from qkv.attention.layers.projections import Array, Projection, Projections, checked, take
from qkv.errors import InvalidContent

SUFFIXES: Final[tuple[str, ...]] = (".weight", ".bias")


def read(tensors: Mapping[str, Array], pointer: str = "/tensors") -> Projections:
    """Reads the layout's tensors.

    Raises:
        InvalidContent: a tensor is missing, unknown, or not a floating (out, in) or (out).
    """
    return Projections(*_read(tensors, pointer))


def write(projections: Projections) -> dict[str, Array]:
    """Returns the layout's tensors."""
    tensors = {}
    for p in projections:
        tensors[f"{p.name}.weight"] = np.ascontiguousarray(p.weight.T)
        if p.bias is not None:
            tensors[f"{p.name}.bias"] = np.ascontiguousarray(p.bias)
    return tensors


def forward(projections: Projections, x_LM: tuple[Tensor, Tensor, Tensor], heads: int) -> Tensor:
    """Runs the layer with torch's own functions: (L, heads * E). Only for checks.

    Args:
        projections: a result of `read`.
        x_LM: embeddings of query, key and value.
        heads: query heads; the key's width determines the number of key heads.
    """
    query, key, value = (
        linear(
            x, torch.from_numpy(p.weight.T), None if p.bias is None else torch.from_numpy(p.bias)
        )
        for x, p in zip(x_LM, projections, strict=True)
    )
    groups = key.shape[-1] * heads // query.shape[-1]
    q_HLD, k_GSD, v_GSE = (
        t.unflatten(-1, (n, -1)).transpose(0, 1)
        for t, n in ((query, heads), (key, groups), (value, groups))
    )
    output_HLE = scaled_dot_product_attention(
        q_HLD[None], k_GSD[None], v_GSE[None], enable_gqa=True
    )
    return output_HLE[0].transpose(0, 1).flatten(1)


def _read(tensors: Mapping[str, Array], pointer: str) -> Iterator[Projection]:
    for name, (weight, bias) in take(tensors, SUFFIXES, pointer):
        assert weight is not None
        checked(f"{name}.weight", weight, 2, pointer)
        if bias is not None:
            checked(f"{name}.bias", bias, 1, pointer)
            if bias.dtype != weight.dtype:
                raise InvalidContent(
                    f"{name}.bias has the wrong dtype: got {bias.dtype.name}, expected "
                    f"{weight.dtype.name} as {name}.weight has",
                    pointer=f"{pointer}/{name}.bias",
                )
            if len(bias) != len(weight):
                raise InvalidContent(
                    f"{name}.bias has the wrong size: got out={len(bias)}, expected "
                    f"out={len(weight)} as {name}.weight has",
                    pointer=f"{pointer}/{name}.bias",
                )
        yield Projection(name, weight.T, bias)
