"""Intercepts the attention calls of the models of the library transformers.

They call the function that `AttentionInterface.get_interface` returns for the name in their
configuration. Another name there would change the masks (transformers issue 45811), and some models
compare it with "eager". So the name stays, and the function that is returned is wrapped while an
intercepted model runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from qkv.models.model_call import CallOutput, ModelCall
from qkv.models.running_modules import dispatch, is_intercepted, paused, report_miss

_KNOWN: Final = frozenset({
    "dropout", "encoder_hidden_states", "hidden_states", "inputs_embeds", "input_features",
    "input_values", "output_attentions", "pixel_values", "pixel_values_videos", "position_bias",
    "position_ids", "s_aux", "scaling", "sinks", "sliding_window", "softcap",
})  # fmt: skip
"""Keywords of attention functions that are read, or known to change no weight."""
_attached: dict[str, Any] = {"count": 0}


def attach() -> None:
    """Wraps what `get_interface` returns, for models that are intercepted; counts its calls.

    Its caller holds a lock, as that of `detach` does.
    """
    _attached["count"] += 1
    # a model of transformers exists only if the library is imported
    library = sys.modules.get("transformers.modeling_utils")
    interface = getattr(library, "AttentionInterface", None)
    if "interface" in _attached or interface is None:
        return
    original = interface.get_interface

    @functools.wraps(original)
    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = original(self, *args, **kwargs)
        if not is_intercepted():
            return function
        name = args[0] if args else kwargs["attn_implementation"]
        return functools.partial(_intercept, function, name or "eager")

    interface.get_interface = get_interface
    _attached["interface"], _attached["original"] = interface, original


def detach() -> None:
    """Undoes `attach`, when it has been called as often."""
    _attached["count"] -= 1
    if not _attached["count"] and "interface" in _attached:
        _attached.pop("interface").get_interface = _attached.pop("original")


def _intercept(
    function: Callable[..., Any],
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Sends a call of an attention function of transformers through the interceptions.

    Returns:
        What the function returns: the output (B, L, H, E), and the weights (B, H, L, S) or None.
    """

    def compute() -> Any:
        return function(module, query, key, value, attention_mask, *args, **kwargs)

    if reason := _why_unreadable(implementation, query, attention_mask, kwargs):
        report_miss(reason)
        with paused():  # a call inside it is not the whole
            return compute()
    B = max(len(query), len(key))  # learned queries may be one item for the whole batch
    options = _mask_options(implementation, module, query, key, attention_mask, kwargs)
    if options is None:
        report_miss(f"its attention implementation {implementation!r} is unknown")
        return compute()
    original: list[tuple[Any, CallOutput]] = []

    def run() -> CallOutput:
        result = compute()
        original.append((result, CallOutput(result[0].transpose(1, 2), result[1])))
        return original[-1][1]

    call = ModelCall(
        "",
        query.expand(B, -1, -1, -1),
        key.expand(B, -1, -1, -1),
        value.expand(B, -1, -1, -1),
        scale=kwargs.get("scaling"),
        softcap=kwargs.get("softcap"),
        sinks=None if implementation == "sdpa" else _sinks_of(kwargs),  # sdpa ignores them
        dropout=kwargs.get("dropout", 0.0),
        is_self=_is_self(module),
        **options,
    )
    result = dispatch(call, run, module)
    if original and result is original[-1][1]:
        return original[-1][0]
    return result.output.transpose(1, 2).contiguous(), result.weights


def _why_unreadable(implementation: str, query: Tensor, mask: Any, kwargs: dict[str, Any]) -> str:
    """Returns the reason why a call cannot be recorded; "" if it can."""
    if any(kwargs.get(name) is not None for name in ("cache", "block_table")):
        return "its keys are in a paged cache"
    if "flash" in implementation and mask is None and _is_packed(query, kwargs):
        return "its sequences are packed"
    for name, x in kwargs.items():
        if isinstance(x, Tensor) and x.is_floating_point() and name not in _KNOWN:
            return f"its argument {name} is unknown"
    if kwargs.get("sinks") is not None and implementation != "eager":
        return "its argument sinks is unknown"
    sinks = _sinks_of(kwargs)
    if sinks is not None and len(sinks) != query.shape[1]:
        return "its sinks differ by query"
    return ""


def _is_packed(query: Tensor, kwargs: dict[str, Any]) -> bool:
    """True if flash attention splits the one item of a batch into sequences."""
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if kwargs.get(name) is not None and len(kwargs[name]) > 2:
            return True
    positions = kwargs.get("position_ids")
    if positions is None or len(query) > 1 or positions.shape[-1] == 1:
        return False
    return int((positions == positions.min()).sum()) > 1  # each sequence starts at the lowest


def _sinks_of(kwargs: dict[str, Any]) -> Tensor | None:
    """Returns the logits of the sinks (H), or more if they differ by item or query."""
    sinks: Tensor | None = kwargs.get("s_aux")
    sinks = kwargs.get("sinks") if sinks is None else sinks
    return None if sinks is None else sinks.flatten()


def _is_self(module: nn.Module) -> bool | None:
    """Returns False for a module of cross-attention, None for others: they do not tell."""
    is_cross = getattr(module, "is_cross_attention", False) is True
    return False if is_cross or "CrossAttention" in type(module).__name__ else None


def _mask_options(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> dict[str, Any] | None:
    """Returns the mask, `causal` and the window of a call; None if they are unknown."""
    L, S = query.shape[2], key.shape[2]
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    bias: Tensor | None = kwargs.get("position_bias")
    if isinstance(mask, Tensor) and mask.ndim == 4:
        mask = mask[..., :S]  # of a static cache
    if implementation == "eager":  # causal masks are in the mask
        return {"mask": _with_bias(mask, bias)}
    if implementation == "sdpa":
        causal = L > 1 and mask is None and is_causal
        return {"mask": _with_bias(mask, bias), "causal": causal}
    if "flash" in implementation and bias is None:
        width = kwargs.get("sliding_window")
        right = None if is_causal or width is None else width - 1
        return {
            "mask": None if mask is None else mask[:, None, None, :].bool(),
            "causal": L > 1 and is_causal,
            "query_offset": S - L,  # flash attention aligns the last query with the last key
            # flash attention gets no window that is as wide as the keys
            "window": None if width is None or width >= S else (width - 1, right),
        }
    if implementation == "flex_attention":
        return {"mask": _with_bias(_flex_mask(mask, query, key), bias)}
    if isinstance(mask, Tensor) and mask.ndim == 4:
        return {"mask": _with_bias(mask, bias)}
    return None


def _flex_mask(mask: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """Returns the mask of a call of flex attention, from its `BlockMask` or tensor."""
    if mask is None or isinstance(mask, Tensor):
        return mask
    from torch.nn.attention.flex_attention import create_mask

    B, _, L, _ = query.shape
    return create_mask(mask.mask_mod, B, 1, L, key.shape[2], str(query.device))


def _with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Returns a mask with a bias of the scores added."""
    if bias is None or mask is None:
        return mask if bias is None else bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -torch.inf)
    return mask + bias
