"""Layout v2: W_query, W_key, W_value as in nn.Linear: weight (out, in), and optionally a bias.

Source: S. Raschka, Build a Large Language Model (From Scratch), listing 3.2; torch.nn.Linear.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qkv.attention.layers.forward_parts import Attend, Embeddings, project_inputs, project_output
from qkv.attention.layers.layer_weights import ROLES, Weights, named
from qkv.attention.layers.sent_tensors import Heads, SentTensors

MODULES = ("W_query", "W_key", "W_value", "W_output")
QUERY = ("W_query.weight",)
SPELLINGS = {
    "W_key": ("W_keys",),
    "W_value": ("W_values",),
    "W_output": ("out_proj", "W_out", "W_o"),
}


def read(sent: SentTensors) -> Weights:
    """Reads the layout's tensors."""
    return named(
        query=sent.pair("W_query"),
        key=sent.pair("W_key"),
        value=sent.pair("W_value"),
        output=sent.optional_pair("W_output"),
    )


def write(weights: Weights, heads: Heads) -> Weights:
    """Returns the layout's tensors."""
    return {f"W_{name}": array.T for name, array in weights.items()}


def forward(
    tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads, attend: Attend
) -> Tensor:
    """Runs the layer as in listing 3.2."""
    attended = attend(*project_inputs(embeddings, tensors, [f"W_{role}" for role in ROLES]))
    return project_output(attended, tensors, "W_output")
