"""Right functions of the variants beside softmax, in plain torch: by matrix, by sums, and others.

Each takes what `qkv.testing.verify` passes. It computes in float32, or in float64 for float64
inputs, and rounds its output; the form "in its dtype" computes in the dtype of the inputs. Autograd
has the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from qkv.attention.catalogue import find
from qkv.models.variants import VariantFunction
from support.flash_kernel import Attention

Form = Callable[..., Tensor]


def of_the_service(variant: str) -> Attention:
    """Returns the service's own `attend` as a function that autograd differentiates."""
    inputs = find(variant).inputs
    required = [spec.name for spec in inputs.values() if not spec.is_optional]

    def attend(*tensors: Tensor, **keywords: Any) -> Tensor:
        named = dict(zip(required, tensors, strict=True))
        named |= {n: x for n, x in keywords.items() if n in inputs}
        parameters = {n: x for n, x in keywords.items() if n not in inputs}
        return VariantFunction(variant, parameters)(named)

    return attend


def _rounded(form: Form) -> Attention:
    """Returns the form computed in float32 or float64, with its output in the inputs' dtype."""

    def attend(*tensors: Tensor, **keywords: Any) -> Tensor:
        exact = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        wide = {
            n: x.to(exact) if isinstance(x, Tensor) and x.is_floating_point() else x
            for n, x in keywords.items()
        }
        return form(*(x.to(exact) for x in tensors), **wide).to(tensors[0].dtype)

    return attend


def _visible(L: int, S: int, keywords: Mapping[str, Any]) -> Tensor:
    """Returns the pairs that attend, bool (B, 1, L, S) or (1, 1, L, S)."""
    lengths, key = keywords.get("key_lengths"), torch.arange(S)
    valid = torch.full((1, 1, 1, 1), S) if lengths is None else lengths.view(-1, 1, 1, 1)
    visible = key < valid.expand(-1, 1, L, 1)
    if keywords.get("causal"):
        offset = valid - L if keywords.get("query_offset") == "end" else 0
        visible = visible & (key <= torch.arange(L).view(L, 1) + offset)
    if (mask := keywords.get("mask")) is not None:
        visible = visible & mask
    return visible


def _last_seen(visible: Tensor) -> Tensor:
    """Returns the position of the last key that each row sees, (B or 1, 1, L, 1)."""
    return visible.sum(-1, keepdim=True) - 1


