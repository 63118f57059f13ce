"""Layout vit: one nn.Linear qkv (3 H D, in) for query, key and value, in this order.

Source: timm, layers/attention.py, Attention.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qkv.attention.layers.forward_parts import Embeddings, Inputs, linear_of
from qkv.attention.layers.layer_weights import Weights, fused, fused_tensors, linear_tensors, named
from qkv.attention.layers.sent_tensors import Heads, SentTensors

MODULES = ("qkv", "proj")
OUTPUT = "proj"
QUERY = ("qkv.weight",)
IS_GROUPED = False


def recognizes(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns True if the fused matrix is (3 out, in)."""
    return shapes["qkv.weight"][0] % 3 == 0


def read(sent: SentTensors) -> Weights:
    """Reads the layout's tensors.

    Raises:
        InvalidContent: there is a part of timm's Attention that changes the result.
    """
    for name, what in (("gate.weight", "a gate"), ("norm.weight", "a norm")):
        if name in sent:
            raise sent.error(name, f"is not supported: it is {what} before the output projection")
    weights_OI = sent.thirds("qkv.weight")
    return named(
        **fused(weights_OI, sent.vector("qkv.bias", sum(map(len, weights_OI)))),
        output=sent.optional_pair("proj"),
    )


def write(weights: Weights, heads: Heads) -> Weights:
    """Returns the layout's tensors."""
    return fused_tensors(weights, "qkv") | linear_tensors(weights, output="proj")


def project(tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads) -> Inputs:
    """Returns query, key and value as timm does: the output of `qkv` has the axes (3, H, D)."""
    fused_LO = linear_of(tensors, "qkv", embeddings[0])
    query, key, value = fused_LO.unflatten(-1, (3, -1)).unbind(-2)
    return query, key, value
