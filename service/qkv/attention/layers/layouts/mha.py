"""Layout mha: torch.nn.MultiheadAttention, with one matrix for all roles or one for each.

Source: torch.nn.MultiheadAttention: in_proj_weight (3 E, E) has query, key and value, in this
order. Where `kdim` or `vdim` differ from E, there are q_proj_weight (E, E), k_proj_weight
(E, kdim) and v_proj_weight (E, vdim). The bias is in_proj_bias (3 E) in both cases.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor
from torch.nn.functional import linear

from qkv.attention.layers.forward_parts import Embeddings, Inputs
from qkv.attention.layers.layer_weights import (
    ROLES,
    Weights,
    bias_of,
    concatenated,
    fused,
    linear_tensors,
    named,
)
from qkv.attention.layers.sent_tensors import Heads, SentTensors
from qkv.errors import InvalidContent

MODULES = (
    "in_proj_weight",
    "in_proj_bias",
    "q_proj_weight",
    "k_proj_weight",
    "v_proj_weight",
    "out_proj",
)
OUTPUT = "out_proj"
QUERY = ("in_proj_weight", "q_proj_weight")
IS_GROUPED = False
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def read(sent: SentTensors) -> Weights:
    """Reads the layout's tensors."""
    for name in ("bias_k", "bias_v"):
        if name in sent:
            raise sent.error(
                name,
                "is not supported: it is one more key and value, which no layout of qkv holds",
            )
    if "in_proj_weight" in sent or not any(name in sent for name in _SEPARATE):
        weights_OI = sent.thirds("in_proj_weight")
        if weights_OI[0].shape[0] != weights_OI[0].shape[1]:
            rows, width = (3 * len(weights_OI[0]), weights_OI[0].shape[1])
            raise sent.error(
                "in_proj_weight",
                f"has the wrong shape: got {[rows, width]}, expected (3 E, E)",
            )
    else:
        weights_OI = [sent.matrix(name) for name in _SEPARATE]
        E = weights_OI[0].shape[0]
        if all(weight.shape == (E, E) for weight in weights_OI):
            raise sent.error(
                "q_proj_weight",
                "is for keys or values of another width: with equal widths, send in_proj_weight",
            )
        for name, weight in zip(_SEPARATE, weights_OI, strict=True):
            if len(weight) != E:
                raise sent.error(name, f"has the wrong size: got {len(weight)} rows, expected {E}")
    bias = sent.vector("in_proj_bias", sum(map(len, weights_OI)))
    return named(
        **fused(weights_OI, bias),
        output=sent.optional_pair("out_proj"),
    )


def write(weights: Weights, heads: Heads) -> Weights:
    """Returns the layout's tensors.

    Raises:
        InvalidContent: the query is not as wide as its embedding.
    """
    M, E = weights["query.weight"].shape
    if M != E:
        raise InvalidContent(
            f"the query projection has no place in mha: got {M} inputs and {E} outputs, expected "
            "as many outputs as inputs"
        )
    outputs = [weights[f"{role}.weight"].shape[1] for role in ROLES]
    if len(set(outputs)) > 1:
        raise InvalidContent(
            f"key and value have no place in mha: got {outputs[1]} and {outputs[2]} outputs, "
            f"expected {E} as the query has"
        )
    if all(weights[f"{role}.weight"].shape == (E, E) for role in ROLES):
        weight_IO, bias = concatenated(weights)
        tensors = {"in_proj_weight": weight_IO.T}
    else:
        tensors = {n: weights[f"{r}.weight"].T for n, r in zip(_SEPARATE, ROLES, strict=True)}
        has_bias = any(f"{role}.bias" in weights for role in ROLES)
        bias = np.concatenate([bias_of(weights, role) for role in ROLES]) if has_bias else None
    if bias is not None:
        tensors["in_proj_bias"] = bias
    return tensors | linear_tensors(weights, output="out_proj")


def project(tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads) -> Inputs:
    """Returns query, key and value as torch.nn.functional.multi_head_attention_forward does."""
    bias = tensors.get("in_proj_bias")
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    if "in_proj_weight" in tensors:
        weights = tensors["in_proj_weight"].chunk(3)
    else:
        weights = tuple(tensors[name] for name in _SEPARATE)
    query, key, value = map(linear, embeddings, weights, biases)
    return query, key, value