def _per_head(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _average(products: Tensor, value: Tensor, normalize: bool = True) -> Tensor:
    """Returns rows of products, divided by their sums, times the values."""
    if normalize:
        products = products / products.sum(-1, keepdim=True)
    return products @ value


def _average_by_sums(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, normalize: bool = True
) -> Tensor:
    """Returns the same from features, with sums over the keys that queries share."""
    key = key * visible.any(-2)[..., None]
    if bool((visible == visible[..., :1, :]).all()):
        output, total = query @ (key.mT @ value), query @ key.sum(-2)[..., None]
    else:
        last = _last_seen(visible).expand(len(query), query.shape[1], -1, 1)
        sums = (key[..., None] * value[..., None, :]).cumsum(2)
        state = sums.gather(2, last[..., None].expand(-1, -1, -1, *sums.shape[3:]))
        total = key.cumsum(2).gather(2, last.expand(-1, -1, -1, key.shape[-1]))
        output = torch.einsum("bhld,bhlde->bhle", query, state)
        total = (query * total).sum(-1, keepdim=True)
    return output / total if normalize else output


def _phi(x: Tensor) -> Tensor:
    return torch.nn.functional.elu(x) + 1


def _linear(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    key, value = _per_head(key, query), _per_head(value, query)
    visible = _visible(query.shape[2], key.shape[2], keywords)
    products = (_phi(query) @ _phi(key).mT).masked_fill(~visible, 0.0)
    return _average(products, value, keywords.get("normalize", True))


def _linear_by_sums(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    key, value = _per_head(key, query), _per_head(value, query)
    visible = _visible(query.shape[2], key.shape[2], keywords)
    normalize = keywords.get("normalize", True)
    return _average_by_sums(_phi(query), _phi(key), value, visible, normalize)


def _linear_by_exp(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    """Computes phi without elu, and one head at a time."""

    def phi(x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())

    group, visible = (
        query.shape[1] // key.shape[1],
        _visible(query.shape[2], key.shape[2], keywords),
    )
    heads = []
    for h in range(query.shape[1]):
        k, v = key[:, h // group], value[:, h // group]
        products = torch.einsum("bld,bsd->bls", phi(query[:, h]), phi(k)) * visible[:, 0]
        output = torch.einsum("bls,bse->ble", products, v)
        if keywords.get("normalize", True):
            output = output / products.sum(-1, keepdim=True)
        heads.append(output)
    return torch.stack(heads, 1)


def _efficient(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    """Computes the softmax of the keys for each query by itself: (B, H, L, S, D)."""
    key, value = _per_head(key, query), _per_head(value, query)
    visible = _visible(query.shape[2], key.shape[2], keywords)
    seen = key[:, :, None].masked_fill(~visible[..., None], -torch.inf).softmax(-2)
    return (seen @ query.softmax(-1)[..., None])[..., 0] @ value


def _efficient_by_sums(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    key, value = _per_head(key, query), _per_head(value, query)
    visible = _visible(query.shape[2], key.shape[2], keywords)
    key = key.masked_fill(~visible.any(-2)[..., None], -torch.inf)
    query = query.softmax(-1)
    if bool((visible == visible[..., :1, :]).all()):
        return query @ (key.softmax(-2).mT @ value)
    key = (key - key.detach().amax(-2, keepdim=True)).exp()
    last = _last_seen(visible).expand(len(query), query.shape[1], -1, 1)
    total = key.cumsum(2).gather(2, last.expand(-1, -1, -1, key.shape[-1]))
    return _average_by_sums(query / total, key, value, visible, normalize=False)


def _efficient_by_matrix(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    key, value = _per_head(key, query), _per_head(value, query)
    visible = _visible(query.shape[2], key.shape[2], keywords)
    if keywords.get("causal"):
        return _efficient(query, key, value, **keywords)
    key = key.masked_fill(~visible.any(-2)[..., None], -torch.inf)
    return (query.softmax(-1) @ key.softmax(-2).mT) @ value


def _direction(x: Tensor) -> Tensor:
    direction: Tensor = x / x.norm(dim=-1, keepdim=True)
    return direction


def _taylor(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    key, value = _per_head(key, query), _per_head(value, query)
    visible = _visible(query.shape[2], key.shape[2], keywords)
    products = 1 + _direction(query) @ _direction(key).mT
    return _average(products.masked_fill(~visible, 0.0), value)


def _taylor_by_sums(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    key, value = _per_head(key, query), _per_head(value, query)
    visible = _visible(query.shape[2], key.shape[2], keywords)
    query, key = (torch.cat([torch.ones_like(x[..., :1]), _direction(x)], -1) for x in (query, key))
    return _average_by_sums(query, key, value, visible)


def _taylor_by_distance(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    """Computes 1 + q' . k' as half of |q' + k'|^2."""
    key, value = _per_head(key, query), _per_head(value, query)
    visible = _visible(query.shape[2], key.shape[2], keywords)
    apart = _direction(query)[:, :, :, None] + _direction(key)[:, :, None]
    return _average((apart.square().sum(-1) / 2).masked_fill(~visible, 0.0), value)


def _mean(value: Tensor, **keywords: Any) -> Tensor:
    S = value.shape[2]
    visible = _visible(S, S, {"causal": True, **keywords}).to(value.dtype)
    return _average(visible, value, keywords.get("normalize", True))


def _mean_by_sums(value: Tensor, **keywords: Any) -> Tensor:
    S = value.shape[2]
    visible = _visible(S, S, {"causal": True, **keywords})
    value = value * visible.any(-2)[..., None]
    causal = keywords.get("causal", True)
    sums = value.cumsum(2) if causal else value.sum(2, keepdim=True).expand_as(value)
    counts = visible.sum(-1, keepdim=True)
    return sums / counts if keywords.get("normalize", True) else sums


def _mean_row_by_row(value: Tensor, **keywords: Any) -> Tensor:
    S, normalize = value.shape[2], keywords.get("normalize", True)
    visible = _visible(S, S, {"causal": True, **keywords}).to(value.dtype)
    rows = [
        torch.einsum("bhs,bhse->bhe", row, value) / (row.sum(-1)[..., None] if normalize else 1.0)
        for row in visible.expand(*value.shape[:2], S, S).unbind(2)
    ]
    return torch.stack(rows, 2)


def _sigmoid_scores(query: Tensor, key: Tensor, keywords: Mapping[str, Any]) -> Tensor:
    """Returns the scores with the bias -log S, or of the key lengths; -inf where hidden."""
    L, S = query.shape[2], key.shape[2]
    scale, lengths = keywords.get("scale"), keywords.get("key_lengths")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores: Tensor = query @ _per_head(key, query).mT * scale
    counts = torch.tensor([S]) if lengths is None else lengths.clamp(min=1)
    scores -= counts.to(scores.dtype).log().view(-1, 1, 1, 1)
    return scores.masked_fill(~_visible(L, S, keywords), -torch.inf)


def _sigmoid(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    return _sigmoid_scores(query, key, keywords).sigmoid() @ _per_head(value, query)


def _sigmoid_by_exp(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    scores = _sigmoid_scores(query, key, keywords)
    fallen = (-scores.abs()).exp()  # e^-s would overflow
    weights = torch.where(scores > 0, torch.ones_like(fallen), fallen) / (1 + fallen)
    return torch.einsum("bhls,bhse->bhle", weights, _per_head(value, query))


def _sigmoid_in_halves(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    """Adds the sums over both halves of the keys."""
    scores, value = _sigmoid_scores(query, key, keywords), _per_head(value, query)
    half = key.shape[2] // 2
    first = scores[..., :half].sigmoid() @ value[:, :, :half]
    return first + scores[..., half:].sigmoid() @ value[:, :, half:]


def _linformer_map(
    query: Tensor, key: Tensor, projection: Tensor, keywords: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns the map (B, H, L, R), and the keys that are not padding, (B or 1, 1, S, 1)."""
    S, scale = key.shape[2], keywords.get("scale")
    valid = _visible(1, S, {"key_lengths": keywords.get("key_lengths")}).mT
    mixed = projection[:, :S] @ _per_head(key * valid, query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return (query @ mixed.mT * scale).softmax(-1), valid


def _linformer(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    map_BHLR, valid = _linformer_map(query, key, keywords["key_projection"], keywords)
    mixed = keywords["value_projection"][:, : key.shape[2]] @ (value * valid)
    return map_BHLR @ _per_head(mixed, query)


def _linformer_by_weights(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    map_BHLR, valid = _linformer_map(query, key, keywords["key_projection"], keywords)
    weights: Tensor = map_BHLR @ keywords["value_projection"][:, : key.shape[2]]
    return weights @ _per_head(value * valid, query)


def _linformer_of_scores(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    """Computes the scores before the mixture: (Q K^T) E^T."""
    S, scale = key.shape[2], query.shape[-1] ** -0.5
    valid = _visible(1, S, {"key_lengths": keywords.get("key_lengths")}).mT
    scores = query @ _per_head(key * valid, query).mT
    scores = scores @ keywords["key_projection"][:, :S].mT * keywords.get("scale", scale)
    weights: Tensor = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    mixed = torch.einsum("rs,bgse->bgre", keywords["value_projection"][:, :S], value * valid)
    return weights @ _per_head(mixed, query)


RIGHT_VARIANTS: Final[Mapping[str, Mapping[str, Attention]]] = {
    "linear": {
        "matrix": _rounded(_linear), "sums": _rounded(_linear_by_sums),
        "one head at a time": _rounded(_linear_by_exp), "in its dtype": _linear,
    },
    "efficient": {
        "matrix": _rounded(_efficient_by_matrix), "sums": _rounded(_efficient_by_sums),
        "softmax of each query": _rounded(_efficient), "in its dtype": _efficient_by_matrix,
    },
    "taylor": {
        "matrix": _rounded(_taylor), "sums": _rounded(_taylor_by_sums),
        "distances": _rounded(_taylor_by_distance), "in its dtype": _taylor,
    },
    "mean": {
        "matrix": _rounded(_mean), "sums": _rounded(_mean_by_sums),
        "row by row": _rounded(_mean_row_by_row), "in its dtype": _mean,
    },
    "sigmoid": {
        "matrix": _rounded(_sigmoid), "exp": _rounded(_sigmoid_by_exp),
        "halves": _rounded(_sigmoid_in_halves), "in its dtype": _sigmoid,
    },
    "linformer": {
        "mixtures": _rounded(_linformer), "weights": _rounded(_linformer_by_weights),
        "scores before mixtures": _rounded(_linformer_of_scores), "in its dtype": _linformer,
    },
    "linear_layer": {
        "matrix": _rounded(lambda x, weight: x @ weight.mT),
        "einsum": _rounded(lambda x, weight: torch.einsum("bi,oi->bo", x, weight)),
        "terms": _rounded(lambda x, weight: (x[:, None] * weight).sum(-1)),
        "in its dtype": torch.nn.functional.linear,
    },
}  # fmt: skip
"""By variant, the functions by the name of their form."""
