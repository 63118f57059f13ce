"""Layout nanogpt: one nn.Linear c_attn (3 out, in) for query, key and value, in this order.

Source: github.com/karpathy/nanoGPT, model.py, CausalSelfAttention.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qkv.attention.layers.forward_parts import Embeddings, Inputs, linear_of
from qkv.attention.layers.layer_weights import Weights, fused, fused_tensors, linear_tensors, named
from qkv.attention.layers.sent_tensors import Heads, SentTensors

MODULES = ("c_attn", "c_proj")
OUTPUT = "c_proj"
QUERY = ("c_attn.weight",)
IS_GROUPED = False


def recognizes(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns True if the fused matrix is (3 out, in)."""
    rows, columns = shapes["c_attn.weight"]
    output = shapes.get("c_proj.weight", (columns, rows // 3))
    return rows % 3 == 0 and columns != 3 * rows and output[-1] == rows // 3


def read(sent: SentTensors) -> Weights:
    """Reads the layout's tensors."""
    weights_OI = sent.thirds("c_attn.weight")
    return named(
        **fused(weights_OI, sent.vector("c_attn.bias", sum(map(len, weights_OI)))),
        output=sent.optional_pair("c_proj"),
    )


def write(weights: Weights, heads: Heads) -> Weights:
    """Returns the layout's tensors."""
    return fused_tensors(weights, "c_attn") | linear_tensors(weights, output="c_proj")


def project(tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads) -> Inputs:
    """Returns query, key and value as nanoGPT does."""
    query, key, value = linear_of(tensors, "c_attn", embeddings[0]).chunk(3, dim=-1)
    return query, key, value
