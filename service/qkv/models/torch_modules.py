"""Intercepts the calls of `nn.MultiheadAttention`, also in the fast path of `TransformerEncoder`.

The fast paths compute everything in one operator, so queries, keys and values are projected again,
by the module's own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.models.model_call import CallOutput, ModelCall
from qkv.models.running_modules import (
    dispatch,
    has_only_recorders,
    innermost_module,
    is_intercepted,
    paused,
    report_miss,
    without_mode,
)

__all__ = ["wrap"]

_Forward = Callable[..., Any]


def wrap(module: nn.Module, forward: _Forward) -> _Forward:
    """Returns `forward` with interception if the module is one of torch's, else as it is."""
    kind = type(module).forward
    if kind is nn.MultiheadAttention.forward:
        assert isinstance(module, nn.MultiheadAttention)
        return _wrap_multihead(module, forward)
    if kind is nn.TransformerEncoderLayer.forward:
        assert isinstance(module, nn.TransformerEncoderLayer)
        return _wrap_encoder_layer(module, forward)
    return _wrap_encoder(forward) if kind is nn.TransformerEncoder.forward else forward


def _wrap_encoder(forward: _Forward) -> _Forward:
    def encode(*args: Any, **kwargs: Any) -> Any:
        if not has_only_recorders():
            return forward(*args, **kwargs)
        with without_mode():
            return forward(*args, **kwargs)

    return encode


def _wrap_encoder_layer(layer: nn.TransformerEncoderLayer, forward: _Forward) -> _Forward:
    def encode(
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        arguments = src, src_mask, src_key_padding_mask, is_causal
        if not is_intercepted() or not has_only_recorders() or not _may_be_fast(layer):
            return forward(*arguments)  # the layer calls its `self_attn`
        running = innermost_module()
        calls, children = running.calls, running.children
        with without_mode():
            output = forward(*arguments)
        if running.calls == calls and running.children > children:
            report_miss("it computes attention in code of its own, where torch has a fast path")
        elif running.calls == calls:
            with torch.no_grad(), without_mode():
                x, padding = _pad(src, src_key_padding_mask)
                x = layer.norm1(x) if layer.norm_first else x
                call = _build_call(layer.self_attn, x, x, x, padding, src_mask, is_self=True)
                dispatch(call, lambda: CallOutput(_attend(call)), layer.self_attn)
        return output

    return encode


def _may_be_fast(layer: nn.TransformerEncoderLayer) -> bool:
    """True if nothing obvious keeps a layer from torch's fast path, which calls no module."""
    needs_gradients = any(parameter.requires_grad for parameter in layer.parameters())
    return not layer.training and not (torch.is_grad_enabled() and needs_gradients)


def _pad(src: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns a nested tensor as a padded one, with the mask of its padding (true: padding)."""
    if not src.is_nested:
        return src, padding
    x_BLM = src.to_padded_tensor(0.0)
    lengths_B1 = torch.tensor([[len(x)] for x in src.unbind()], device=x_BLM.device)
    return x_BLM, torch.arange(x_BLM.shape[1], device=x_BLM.device) >= lengths_B1


def _wrap_multihead(module: nn.MultiheadAttention, forward: _Forward) -> _Forward:
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        def compute() -> Any:
            return forward(
                query, key, value, key_padding_mask, need_weights, attn_mask,
                average_attn_weights, is_causal,
            )  # fmt: skip

        if not is_intercepted():
            return compute()
        if any(x.is_nested for x in (query, key, value)):
            report_miss("its tensors are nested: pad them")
            with paused(), without_mode():
                return compute()
        is_self = _is_self(query, key, value)
        if has_only_recorders():
            repeat = _repeat_random_numbers(query) if module.training and module.dropout else None
            with paused(), without_mode():
                result = compute()
                with torch.no_grad():
                    batch = _to_batch_first(module, query, key, value)
                    call = _build_call(module, *batch, key_padding_mask, attn_mask, is_self=is_self)
            with torch.no_grad(), repeat or nullcontext():
                dispatch(call, lambda: _original(call, has_weights=False), module)
            return result
        batch = _to_batch_first(module, query, key, value)
        call = _build_call(module, *batch, key_padding_mask, attn_mask, is_self=is_self)
        result = dispatch(call, lambda: _original(call, has_weights=need_weights), module)
        return _project_output(module, query, result, average_attn_weights)

    return attend


def _is_self(query: Tensor, key: Tensor, value: Tensor) -> bool | None:
    """True if queries and keys are one tensor; None if that tells nothing.

    A model that adds positions to queries and keys may add them twice to one sequence. Then the
    values, which have no positions, are another tensor.
    """
    if key is query:
        return True
    return False if value is key else None


def _repeat_random_numbers(x: Tensor) -> AbstractContextManager[None]:
    """Returns a context that draws the random numbers from now again, and leaves no trace."""
    generator: Any = torch if x.device.type == "cpu" else torch.get_device_module(x.device)
    now = generator.get_rng_state()

    @contextmanager
    def repeat() -> Iterator[None]:
        later = generator.get_rng_state()
        generator.set_rng_state(now)
        try:
            yield
        finally:
            generator.set_rng_state(later)

    return repeat()


def _to_batch_first(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the inputs of a module as (B, L, M) and (B, S, M)."""
    if query.ndim == 2:
        return query[None], key[None], value[None]
    if module.batch_first:
        return query, key, value
    return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)


def _build_call(
    module: nn.MultiheadAttention,
    query_BLM: Tensor,
    key_BSM: Tensor,
    value_BSM: Tensor,
    padding: Tensor | None,
    attn_mask: Tensor | None,
    *,
    is_self: bool | None,
) -> ModelCall:
    """Projects the inputs of a module as the module does, and returns the call."""
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    inputs = (query_BLM, key_BSM, value_BSM)
    query, key, value = (
        F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)
    )
    if module.bias_k is not None and module.bias_v is not None:
        key = torch.cat([key, module.bias_k.expand(len(key), -1, -1)], 1)
        value = torch.cat([value, module.bias_v.expand(len(value), -1, -1)], 1)
    query, key, value = (
        x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in (query, key, value)
    )
    if module.add_zero_attn:
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    mask = _merge_masks(module, query, padding, attn_mask, key.shape[2])
    dropout = module.dropout if module.training else 0.0
    return ModelCall("", query, key, value, mask, dropout=dropout, is_self=is_self)


