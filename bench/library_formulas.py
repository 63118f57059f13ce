"""The mathematics of the variants as in libraries: one einsum per product, as in the papers' code.

The formulas are those of fast-transformers (linear), of the repositories of Efficient Attention and
of MAResU-Net (taylor), and of linformer-pytorch. Only the denominator has a guard. `mean` and
`softmax` are functions of torch, in plain_torch.py. `sigmoid` has none: einsums of the whole matrix
would need 26 GB at 16,384 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import elu, normalize

_EPS = 1e-6  # the libraries add it to a denominator


def _linear(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k = elu(query) + 1, elu(key) + 1
    state = torch.einsum("bhsd,bhse->bhde", k, value)
    inverse_sum = 1 / (torch.einsum("bhld,bhd->bhl", q, k.sum(2)) + _EPS)
    return torch.einsum("bhld,bhde,bhl->bhle", q, state, inverse_sum)


def _taylor(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k = normalize(query, dim=-1), normalize(key, dim=-1)
    inverse_sum = 1 / (k.shape[2] + torch.einsum("bhld,bhd->bhl", q, k.sum(2) + _EPS))
    state = torch.einsum("bhsd,bhse->bhde", k, value)
    total = value.sum(2, keepdim=True) + torch.einsum("bhld,bhde->bhle", q, state)
    return torch.einsum("bhle,bhl->bhle", total, inverse_sum)


def _efficient(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    state = torch.einsum("bhsd,bhse->bhde", key.softmax(2), value)
    return torch.einsum("bhld,bhde->bhle", query.softmax(-1), state)


def _linformer(
    query: Tensor, key: Tensor, value: Tensor, key_projection: Tensor, value_projection: Tensor
) -> Tensor:
    k = torch.einsum("bhsd,rs->bhrd", key, key_projection)
    v = torch.einsum("bhse,rs->bhre", value, value_projection)
    weights = (torch.einsum("bhld,bhrd->bhlr", query, k) * query.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bhlr,bhre->bhle", weights, v)


LIBRARY_FORMULAS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "efficient": _efficient,
    "linear": _linear,
    "linformer": _linformer,
    "taylor": _taylor,
}
