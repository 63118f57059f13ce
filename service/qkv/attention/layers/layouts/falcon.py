"""Layout falcon: one nn.Linear query_key_value with the heads of each key head together.

Source: transformers, models/falcon/modeling_falcon.py, FalconAttention. Its three forms are one:
(G, H / G + 2, D) rows, with G = H (Falcon-RW), G = 1 (multi-query) or in between (new decoder).
GPT-BigCode has the same rows as c_attn: G = 1 (StarCoder), or G = H without `multi_query`, where
only the configuration tells it from nanoGPT.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qkv.attention.layers import head_interleaving
from qkv.attention.layers.forward_parts import Embeddings, Inputs, linear_of
from qkv.attention.layers.sent_tensors import Heads

MODULES = ("query_key_value", "dense")
OUTPUT = "dense"
QUERY = ("query_key_value.weight", "c_attn.weight")
SPELLINGS = {"query_key_value": ("c_attn",), "dense": ("c_proj",)}
ROTARY_ORDER = "half"
ALIBI = "scaled"
NEEDS_HEADS = True
PARENT = "self_attention"

read, write = head_interleaving.read, head_interleaving.write


def recognizes(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns True if it is Falcon's, or one of GPT-BigCode with one key head: (E + 2 D, E)."""
    if "query_key_value.weight" in shapes:
        return True
    rows, columns = shapes["c_attn.weight"]
    is_square = shapes.get("c_proj.weight") == (columns, columns)
    return is_square and columns < rows < 3 * columns and (rows - columns) % 2 == 0


def project(tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads) -> Inputs:
    """Returns query, key and value as transformers does: the output has the axes
    (G, H / G + 2, D)."""
    fused_LO = linear_of(tensors, "query_key_value", embeddings[0])
    H = heads.query or 1
    G = heads.key or H
    fused_LGCD = fused_LO.unflatten(-1, (G, H // G + 2, -1))
    query, key, value = fused_LGCD[..., :-2, :], fused_LGCD[..., -2, :], fused_LGCD[..., -1, :]
    return query.flatten(1), key.flatten(1), value.flatten(1)
