"""Layout bloom: one nn.Linear query_key_value with query, key and value of each head together.

Source: transformers, models/bloom/modeling_bloom.py, BloomAttention: (H, 3, D) rows. Its positions
are ALiBi biases.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn.functional import linear

from qkv.attention.layers import head_interleaving
from qkv.attention.layers.forward_parts import Attend, Embeddings, project_output
from qkv.attention.layers.sent_tensors import Heads

MODULES = ("query_key_value", "dense")
QUERY = ("query_key_value.weight",)
IS_GROUPED = False
ALIBI = True
NEEDS_HEADS = True
PARENT = "self_attention"

read, write = head_interleaving.read, head_interleaving.write
recognizes = head_interleaving.is_full


def forward(
    tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads, attend: Attend
) -> Tensor:
    """Runs the module as transformers does: the output has the axes (H, 3, D)."""
    fused_LO = linear(
        embeddings[0], tensors["query_key_value.weight"], tensors.get("query_key_value.bias")
    )
    parts = fused_LO.unflatten(-1, (heads.query or 1, 3, -1)).unbind(-2)
    attended = attend(*(part.flatten(-2) for part in parts))
    return project_output(attended, tensors, "dense")
