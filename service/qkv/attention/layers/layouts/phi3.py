"""Layout phi3: one nn.Linear qkv_proj with the rows of all query heads, key heads, value heads.

Source: transformers, models/phi3/modeling_phi3.py, Phi3Attention. With out_proj in place of o_proj,
names and shapes fit codegen too.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from qkv.attention.layers.forward_parts import Embeddings, Inputs, linear_of
from qkv.attention.layers.layer_weights import Weights, fused, fused_tensors, linear_tensors, named
from qkv.attention.layers.sent_tensors import Heads, SentTensors

MODULES = ("qkv_proj", "o_proj")
OUTPUT = "o_proj"
QUERY = ("qkv_proj.weight",)
SPELLINGS = {"o_proj": ("out_proj",)}
ROTARY_ORDER = "half"
NEEDS_HEADS = True


def read(sent: SentTensors) -> Weights:
    """Reads the layout's tensors."""
    weight_OI = sent.matrix("qkv_proj.weight")
    H, G = sent.required_heads("query, key and value are in one matrix")
    D, rest = divmod(len(weight_OI), H + 2 * G)
    if rest:
        raise sent.error(
            "qkv_proj.weight",
            f"does not split into heads: got {len(weight_OI)} rows, expected a multiple of "
            f"{H + 2 * G} for {H} query heads and {G} key heads",
        )
    parts = [H * D, (H + G) * D]
    return named(
        **fused(np.split(weight_OI, parts), sent.vector("qkv_proj.bias", len(weight_OI)), parts),
        output=sent.optional_pair("o_proj"),
    )


def write(weights: Weights, heads: Heads) -> Weights:
    """Returns the layout's tensors."""
    return fused_tensors(weights, "qkv_proj") | linear_tensors(weights, output="o_proj")


def project(tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads) -> Inputs:
    """Returns query, key and value as transformers does."""
    fused_LO = linear_of(tensors, "qkv_proj", embeddings[0])
    H, G = heads.query or 1, heads.key or heads.query or 1
    D = fused_LO.shape[-1] // (H + 2 * G)
    query, key, value = fused_LO.split((H * D, G * D, G * D), dim=-1)
    return query, key, value
