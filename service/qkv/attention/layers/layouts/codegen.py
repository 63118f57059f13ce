"""Layout codegen: one nn.Linear qkv_proj with query, value and key of each quarter together.

Source: transformers, models/codegen/modeling_codegen.py, CodeGenAttention: (4, 3, E / 4) rows, in
the order query, value, key. A quarter has whole heads. Names and shapes fit phi3 too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from torch import Tensor

from qkv.attention.layers.forward_parts import Embeddings, Inputs, linear_of
from qkv.attention.layers.layer_weights import (
    BIASES,
    Array,
    Weights,
    bias_of,
    concatenated,
    linear_tensors,
    named,
)
from qkv.attention.layers.sent_tensors import Heads, SentTensors
from qkv.errors import InvalidContent

MODULES = ("qkv_proj", "out_proj")
OUTPUT = "out_proj"
QUERY = ("qkv_proj.weight",)
IS_GROUPED = False
ROTARY_ORDER = "interleaved"
_QUARTERS: Final = 4
_ORDER: Final = ("query", "value", "key")


def recognizes(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns True if there is its output projection, and four quarters of three parts."""
    return "out_proj.weight" in shapes and shapes["qkv_proj.weight"][0] % (3 * _QUARTERS) == 0


def read(sent: SentTensors) -> Weights:
    """Reads the layout's tensors."""
    weight_OI = sent.matrix("qkv_proj.weight")
    if len(weight_OI) % (3 * _QUARTERS):
        raise sent.error(
            "qkv_proj.weight",
            f"has the wrong shape: got {list(weight_OI.shape)}, expected (12 out / 4, in)",
        )
    bias_O = sent.vector("qkv_proj.bias", len(weight_OI))
    query, value, key = _split(weight_OI)
    biases = [None] * 3 if bias_O is None else _split(bias_O)
    return named(
        query=(query.T, biases[0]),
        key=(key.T, biases[2]),
        value=(value.T, biases[1]),
        output=sent.optional_pair("out_proj"),
    )


def write(weights: Weights, heads: Heads) -> Weights:
    """Returns the layout's tensors.

    Raises:
        InvalidContent: the heads differ in width, or do not split into quarters.
    """
    concatenated(weights)  # raises if the inputs have different widths
    parts = [weights[f"{role}.weight"].T for role in _ORDER]
    rows = [len(part) for part in parts]
    if len(set(rows)) > 1 or rows[0] % _QUARTERS or (heads.query or _QUARTERS) % _QUARTERS:
        raise InvalidContent(
            f"the heads have no place in codegen: got {heads.query} heads, with {rows[0]} channels "
            f"of the query and {rows[1]} of the value, expected equal channels and a multiple of "
            f"{_QUARTERS} heads"
        )
    tensors = {"qkv_proj.weight": _join(parts)}
    if not BIASES.isdisjoint(weights):
        tensors["qkv_proj.bias"] = _join([bias_of(weights, role) for role in _ORDER])
    return tensors | linear_tensors(weights, output="out_proj")


def project(tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads) -> Inputs:
    """Returns query, key and value as transformers does: the output has the axes (4, 3 E / 4)."""
    fused_LO = linear_of(tensors, "qkv_proj", embeddings[0])
    quarters = fused_LO.unflatten(-1, (_QUARTERS, -1)).chunk(3, dim=-1)
    query, value, key = (quarter.flatten(-2) for quarter in quarters)
    return query, key, value


def _split(rows: Array) -> list[Array]:
    """Returns the rows of query, value and key."""
    parts = np.split(rows.reshape(_QUARTERS, 3, -1, *rows.shape[1:]), 3, axis=1)
    return [part.reshape(-1, *rows.shape[1:]) for part in parts]


def _join(parts: list[Array]) -> Array:
    """Inverts `_split`."""
    quarters = [part.reshape(_QUARTERS, 1, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(quarters, axis=1).reshape(-1, *parts[0].shape[1:])
