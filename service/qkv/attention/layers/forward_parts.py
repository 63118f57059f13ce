"""Parts of the layouts' forward passes, which run on both sides of a conversion to check it.

A layout's `project` computes query, key and value from the layout's own tensors, in the way of the
layout's source. It shares no code with the service's runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn.functional import linear

Embeddings = tuple[Tensor, Tensor, Tensor]
"""The embeddings (L, M) of query, key and value."""
Inputs = tuple[Tensor, Tensor, Tensor]
"""Query, key and value (L, X), with heads side by side."""

Attend = Callable[..., Tensor]
"""Attention between the projections: returns the output (L, X) of `Inputs`.

Its keywords query_norm, key_norm and sinks are tensors, or None.
"""


def linear_of(tensors: Mapping[str, Tensor], name: str, x_LM: Tensor) -> Tensor:
    """Returns the result of the nn.Linear of this name."""
    return linear(x_LM, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def project_by(
    tensors: Mapping[str, Tensor], embeddings: Embeddings, query: str, key: str, value: str
) -> Inputs:
    """Returns the results of three nn.Linear of these names."""
    query_LM, key_LM, value_LM = embeddings
    return (
        linear_of(tensors, query, query_LM),
        linear_of(tensors, key, key_LM),
        linear_of(tensors, value, value_LM),
    )
