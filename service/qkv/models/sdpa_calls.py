"""Intercepts calls of torch's `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qkv.models.model_call import CallOutput, ModelCall
from qkv.models.running_modules import dispatch, is_intercepted, report_miss


class _AttentionMode(TorchFunctionMode):
    """Sees torch's functions that the modules of a model call."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls a function of torch; sends attention through the interceptions."""
        kwargs = kwargs or {}
        # a compiled graph contains no calls of Python; the interceptor reports its module
        if torch.compiler.is_dynamo_compiling() or not is_intercepted():
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _intercept(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            report_miss("it calls multi_head_attention_forward itself, not nn.MultiheadAttention")
            return func(*args, **kwargs)
        # an operator of higher order, which flex_attention calls
        if getattr(func, "__name__", "") == "flex_attention":
            report_miss("it calls flex_attention itself")
            return func(*args, **kwargs)
        return func(*args, **kwargs)


MODE: Final = _AttentionMode()
"""The mode; it has no state, so that threads may share it."""


def _intercept(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Sends a call of `scaled_dot_product_attention` through the interceptions."""

    def compute() -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    if any(x.is_nested for x in (query, key, value)):
        report_miss("its tensors are nested: pad them")
        return compute()
    original: list[tuple[Tensor, CallOutput]] = []

    def run() -> CallOutput:
        output = compute()
        original.append((output, CallOutput(_as_four_axes(output))))
        return original[-1][1]

    query_BHLD, key_BGSD, value_BGSE, mask, shape = _to_four_axes(query, key, value, attn_mask)
    call = ModelCall(
        "", query_BHLD, key_BGSD, value_BGSE, mask, is_causal, scale=scale, dropout=dropout_p
    )
    result = dispatch(call, run)
    is_own = original and result is original[-1][1]
    return original[-1][0] if is_own else result.output.reshape(shape)


def _to_four_axes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[int, ...]]:
    """Returns the tensors with four axes, and the shape of the output; torch broadcasts all axes.

    The mask broadcasts to (B, H, L, S).
    """
    rank = max(x.ndim for x in (query, key, value))
    if rank < 4:
        query, key, value = (_as_four_axes(_with_rank(x, rank)) for x in (query, key, value))
        B = max(len(x) for x in (query, key, value))
        query, key, value = (x.expand(B, -1, -1, -1) for x in (query, key, value))
        if mask is not None:
            mask = mask[:, None] if rank == mask.ndim == 3 else _with_rank(mask, 4)
        shape = (*(B,) * (rank - 2), query.shape[-2], value.shape[-1])
        return query, key, value, mask, shape
    query, key, value = (_with_rank(x, rank) for x in (query, key, value))
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    G = max(key.shape[-3], value.shape[-3])
    H = max(G, query.shape[-3])
    query_BHLD, key_BGSD, value_BGSE = (
        _as_four_axes(x.expand(*batch, n, -1, -1)) for x, n in ((query, H), (key, G), (value, G))
    )
    if mask is not None:
        mask = _with_rank(mask, rank)
        if rank > 4:  # all axes before the heads become one
            mask = _as_four_axes(mask.expand(*batch, -1, -1, -1))
    return query_BHLD, key_BGSD, value_BGSE, mask, (*batch, H, query.shape[-2], value.shape[-1])


def _with_rank(x: Tensor, rank: int) -> Tensor:
    """Returns a tensor with axes of length 1 in front, until it has so many axes."""
    return x[(None,) * max(0, rank - x.ndim)]


def _as_four_axes(x: Tensor) -> Tensor:
    """Returns a view with four axes: three are (B, L, D), and further ones are merged into B."""
    if x.ndim == 4:
        return x
    if x.ndim > 4:
        return torch.flatten(x, 0, x.ndim - 4)
    return x[:, None] if x.ndim == 3 else x[None, None]
