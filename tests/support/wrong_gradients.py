"""Functions whose output is right and whose gradients are wrong, as mistakes make them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import elu

from support.flash_kernel import Attention


def _with_gradient_of(output: Tensor, other: Tensor) -> Tensor:
    """Returns the output, with the gradient of another tensor."""
    return output.detach() + (other - other.detach())


def _per_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    return query, key, value


def _average(products: Tensor, value: Tensor) -> Tensor:
    return products / products.sum(-1, keepdim=True) @ value


def _phi(x: Tensor) -> Tensor:
    return elu(x) + 1


def _linear_without_sum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Omits the gradient of the sum that divides each row."""
    query, key, value = _per_head(query, key, value)
    products = _phi(query) @ _phi(key).mT
    return products / products.detach().sum(-1, keepdim=True) @ value


def _linear_without_slope(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Omits the slope of phi."""
    query, key, value = _per_head(query, key, value)
    query, key = (_with_gradient_of(_phi(x), x) for x in (query, key))
    return _average(query @ key.mT, value)


def _linear_of_one_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Gives a key head the gradient of the first query head that reads it."""
    group = query.shape[1] // key.shape[1]
    query, key, value = _per_head(query, key, value)
    is_first = (torch.arange(query.shape[1]) % group == 0).view(1, -1, 1, 1)
    key, value = (torch.where(is_first, x, x.detach()) for x in (key, value))
    return _average(_phi(query) @ _phi(key).mT, value)


def _taylor_without_norm(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Omits the gradient of the norms."""
    query, key, value = _per_head(query, key, value)
    query, key = (x / x.detach().norm(dim=-1, keepdim=True) for x in (query, key))
    return _average(1 + query @ key.mT, value)


def _efficient_without_sum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Omits the gradient of the sum in the softmax of the keys."""
    query, key, value = _per_head(query, key, value)
    key = key.exp()
    return query.softmax(-1) @ (key / key.detach().sum(-2, keepdim=True)).mT @ value


def _sigmoid_without_slope(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Omits 1 - A in the slope of the sigmoid."""
    query, key, value = _per_head(query, key, value)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    weights = (scores - math.log(key.shape[2])).sigmoid()
    return _with_gradient_of(weights, weights.detach() * scores) @ value


def _linformer_without_scale(
    query: Tensor, key: Tensor, value: Tensor, *, key_projection: Tensor, value_projection: Tensor
) -> Tensor:
    """Omits the scale in the gradient of the scores."""
    query, key, value = _per_head(query, key, value)
    scores = query @ (key_projection @ key).mT
    scores = _with_gradient_of(scores * query.shape[-1] ** -0.5, scores)
    return scores.softmax(-1) @ (value_projection @ value)


def _mean_of_the_rest(value: Tensor) -> Tensor:
    """Divides the gradient of a row by the number of keys that it does not see, and one."""
    S = value.shape[2]
    seen = torch.ones(S, S, dtype=value.dtype).tril()
    counts = torch.arange(1, S + 1, dtype=value.dtype).view(S, 1)
    return _with_gradient_of(seen / counts @ value, seen / counts.flip(0) @ value)


def _layer_of_other_input(x: Tensor, weight: Tensor) -> Tensor:
    """Gives the weight the gradient of another item's input."""
    return _with_gradient_of(x @ weight.mT, x.roll(1, 0) @ weight.mT)


def _rounded(function: Attention) -> Attention:
    """Returns the function computed in float32 or float64, so that nothing else is wrong."""

    def attend(*tensors: Tensor, **keywords: Any) -> Tensor:
        exact = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        wide = {n: x.to(exact) for n, x in keywords.items()}
        return function(*(x.to(exact) for x in tensors), **wide).to(tensors[0].dtype)

    return attend


_FUNCTIONS: Final[Mapping[tuple[str, str], Attention]] = {
    ("linear", "sum"): _linear_without_sum,
    ("linear", "slope of phi"): _linear_without_slope,
    ("linear", "grouped heads"): _linear_of_one_head,
    ("taylor", "norm"): _taylor_without_norm,
    ("efficient", "sum"): _efficient_without_sum,
    ("sigmoid", "slope"): _sigmoid_without_slope,
    ("linformer", "scale"): _linformer_without_scale,
    ("mean", "counts"): _mean_of_the_rest,
    ("linear_layer", "items"): _layer_of_other_input,
}

WRONG_GRADIENTS: Final[Mapping[tuple[str, str], Attention]] = {
    key: _rounded(function) for key, function in _FUNCTIONS.items()
}
"""The functions by variant and by what their backward pass gets wrong."""
