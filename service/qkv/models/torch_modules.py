"""Intercepts the calls of `nn.MultiheadAttention`, also in the fast path of `TransformerEncoder`.

torch computes most of them in one operator, or reads their weights. Then the module runs again on
the path that calls `scaled_dot_product_attention`, which shows queries, keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from types import FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qkv.models.model_call import CallOutput, ModelCall
from qkv.models.proof import are_near
from qkv.models.random_numbers import random_state, repeating
from qkv.models.running_modules import (
    dispatch,
    has_only_recorders,
    innermost_module,
    is_intercepted,
    paused,
    report_miss,
    without_mode,
)

_OWN_CODE: Final = "it computes attention in code of its own, not that of nn.MultiheadAttention"
_TRUTH: Final = "torch's fast path takes the numbers of its mask for truth values"
_FUNCTION: Final[Any] = F.multi_head_attention_forward
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
        calls, children = running.interception.calls, running.children
        with without_mode():
            output = forward(*arguments)
        if running.interception.calls > calls:
            return output
        if running.children > children:
            report_miss("it computes attention in code of its own, where torch has a fast path")
        else:
            with torch.no_grad():
                _repeat_attention(layer, *_pad(src, src_key_padding_mask), src_mask)
        return output

    return encode


def _repeat_attention(
    layer: nn.TransformerEncoderLayer, x: Tensor, padding: Tensor | None, mask: Tensor | None
) -> None:
    """Runs the attention of a layer that torch has computed in one operator with all the rest.

    The operator computes attention as that of `nn.MultiheadAttention` does.
    """
    masks = []
    for each in (padding, mask):
        if each is not None and each.dtype != torch.bool:
            is_truth = (each == 0) | (each == -torch.inf)
            if not isinstance(each, FakeTensor) and not bool(is_truth.all()):
                report_miss(_TRUTH)
                return
            each = each != 0
        masks.append(each)
    if layer.norm_first:
        with paused():
            x = layer.norm1(x)
    layer.self_attn(x, x, x, key_padding_mask=masks[0], attn_mask=masks[1], need_weights=False)


def _may_be_fast(module: nn.Module) -> bool:
    """True if nothing obvious keeps a module from torch's fast path, which calls no function."""
    needs_gradients = any(parameter.requires_grad for parameter in module.parameters())
    return not module.training and not (torch.is_grad_enabled() and needs_gradients)


