"""Layout neox: one nn.Linear query_key_value with query, key and value of each head together.

Source: transformers, models/gpt_neox/modeling_gpt_neox.py, GPTNeoXAttention: (H, 3 D) rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn.functional import linear

from qkv.attention.layers.forward_parts import Attend, Embeddings, project_output
from qkv.attention.layers.head_interleaving import interleaved, interleaved_tensors
from qkv.attention.layers.layer_weights import Weights, linear_tensors, named
from qkv.attention.layers.sent_tensors import Heads, SentTensors

MODULES = ("query_key_value", "dense")
QUERY = ("query_key_value.weight",)
IS_GROUPED = False
ROTARY_ORDER = "half"
PARENT = "attention"


def recognizes(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns True if the fused matrix is (3 in, in)."""
    rows, columns = shapes["query_key_value.weight"]
    return rows == 3 * columns


def read(sent: SentTensors) -> Weights:
    """Reads the layout's tensors."""
    return named(**interleaved(sent, "query_key_value"), output=sent.optional_pair("dense"))


def write(weights: Weights, heads: Heads) -> Weights:
    """Returns the layout's tensors."""
    return interleaved_tensors(weights, heads, "query_key_value") | linear_tensors(
        weights, output="dense"
    )


def forward(
    tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads, attend: Attend
) -> Tensor:
    """Runs the module as transformers does: the output has the axes (H, 3 D)."""
    fused_LO = linear(
        embeddings[0], tensors["query_key_value.weight"], tensors.get("query_key_value.bias")
    )
    parts = fused_LO.unflatten(-1, (heads.query or 1, -1)).chunk(3, dim=-1)
    attended = attend(*(part.flatten(-2) for part in parts))
    return project_output(attended, tensors, "dense")
