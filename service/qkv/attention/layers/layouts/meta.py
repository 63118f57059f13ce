"""Layout meta: wq, wk, wv and wo, each an nn.Linear; grouped key heads.

Source: github.com/meta-llama/llama, model.py, Attention. Its rotary embedding turns neighbouring
channels, so that rows of wq and wk are in another order than in the layout llama.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qkv.attention.layers.forward_parts import Attend, Embeddings, project_inputs, project_output
from qkv.attention.layers.layer_weights import Weights, linear_tensors, named
from qkv.attention.layers.sent_tensors import Heads, SentTensors

MODULES = ("wq", "wk", "wv", "wo")
QUERY = ("wq.weight",)
ROTARY_ORDER = "interleaved"


def read(sent: SentTensors) -> Weights:
    """Reads the layout's tensors."""
    return named(
        query=sent.pair("wq"),
        key=sent.pair("wk"),
        value=sent.pair("wv"),
        output=sent.optional_pair("wo"),
    )


def write(weights: Weights, heads: Heads) -> Weights:
    """Returns the layout's tensors."""
    return linear_tensors(weights, query="wq", key="wk", value="wv", output="wo")


def forward(
    tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads, attend: Attend
) -> Tensor:
    """Runs the module as Meta's code does."""
    attended = attend(*project_inputs(embeddings, tensors, ("wq", "wk", "wv")))
    return project_output(attended, tensors, "wo")
