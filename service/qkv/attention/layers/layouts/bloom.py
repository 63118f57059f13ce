"""Layout bloom: one nn.Linear query_key_value with query, key and value of each head together.

Source: transformers, models/bloom/modeling_bloom.py, BloomAttention: (H, 3, D) rows. Its positions
are ALiBi biases.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qkv.attention.layers import head_interleaving
from qkv.attention.layers.forward_parts import Embeddings, Inputs, linear_of
from qkv.attention.layers.sent_tensors import Heads

MODULES = ("query_key_value", "dense")
OUTPUT = "dense"
QUERY = ("query_key_value.weight",)
IS_GROUPED = False
ALIBI = True
NEEDS_HEADS = True
PARENT = "self_attention"

read, write = head_interleaving.read, head_interleaving.write
recognizes = head_interleaving.is_full


def project(tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads) -> Inputs:
    """Returns query, key and value as transformers does: the output has the axes (H, 3, D)."""
    fused_LO = linear_of(tensors, "query_key_value", embeddings[0])
    query, key, value = fused_LO.unflatten(-1, (heads.query or 1, 3, -1)).unbind(-2)
    return query.flatten(-2), key.flatten(-2), value.flatten(-2)
