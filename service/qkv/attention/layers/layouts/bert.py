"""Layout bert: self.query, self.key, self.value and output.dense, each an nn.Linear.

Source: transformers, models/bert/modeling_bert.py, BertAttention. Its ViT spells `self` as
`attention`. Its ALBERT has query, key, value and dense. Without the output projection, the names
may begin with query, key and value.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qkv.attention.layers.forward_parts import Attend, Embeddings, project_inputs, project_output
from qkv.attention.layers.layer_weights import Weights, linear_tensors, named
from qkv.attention.layers.sent_tensors import Heads, SentTensors

MODULES = ("self.query", "self.key", "self.value", "output.dense")
QUERY = ("self.query.weight", "attention.query.weight", "query.weight")
SPELLINGS = {
    **{f"self.{role}": (f"attention.{role}", role) for role in ("query", "key", "value")},
    "output.dense": ("dense",),
}
BEHIND = {"output.dense": "output.LayerNorm", "dense": "LayerNorm"}


def read(sent: SentTensors) -> Weights:
    """Reads the layout's tensors."""
    return named(
        query=sent.pair("self.query"),
        key=sent.pair("self.key"),
        value=sent.pair("self.value"),
        output=sent.optional_pair("output.dense"),
    )


def write(weights: Weights, heads: Heads) -> Weights:
    """Returns the layout's tensors."""
    return linear_tensors(
        weights, query="self.query", key="self.key", value="self.value", output="output.dense"
    )


def forward(
    tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads, attend: Attend
) -> Tensor:
    """Runs the module as transformers does."""
    attended = attend(
        *project_inputs(embeddings, tensors, ("self.query", "self.key", "self.value"))
    )
    return project_output(attended, tensors, "output.dense")