def _pad(src: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns a nested tensor as a padded one, with the mask of its padding (true: padding)."""
    if not src.is_nested:
        return src, padding
    x_BLM = src.to_padded_tensor(0.0)
    lengths_B1 = torch.tensor([[len(x)] for x in src.unbind()], device=x_BLM.device)
    return x_BLM, torch.arange(x_BLM.shape[1], device=x_BLM.device) >= lengths_B1


class _Arguments(NamedTuple):
    """The arguments of `nn.MultiheadAttention.forward`."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def is_bool(self) -> bool:
        """True if no mask has numbers."""
        masks = self.key_padding_mask, self.attn_mask
        return all(mask is None or mask.dtype == torch.bool for mask in masks)

    @property
    def is_contradictory(self) -> bool:
        """True if a run without weights hides other keys on torch's fast path than elsewhere.

        There torch reads the mask, elsewhere the hint of causality. Masks of numbers are not there.
        """
        mask = self.attn_mask
        if mask is None or not self.without_weights().is_causal or mask.dtype != torch.bool:
            return False
        return not bool((mask == torch.ones_like(mask).triu(1)).all())

    def without_weights(self) -> _Arguments:
        """Returns those of a run without weights.

        Torch reads no hint of causality where it computes weights, and rejects one without a mask.
        """
        is_causal = self.is_causal and not self.need_weights and self.attn_mask is not None
        return self._replace(need_weights=False, is_causal=is_causal)


def _wrap_multihead(module: nn.MultiheadAttention, forward: _Forward) -> _Forward:
    is_replaced = getattr(forward, "__func__", None) is not nn.MultiheadAttention.forward

    def attend(*args: Any, **kwargs: Any) -> Any:
        if not is_intercepted():
            return forward(*args, **kwargs)
        try:
            given = _Arguments(*args, **kwargs)
        except TypeError:  # a `forward` of other arguments, or torch's error
            return forward(*args, **kwargs)
        if any(x.is_nested for x in given.inputs):
            report_miss("its tensors are nested: pad them")
            with paused(), without_mode():
                return forward(*args, **kwargs)
        heads = _Heads(module, given)
        is_fast = given.query is given.key is given.value and _may_be_fast(module)
        if has_only_recorders() and (given.need_weights or is_replaced or is_fast):
            drops = module.training and module.dropout
            state = random_state(given.query.device) if drops else None
            with paused(), without_mode():
                result = forward(*args, **kwargs)
            heads.record(forward, result, state)
            return result
        with paused(), _HeadsMode(functools.partial(heads.dispatch, given.need_weights)):
            output, _ = forward(*given.without_weights())
        if not heads.calls:
            report_miss(_OWN_CODE)
            return forward(*args, **kwargs) if given.need_weights else (output, None)
        weights = heads.outputs[0].weights
        if weights is not None and given.average_attn_weights:
            weights = weights.mean(1)
        return output, weights[0] if weights is not None and given.query.ndim == 2 else weights

    return attend


def _is_self(query: Tensor, key: Tensor, value: Tensor) -> bool | None:
    """True if queries and keys are one tensor; None if that tells nothing.

    A model that adds positions to queries and keys may add them twice to one sequence. Then the
    values, which have no positions, are another tensor.
    """
    if key is query:
        return True
    return False if value is key else None


class _HeadsMode(TorchFunctionMode):
    """Replaces what `multi_head_attention_forward` calls to compute the outputs of heads.

    Args:
        attend: takes the argument `attn_mask` of `multi_head_attention_forward`, and all of
            `scaled_dot_product_attention`.
    """

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls a function of torch."""
        kwargs = kwargs or {}
        if func is _FUNCTION:
            # modes do not see what it calls, so that a copy of it calls the replacement
            names = vars(F) | {
                "scaled_dot_product_attention": functools.partial(
                    self._attend, kwargs["attn_mask"]
                ),
                "has_torch_function": lambda _: False,
            }
            func = FunctionType(_FUNCTION.__code__, names, argdefs=_FUNCTION.__defaults__)
        return func(*args, **kwargs)


class _Heads:
    """The calls of a module's heads.

    Args:
        module: the module.
        given: its arguments.
    """

    def __init__(self, module: nn.MultiheadAttention, given: _Arguments) -> None:
        self.calls: list[ModelCall] = []
        self.outputs: list[CallOutput] = []
        self._module, self._given = module, given

    def record(self, forward: _Forward, result: Any, state: Tensor | None) -> None:
        """Runs the module once more, to record its heads.

        Args:
            forward: of the module.
            result: what the module returned.
            state: of the random numbers before, which are drawn again; None: none are.
        """
        query, again = self._given.query, None
        # a lack of memory, or a `forward` of other arguments: the model itself must go on
        numbers = nullcontext() if state is None else repeating(query.device, state)
        with suppress(Exception), paused(), torch.no_grad(), numbers, _HeadsMode(self._keep):
            again = forward(*self._given.without_weights())
        if not self.calls:
            report_miss(_OWN_CODE)
        for call, (output, *_) in zip(self.calls, self.outputs, strict=True):
            proof = functools.partial(self._is_repeated, call, result, again)
            run = functools.partial(CallOutput, output, is_returned=proof)
            dispatch(call, run, self._module)

    def _is_repeated(self, call: ModelCall, result: Any, again: Any) -> bool:
        """Tells if the second run, whose heads were recorded, returned what the first one did."""
        if self._given.is_contradictory:
            return False  # in narrow dtypes rounding may hide it
        outputs = (x[0] if isinstance(x, tuple) else x for x in (result, again))
        return bool(call.dropout) or are_near(*outputs)  # other weights may be dropped

    def dispatch(self, has_weights: bool, mask: Tensor | None, *arguments: Any) -> Tensor:
        """Sends a call through all interceptions, and returns the output.

        Args:
            has_weights: the model reads the weights.
            mask: the argument `attn_mask` of `multi_head_attention_forward`.
            *arguments: of `scaled_dot_product_attention`.
        """
        call = self._read(mask, *arguments)
        attend = (
            functools.partial(_weigh, call)
            if has_weights
            else (lambda: CallOutput(F.scaled_dot_product_attention(*arguments)))
        )
        self.calls.append(call)
        self.outputs.append(dispatch(call, attend, self._module))
        return self.outputs[-1].output

    def _keep(self, mask: Tensor | None, *arguments: Any) -> Tensor:
        call, output = self._read(mask, *arguments), F.scaled_dot_product_attention(*arguments)
        self.calls.append(call)
        self.outputs.append(CallOutput(output))
        return output

    def _read(
        self,
        attn_mask: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        is_causal: bool,
    ) -> ModelCall:
        """Returns a call. torch repeats masks for all heads, and makes truth values numbers."""
        if mask is not None and (attn_mask is None or attn_mask.ndim == 2):
            mask = mask[:, :1]
        if mask is not None and self._given.is_bool:
            mask = mask == 0
        is_self = _is_self(*self._given.inputs)
        return ModelCall("", query, key, value, mask, is_causal, dropout=dropout, is_self=is_self)


def _weigh(call: ModelCall) -> CallOutput:
    """Computes the output of a module's heads, and the weights."""
    scores = call.query @ call.key.mT * call.query.shape[-1] ** -0.5
    if call.mask is not None and call.mask.dtype == torch.bool:
        scores = scores.masked_fill(~call.mask, -torch.inf)
    elif call.mask is not None:
        scores = scores + call.mask
    weights = scores.softmax(-1)
    return CallOutput(F.dropout(weights, call.dropout) @ call.value, weights)
