"""Layout meta: wq, wk, wv and wo, each an nn.Linear; grouped key heads.

Source: github.com/meta-llama/llama, model.py, Attention. Its rotary embedding turns neighbouring
channels, so that rows of wq and wk are in another order than in the layout llama.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qkv.attention.layers.forward_parts import Embeddings, Inputs, project_by
from qkv.attention.layers.sent_tensors import Heads

MODULES = ("wq", "wk", "wv", "wo")
OUTPUT = "wo"
QUERY = ("wq.weight",)
ROTARY_ORDER = "interleaved"


def project(tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads) -> Inputs:
    """Returns query, key and value as its source does."""
    return project_by(tensors, embeddings, "wq", "wk", "wv")
