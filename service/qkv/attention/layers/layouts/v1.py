"""Layout v1: plain parameters W_query, W_key, W_value, each (in, out), applied as x @ W.

Source: S. Raschka, Build a Large Language Model (From Scratch), listing 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qkv.attention.layers.forward_parts import Embeddings, Inputs
from qkv.attention.layers.layer_weights import Weights, named
from qkv.attention.layers.sent_tensors import Heads, SentTensors

MODULES = ("W_query", "W_key", "W_value", "W_output")
QUERY = ("W_query",)
SPELLINGS = {
    "W_key": ("W_keys",),
    "W_value": ("W_values",),
    "W_output": ("out_proj", "W_out", "W_o"),
}
HOLDS = frozenset({"output.weight"})


def read(sent: SentTensors) -> Weights:
    """Reads the layout's tensors."""
    return named(
        query=(sent.matrix("W_query"), None),
        key=(sent.matrix("W_key"), None),
        value=(sent.matrix("W_value"), None),
        output=(sent.optional("W_output", 2), None),
    )


def write(weights: Weights, heads: Heads) -> Weights:
    """Returns the layout's tensors."""
    return {f"W_{name.removesuffix('.weight')}": array for name, array in weights.items()}


def project(tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads) -> Inputs:
    """Returns query, key and value as listing 3.1 does."""
    x_query, x_key, x_value = embeddings
    return x_query @ tensors["W_query"], x_key @ tensors["W_key"], x_value @ tensors["W_value"]


def project_output(attended_LX: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Applies the output projection if there is one."""
    return attended_LX @ tensors["W_output"] if "W_output" in tensors else attended_LX
