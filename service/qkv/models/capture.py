"""Captures the attention calls of a model."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from qkv.errors import InvalidContent
from qkv.models.attention_call import AttentionCall
from qkv.models.calls import Calls
from qkv.models.interceptor import Interceptor
from qkv.models.model_call import (
    CallOutput,
    Missed,
    ModelCall,
    RunOriginal,
    choose_numbers,
    select_heads,
    to_numbers,
)
from qkv.models.proof import is_proved
from qkv.models.running_modules import is_recomputed
from qkv.models.selection import check_layers_exist, is_selected

MAX_BYTES: Final = 1 << 30
"""The default budget of a capture, in bytes."""
_UNPROVED: Final = "its weights times its values are not what its attention function returned"
_NOT_RETURNED: Final = "its module did not return the projected outputs of its heads"
_RECENT_MASKS: Final = 4  # layers of a model share masks: one for each kind of layer


class CaptureWarning(UserWarning):
    """Attention of a model was not captured."""


@contextmanager
def capture(
    model: nn.Module,
    *,
    layers: Collection[str] | None = None,
    heads: Sequence[int] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Iterator[Calls]:
    """Records every attention call of a model inside the block: see `qkv.capture`."""
    _check(model, layers, heads)
    recorder = _Recorder(layers, heads, max_bytes)
    with Interceptor(model, recorder, is_recorder=True):
        yield recorder.calls
    recorder.note_unused_layers()
    if recorder.calls.missed:
        listed = "; ".join(f"{m.layer or 'the model'}: {m.reason}" for m in recorder.calls.missed)
        warnings.warn(f"attention was not captured: {listed}", CaptureWarning, stacklevel=3)


def _check(model: nn.Module, layers: Collection[str] | None, heads: Sequence[int] | None) -> None:
    """Raises InvalidContent if a layer does not exist, or if `heads` are no numbers of heads."""
    if isinstance(layers, str):
        raise InvalidContent(f"layers is invalid: got {layers!r}, expected a list of names")
    check_layers_exist(model, layers or ())
    if heads is None:
        return
    numbers = to_numbers("heads", heads)
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise InvalidContent(
            f"heads is invalid: got {numbers!r:.80}, expected different numbers from 0"
        )


class _Recorder:
    """Records calls. Threads may share it.

    Args:
        layers, heads, max_bytes: those of `capture`.
    """

    def __init__(
        self, layers: Collection[str] | None, heads: Sequence[int] | None, max_bytes: int
    ) -> None:
        self.calls = Calls()
        self._layers, self._heads, self._left = layers, heads, max_bytes
        self._lock = threading.Lock()
        self._masks: list[Tensor] = []

    def handle(self, call: ModelCall, run: RunOriginal) -> CallOutput:
        """Runs the model's attention, records the call and returns the same output."""
        result = run()
        if not is_recomputed() and self._is_wanted(call.layer):
            with self._lock, torch.no_grad():
                self._record(call, result)
        return result

    def miss(self, layer: str, reason: str) -> None:
        """Notes a layer, once for each reason."""
        if self._is_wanted(layer):
            with self._lock:
                self._note(Missed(layer, reason))

    def note_unused_layers(self) -> None:
        """Notes each name of `layers` without a call and without another reason."""
        with self._lock:
            seen = [*self.calls.layers, *(missed.layer for missed in self.calls.missed)]
            for pattern in self._layers or ():
                if not any(is_selected(layer, pattern) for layer in seen):
                    self._note(Missed(pattern, "it made no attention call"))

    def _is_wanted(self, layer: str) -> bool:
        return self._layers is None or any(is_selected(layer, p) for p in self._layers)

    def _note(self, missed: Missed) -> None:
        if missed not in self.calls.missed:
            self.calls.missed.append(missed)

    def _record(self, call: ModelCall, result: CallOutput) -> None:
        output = result.output
        if reason := _why_unreadable(call.query):
            self._note(Missed(call.layer, reason))
            return
        H, G = call.query.shape[1], call.key.shape[1]
        heads = choose_numbers("heads", self._heads, range(H), call.layer)
        is_every = heads == tuple(range(H))
        key_heads = tuple(range(G)) if is_every else tuple(h * G // H for h in heads)
        wanted = (call.query, heads), (call.key, key_heads), (call.value, key_heads)
        sinks = None if call.sinks is None else call.sinks.detach()[list(heads)].cpu()
        mask = None if call.mask is None else self._copy_mask(call.mask, heads)
        is_new = mask is not None and not any(mask is kept for kept in self._masks)
        size = sum(_size(x, chosen) for x, chosen in (*wanted, (output, heads)))
        size += sum(x.nbytes for x in (sinks, mask if is_new else None) if x is not None)
        if size > self._left:
            reason = "its tensors exceed the budget of bytes (max_bytes)"
            self._note(Missed(call.layer, reason))
            return
        own = output if result.own is None else result.own
        if not is_proved(select_heads(call, heads), own[:, list(heads)]):
            self._note(Missed(call.layer, _UNPROVED))
            return
        if result.is_returned is not None and not result.is_returned():
            self._note(Missed(call.layer, _NOT_RETURNED))
            return
        self._left -= size
        if mask is not None and is_new:
            self._masks = [*self._masks, mask][-_RECENT_MASKS:]
        query, key, value = (_copy(x, chosen) for x, chosen in wanted)
        scale = call.query.shape[-1] ** -0.5 if call.scale is None else float(call.scale)
        self.calls.append(
            AttentionCall(
                index=len(self.calls),
                layer=call.layer,
                query=query,
                key=key,
                value=value,
                output=_copy(output, heads),
                mask=mask,
                causal=bool(call.causal),
                query_offset=call.query_offset,
                scale=scale,
                softcap=call.softcap,
                window=call.window,
                sinks=sinks,
                heads=heads,
                items=tuple(range(len(query))),
                dropout=call.dropout,
                is_self=call.is_self,
            )
        )

    def _copy_mask(self, mask: Tensor, heads: tuple[int, ...]) -> Tensor:
        """Returns a copy of a mask; layers with equal masks share one."""
        for axis, stride in enumerate(mask.stride()[:3]):
            if not stride:  # broadcast along this axis
                mask = mask.narrow(axis, 0, min(1, mask.shape[axis]))
        copied = _copy(mask, heads)
        for kept in self._masks:
            if kept.dtype == copied.dtype and torch.equal(kept, copied):
                return kept
        return copied


def _why_unreadable(x: Tensor) -> str:
    """Returns the reason why the numbers of a tensor cannot be copied; "" if they can."""
    if x.is_meta or isinstance(x, FakeTensor):
        return "its tensors have no numbers"
    if not x.numel():
        return "its queries are empty"
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "it runs inside a transform of torch.func"
    return ""


def _size(x: Tensor, heads: tuple[int, ...]) -> int:
    """Returns the bytes of a copy of these heads."""
    return x.nbytes // x.shape[1] * (len(heads) if x.shape[1] > 1 else 1)


def _copy(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Returns a copy of these heads of a tensor (B, H, ...), on the CPU."""
    x = x.detach()
    if x.shape[1] > 1 and heads != tuple(range(x.shape[1])):
        x = x[:, list(heads)]
    return x.to("cpu", copy=True, memory_format=torch.contiguous_format)
