"""Layout gpt2: one Conv1D c_attn (in, 3 out) for query, key and value, in this order.

Source: transformers, models/gpt2/modeling_gpt2.py, GPT2Attention, and pytorch_utils.py, Conv1D,
which keeps its weight as (in, out) and always has a bias.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor, addmm

from qkv.attention.layers.forward_parts import Embeddings, Inputs
from qkv.attention.layers.layer_weights import ROLES, Weights, bias_of, concatenated, fused, named
from qkv.attention.layers.sent_tensors import Heads, SentTensors

MODULES = ("c_attn", "c_proj")
QUERY = ("c_attn.weight",)
IS_GROUPED = False


def recognizes(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns True if the fused matrix is (in, 3 out), and not nanoGPT's (3 out, in)."""
    rows, columns = shapes["c_attn.weight"]
    output = shapes.get("c_proj.weight", (columns // 3, rows))
    return columns % 3 == 0 and rows != 3 * columns and output[0] == columns // 3


def read(sent: SentTensors) -> Weights:
    """Reads the layout's tensors."""
    weight_IO = sent.matrix("c_attn.weight")
    if weight_IO.shape[1] % 3:
        raise sent.error(
            "c_attn.weight",
            f"has the wrong shape: got {list(weight_IO.shape)}, expected (in, 3 out); nanoGPT "
            "keeps (3 out, in), which is the layout nanogpt",
        )
    bias = sent.vector("c_attn.bias", weight_IO.shape[1])
    output = None
    if "c_proj.weight" in sent:
        projection_IO = sent.matrix("c_proj.weight")
        output = (projection_IO, sent.vector("c_proj.bias", projection_IO.shape[1]))
    return named(**fused([w.T for w in np.split(weight_IO, 3, axis=1)], bias), output=output)


def write(weights: Weights, heads: Heads) -> Weights:
    """Returns the layout's tensors. Biases that are absent are zeros, which change no result."""
    weight_IO, _ = concatenated(weights)
    tensors = {
        "c_attn.weight": weight_IO,
        "c_attn.bias": np.concatenate([bias_of(weights, role) for role in ROLES]),
    }
    if "output.weight" in weights:
        tensors["c_proj.weight"] = weights["output.weight"]
        tensors["c_proj.bias"] = bias_of(weights, "output")
    return tensors


def project(tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads) -> Inputs:
    """Returns query, key and value as transformers does."""
    fused_LO = conv1d(embeddings[0], tensors, "c_attn")
    query, key, value = fused_LO.split(fused_LO.shape[-1] // 3, dim=-1)
    return query, key, value


def project_output(attended_LX: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Applies the output projection if there is one."""
    return conv1d(attended_LX, tensors, "c_proj") if "c_proj.weight" in tensors else attended_LX


def conv1d(x_LI: Tensor, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Returns the result of a Conv1D."""
    weight_IO = tensors[f"{name}.weight"]
    bias_O = tensors.get(f"{name}.bias", weight_IO.new_zeros(weight_IO.shape[1]))
    return addmm(bias_O, x_LI, weight_IO)
