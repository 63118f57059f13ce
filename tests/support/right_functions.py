"""Right attention functions of many forms, which the oracle must neither fail nor accuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from support.flash_kernel import Attention, flash_kernel


def right_functions() -> Iterator[tuple[str, Attention]]:
    """Yields functions by name: kernels of torch, products, blocks of keys, and other layouts."""
    kernels: dict[str, Attention] = {
        "math": _sdpa(SDPBackend.MATH), "flash": _sdpa(SDPBackend.FLASH_ATTENTION),
        "einsum": _einsum, "einsum narrow": _einsum_narrow, "scaled query": _scaled_query,
        "root of scale": _root_scaled, "base 2": _base_2, "log-sum-exp": _log_sum_exp,
        "narrow weights": _narrow_weights, "row by row": _row_by_row,
        "split keys": _split_keys, "matrix products in float64": _wide,
        "reversed keys": _reversed_keys, "one head at a time": _head_by_head,
    }  # fmt: skip
    kernels |= {f"blocks of {n}": flash_kernel(block=n) for n in (1, 2, 3, 5, 8, 16, 32, 64, 2000)}
    layouts: dict[str, Callable[[Attention], Attention]] = {
        "": lambda f: f, " transposed": _transposed, " repeated heads": _repeated,
        " one mask": _one_mask, " of copies": _copied,
    }  # fmt: skip
    for name, kernel in kernels.items():
        for layout, wrap in layouts.items():
            yield name + layout, wrap(kernel)


def _visible(q: Tensor, k: Tensor, keywords: dict[str, Any]) -> Tensor:
    """Returns the pairs that attend, bool or floating as the keyword `mask` is."""
    B, L, S = len(q), q.shape[2], k.shape[2]
    j = torch.arange(S)
    visible = torch.ones(B, 1, L, S, dtype=torch.bool)
    if keywords.get("causal"):
        offset = S - L if keywords.get("query_offset") == "end" else 0
        visible = visible & (j <= torch.arange(L).view(L, 1) + offset)
    if (lengths := keywords.get("key_lengths")) is not None:
        visible = visible & (j < lengths.view(-1, 1, 1, 1))
    if (mask := keywords.get("mask")) is not None:
        visible = visible & (mask if mask.dtype == torch.bool else mask == 0)
    return visible


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _sdpa(backend: SDPBackend) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
        k, v = _per_head(k, q), _per_head(v, q)
        visible = _visible(q, k, keywords)
        # the fused kernel takes no mask with gradients of it, and only dense inputs
        with sdpa_kernel([backend, SDPBackend.MATH]):
            return scaled_dot_product_attention(q, k, v, attn_mask=visible)

    return attend


def _scores(q: Tensor, k: Tensor, keywords: dict[str, Any]) -> Tensor:
    return _hide(q.shape[-1] ** -0.5 * (q @ k.mT), q, k, keywords)


def _hide(scores: Tensor, q: Tensor, k: Tensor, keywords: dict[str, Any]) -> Tensor:
    return scores.masked_fill(~_visible(q, k, keywords), -torch.inf)


def _exact(*tensors: Tensor) -> list[Tensor]:
    return [x if x.dtype == torch.float64 else x.float() for x in tensors]


def _einsum(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    q, k, v = _exact(query, _per_head(key, query), _per_head(value, query))
    scores = torch.einsum("bhld,bhsd->bhls", q, k) / q.shape[-1] ** 0.5
    weights = _hide(scores, q, k, keywords).softmax(-1)
    return torch.einsum("bhls,bhse->bhle", weights, v).to(query.dtype)


def _einsum_narrow(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    """Stores scores and weights in the dtype of the inputs; the products sum in float32."""
    k, v = _per_head(key, query), _per_head(value, query)
    scores = torch.einsum("bhld,bhsd->bhls", query, k) * query.shape[-1] ** -0.5
    return _hide(scores, query, k, keywords).softmax(-1) @ v


def _scaled_query(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    """Rounds the scaled queries to the dtype of the inputs."""
    scaled = query * query.shape[-1] ** -0.5
    q, k, v = _exact(scaled, _per_head(key, query), _per_head(value, query))
    return (_hide(q @ k.mT, q, k, keywords).softmax(-1) @ v).to(query.dtype)


def _root_scaled(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    q, k, v = _exact(query, _per_head(key, query), _per_head(value, query))
    root = q.shape[-1] ** -0.25
    return (_hide((q * root) @ (k * root).mT, q, k, keywords).softmax(-1) @ v).to(query.dtype)


def _base_2(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    q, k, v = _exact(query, _per_head(key, query), _per_head(value, query))
    scores = _hide(q @ k.mT * (q.shape[-1] ** -0.5 * 1.4426950408889634), q, k, keywords)
    weights = (scores - scores.amax(-1, keepdim=True)).exp2()
    return (weights @ v / weights.sum(-1, keepdim=True)).to(query.dtype)


def _log_sum_exp(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    q, k, v = _exact(query, _per_head(key, query), _per_head(value, query))
    scores = _scores(q, k, keywords)
    return ((scores - scores.logsumexp(-1, keepdim=True)).exp() @ v).to(query.dtype)


def _narrow_weights(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    """Rounds the weights to the dtype of the inputs, before they are divided by their sum."""
    q, k, v = _exact(query, _per_head(key, query), _per_head(value, query))
    scores = _scores(q, k, keywords)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    rounded = weights.to(query.dtype).to(v.dtype)
    return (rounded @ v / weights.sum(-1, keepdim=True)).to(query.dtype)


def _row_by_row(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    q, k, v = _exact(query, _per_head(key, query), _per_head(value, query))
    scores = _scores(q, k, keywords)
    rows = [scores[:, :, i : i + 1].softmax(-1) @ v for i in range(q.shape[2])]
    return torch.cat(rows, 2).to(query.dtype)


def _split_keys(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    """Merges the averages of both halves of the keys by their log-sum-exp."""
    q, k, v = _exact(query, _per_head(key, query), _per_head(value, query))
    scores, S = _scores(q, k, keywords), k.shape[2]
    total = scores.logsumexp(-1, keepdim=True)
    output = torch.zeros_like(scores[..., :1] * v[:, :, :1])
    for part in (slice(0, S // 2), slice(S // 2, S)):
        own = scores[..., part].logsumexp(-1, keepdim=True)
        own = own.masked_fill(own == -torch.inf, -1e30)
        output = output + (own - total).exp() * ((scores[..., part] - own).exp() @ v[:, :, part])
    return output.to(query.dtype)


def _wide(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    q, k, v = (x.double() for x in (query, _per_head(key, query), _per_head(value, query)))
    return (_scores(q, k, keywords).softmax(-1) @ v).to(query.dtype)


def _reversed_keys(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    q, k, v = _exact(query, _per_head(key, query), _per_head(value, query))
    return (_scores(q, k, keywords).flip(-1).softmax(-1) @ v.flip(2)).to(query.dtype)


def _head_by_head(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    group = query.shape[1] // key.shape[1]
    heads = [
        _einsum(query[:, h : h + 1], key[:, g : g + 1], value[:, g : g + 1], **keywords)
        for h in range(query.shape[1])
        for g in [h // group]
    ]
    return torch.cat(heads, 1)


def _transposed(function: Attention) -> Attention:
    """Returns the function on tensors whose heads are the third axis in memory."""

    def attend(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
        return function(*inputs, **keywords)

    return attend


def _repeated(function: Attention) -> Attention:
    def attend(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
        return function(query, _per_head(key, query), _per_head(value, query), **keywords)

    return attend


def _one_mask(function: Attention) -> Attention:
    """Returns the function with a mask for every restriction but `causal`."""

    def attend(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
        causal = {n: keywords.pop(n) for n in ("causal", "query_offset") if n in keywords}
        if keywords:
            keywords = {"mask": _visible(query, key, keywords)}
        return function(query, key, value, **keywords, **causal)

    return attend


def _copied(function: Attention) -> Attention:
    def attend(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
        return function(query.clone(), key.clone(), value.clone(), **keywords).clone()

    return attend