def _merge_masks(
    module: nn.MultiheadAttention,
    query_BHLD: Tensor,
    padding: Tensor | None,
    attn_mask: Tensor | None,
    S: int,
) -> Tensor | None:
    """Returns both masks as one of `ModelCall`; keys that the module adds are visible."""
    masks = []
    if attn_mask is not None:
        per_head = attn_mask.ndim == 3
        masks.append(
            attn_mask.unflatten(0, (-1, module.num_heads)) if per_head else attn_mask[None, None]
        )
    if padding is not None:
        masks.append((padding[None] if padding.ndim == 1 else padding)[:, None, None, :])
    if not masks:
        return None
    extended = [F.pad(m, (0, S - m.shape[-1])) for m in masks]
    if all(m.dtype == torch.bool for m in extended):
        return ~(extended[0] if len(extended) == 1 else extended[0] | extended[1])
    added = [_as_bias(m, query_BHLD.dtype) for m in extended]
    return added[0] if len(added) == 1 else added[0] + added[1]


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask of nn.MultiheadAttention, where true is hidden, as numbers to add."""
    if mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(mask, -torch.inf)


def _original(call: ModelCall, *, has_weights: bool) -> CallOutput:
    """Computes the output of a module's heads, and the weights if they are read."""
    if not has_weights:
        return CallOutput(_attend(call))
    scores = call.query @ call.key.mT * call.query.shape[-1] ** -0.5
    if call.mask is not None and call.mask.dtype == torch.bool:
        scores = scores.masked_fill(~call.mask, -torch.inf)
    elif call.mask is not None:
        scores = scores + call.mask
    weights = scores.softmax(-1)
    return CallOutput(F.dropout(weights, call.dropout) @ call.value, weights)


def _attend(call: ModelCall) -> Tensor:
    mask = call.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(call.query.dtype)
    return F.scaled_dot_product_attention(
        call.query, call.key, call.value, mask, dropout_p=call.dropout
    )


def _project_output(
    module: nn.MultiheadAttention, query: Tensor, result: CallOutput, average: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the output and the weights of a module, in the shape of its inputs."""
    merged_BLM = result.output.transpose(1, 2).flatten(2)
    output = F.linear(merged_BLM, module.out_proj.weight, module.out_proj.bias)
    weights = result.weights
    if weights is not None and average:
        weights = weights.mean(1)
    if query.ndim == 2:
        return output[0], None if weights is None else weights[0]
    return output if module.batch_first else output.transpose(0, 1), weights
