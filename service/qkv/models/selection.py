"""Selects layers by their names, and the calls of one forward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from qkv.errors import InvalidContent
from qkv.models.attention_call import AttentionCall
from qkv.models.masks import is_self_attention
from qkv.models.model_call import Missed, choose_numbers, to_numbers


def is_selected(layer: str, pattern: str) -> bool:
    """True if a pattern names a layer or a module around it.

    Args:
        layer: qualified name of a module, such as "encoder.layer.3.attention.self".
        pattern: such as "encoder.layer.3" or "encoder.layer.*.attention"; "*" stands for any
            characters.
    """
    return fnmatchcase(layer, pattern) or fnmatchcase(layer, f"{pattern}.*")


def check_layers_exist(model: nn.Module, patterns: Iterable[str]) -> None:
    """Checks that each pattern names a module of a model.

    Raises:
        InvalidContent: one does not.
    """
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        if not any(is_selected(name, pattern) for name in names):
            raise InvalidContent(f"the model has no layer {pattern!r:.80}")


def choose_calls(
    calls: Sequence[AttentionCall],
    missed: Sequence[Missed],
    layers: Collection[str] | None,
    numbers: Sequence[int] | None,
    items: Sequence[int] | None,
) -> list[AttentionCall]:
    """Returns the calls of one forward pass.

    Args:
        calls: of a capture.
        missed: the layers that must not be missing, unless layers or numbers are given.
        layers: names of layers, or of modules around them; None: all.
        numbers: of the calls; None: all, each layer once.
        items: sequences that the calls must have; None: all calls.

    Raises:
        InvalidContent: there are no such calls, or a layer was called more than once.
    """
    is_list = isinstance(layers, Collection) and not isinstance(layers, str)
    if layers is not None and not (is_list and all(isinstance(name, str) for name in layers)):
        raise InvalidContent(f"layers is invalid: got {layers!r:.80}, expected a list of names")
    items = None if items is None else to_numbers("items", items)
    if layers is None and numbers is None and missed:
        raise InvalidContent(
            f"{missed[0].layer or 'a layer'} was not captured: {missed[0].reason}; choose the "
            "layers with `layers`"
        )
    for pattern in layers or ():
        if not any(is_selected(call.layer, pattern) for call in calls):
            raise InvalidContent(f"no call is of a layer {pattern!r:.80}")
    chosen = list(calls)
    if numbers is not None:
        chosen = [calls[number] for number in choose_numbers("calls", numbers, range(len(calls)))]
    if layers is not None:
        chosen = [call for call in chosen if any(is_selected(call.layer, p) for p in layers)]
    if items is not None:
        having = [call for call in chosen if set(items) <= set(call.items)]
        for call in chosen:
            if all(other.layer != call.layer for other in having):
                raise InvalidContent(
                    f"items is invalid: got {list(items)!r:.80}, but no call of {call.layer} has "
                    "all these sequences"
                )
        chosen = having
    if not chosen:
        raise InvalidContent("there are no calls: run the model inside qkv.capture")
    if numbers is None:
        check_layers_differ(chosen)
    return chosen


def check_layers_differ(calls: Sequence[AttentionCall]) -> None:
    """Checks that no layer has two calls.

    Raises:
        InvalidContent: one has.
    """
    call_of_layer: dict[str, AttentionCall] = {}
    for call in calls:
        if (other := call_of_layer.get(call.layer)) is None:
            call_of_layer[call.layer] = call
            continue
        if other.items != call.items:
            raise InvalidContent(
                f"{call.layer} has calls of different sequences: choose sequences with `items`, "
                f"such as items={list(call.items)}"
            )
        raise InvalidContent(
            f"{call.layer} was called more than once: choose the calls of one forward pass with "
            "`calls`, their numbers in order"
        )


def check_chain(calls: Sequence[AttentionCall], items: Sequence[int]) -> None:
    """Checks that each call is self-attention on the sequences of the one before.

    Raises:
        InvalidContent: a call is not.
    """
    L, first = calls[0].query.shape[2], calls[0].layer
    for call in calls:
        if not is_self_attention(call):
            raise InvalidContent(
                f"{call.layer} is cross-attention: choose the layers of self-attention with "
                "`layers`"
            )
        if call.query.shape[2] != call.key.shape[2]:
            raise InvalidContent(
                f"{call.layer} has {call.query.shape[2]} queries and {call.key.shape[2]} keys: "
                "capture a forward pass without a cache of keys"
            )
        if call.query.shape[2] != L or not set(items) <= set(call.items):
            raise InvalidContent(
                f"{call.layer} does not follow {first}: got {call.query.shape[2]} tokens of the "
                f"sequences {list(call.items)!r:.60}, expected {L} of {list(items)!r:.60}"
            )
