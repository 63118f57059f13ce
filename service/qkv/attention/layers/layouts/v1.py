"""Layout v1: plain parameters W_query, W_key, W_value, each (in, out), applied as x @ W.

Source: S. Raschka, Build a Large Language Model (From Scratch), listing 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qkv.attention.layers.forward_parts import Attend, Embeddings
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


def forward(
    tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads, attend: Attend
) -> Tensor:
    """Runs the layer as in listing 3.1."""
    x_query, x_key, x_value = embeddings
    attended = attend(
        x_query @ tensors["W_query"], x_key @ tensors["W_key"], x_value @ tensors["W_value"]
    )
    return attended @ tensors["W_output"] if "W_output" in tensors else attended
