"""Parts of the layouts' forward passes, which run on both sides of a conversion to check it.

A layout's `forward` computes a block from the layout's own tensors, in the way of the layout's
source. It shares no code with the service's runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor
from torch.nn.functional import linear

Embeddings = tuple[Tensor, Tensor, Tensor]
"""The embeddings (L, M) of query, key and value."""


class Attend(Protocol):
    """Attention between the projections."""

    def __call__(
        self,
        query_LX: Tensor,
        key_LX: Tensor,
        value_LX: Tensor,
        *,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Returns the output with heads side by side, from inputs with heads side by side."""


def project_inputs(
    embeddings: Embeddings, tensors: Mapping[str, Tensor], names: Sequence[str]
) -> list[Tensor]:
    """Returns query, key and value (L, X) of three modules of nn.Linear with these names."""
    return [
        linear(x_LM, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
        for x_LM, name in zip(embeddings, names, strict=True)
    ]


def project_output(attended_LX: Tensor, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Applies the output projection, an nn.Linear of this name, if there is one."""
    weight_MX = tensors.get(f"{name}.weight")
    if weight_MX is None:
        return attended_LX
    return linear(attended_LX, weight_MX, tensors.get(f"{name}.bias"))
