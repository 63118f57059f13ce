"""Layout bert: self.query, self.key, self.value and output.dense, each an nn.Linear.

Source: transformers, models/bert/modeling_bert.py, BertAttention. Its ViT spells `self` as
`attention`. Its ALBERT has query, key, value and dense. Without the output projection, the names
may begin with query, key and value.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qkv.attention.layers.forward_parts import Embeddings, Inputs, project_by
from qkv.attention.layers.sent_tensors import Heads

MODULES = ("self.query", "self.key", "self.value", "output.dense")
OUTPUT = "output.dense"
QUERY = ("self.query.weight", "attention.query.weight", "query.weight")
SPELLINGS = {
    **{f"self.{role}": (f"attention.{role}", role) for role in ("query", "key", "value")},
    "output.dense": ("dense",),
}
BEHIND = {"output.dense": "output.LayerNorm", "dense": "LayerNorm"}


def project(tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads) -> Inputs:
    """Returns query, key and value as transformers does."""
    return project_by(tensors, embeddings, "self.query", "self.key", "self.value")
