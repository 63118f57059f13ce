"""Layout llama: q_proj, k_proj, v_proj and o_proj, each an nn.Linear; grouped key heads.

Source: transformers, models/llama/modeling_llama.py, LlamaAttention. Mistral and Qwen2 (with
biases) have the same names; Qwen3 adds q_norm and k_norm, gpt-oss adds sinks. Names with out_proj
(CLIP, OPT, Whisper) or dense (Phi) in place of o_proj are accepted, and q_lin, k_lin, v_lin and
out_lin (DistilBERT).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qkv.attention.layers.forward_parts import Embeddings, Inputs, project_by
from qkv.attention.layers.layer_weights import ALL, Weights, linear_tensors, named
from qkv.attention.layers.sent_tensors import Heads, SentTensors

MODULES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_norm",
    "k_norm",
    "sinks",
)
OUTPUT = "o_proj"
EXTRAS = {"query_norm": "q_norm.weight", "key_norm": "k_norm.weight", "sinks": "sinks"}
QUERY = ("q_proj.weight", "q_lin.weight")
SPELLINGS = {
    "q_proj": ("q_lin",),
    "k_proj": ("k_lin",),
    "v_proj": ("v_lin",),
    "o_proj": ("out_proj", "dense", "out_lin"),
}
HOLDS = ALL
ROTARY_ORDER = "half"


def read(sent: SentTensors) -> Weights:
    """Reads the layout's tensors."""
    return named(
        query=sent.pair("q_proj"),
        key=sent.pair("k_proj"),
        value=sent.pair("v_proj"),
        output=sent.optional_pair("o_proj"),
        query_norm=(sent.vector("q_norm.weight"), None),
        key_norm=(sent.vector("k_norm.weight"), None),
        sinks=sent.vector("sinks"),
    )


def write(weights: Weights, heads: Heads) -> Weights:
    """Returns the layout's tensors."""
    return linear_tensors(
        weights, query="q_proj", key="k_proj", value="v_proj", output="o_proj"
    ) | {
        sent: weights[name]
        for name, sent in (
            ("query_norm.weight", "q_norm.weight"),
            ("key_norm.weight", "k_norm.weight"),
            ("sinks", "sinks"),
        )
        if name in weights
    }


def project(tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads) -> Inputs:
    """Returns query, key and value as transformers does."""
    return project_by(tensors, embeddings, "q_proj", "k_proj", "v_proj")
