"""Layout v2: W_query, W_key, W_value as in nn.Linear: weight (out, in), and optionally a bias.

Source: S. Raschka, Build a Large Language Model (From Scratch), listing 3.2; torch.nn.Linear.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qkv.attention.layers.forward_parts import Embeddings, Inputs, project_by
from qkv.attention.layers.layer_weights import Weights
from qkv.attention.layers.sent_tensors import Heads

MODULES = ("W_query", "W_key", "W_value", "W_output")
OUTPUT = "W_output"
QUERY = ("W_query.weight",)
SPELLINGS = {
    "W_key": ("W_keys",),
    "W_value": ("W_values",),
    "W_output": ("out_proj", "W_out", "W_o"),
}


def write(weights: Weights, heads: Heads) -> Weights:
    """Returns the layout's tensors."""
    return {f"W_{name}": array.T for name, array in weights.items()}


def project(tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads) -> Inputs:
    """Returns query, key and value as the listing does."""
    return project_by(tensors, embeddings, "W_query", "W_key", "W_value")
