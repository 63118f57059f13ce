"""Runs a model with another variant in chosen layers or heads."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from qkv.client.client import Client
from qkv.client.request_builders import Choice
from qkv.errors import InvalidContent
from qkv.models.interceptor import Interceptor
from qkv.models.masks import Part, parts_of
from qkv.models.model_call import (
    CallOutput,
    ModelCall,
    RunOriginal,
    choose_numbers,
    select_heads,
    to_numbers,
)
from qkv.models.running_modules import is_recomputed
from qkv.models.selection import check_layers_exist, is_selected
from qkv.models.substitution_report import SubstitutionReport
from qkv.models.variants import VariantFunction, VariantSignature

Substitutes: TypeAlias = str | Mapping[str, Any]
"""One variant for all layers, or a variant for each of some layers."""


class SubstituteWarning(UserWarning):
    """Attention of a model was not substituted."""


@contextmanager
def substitute(
    model: nn.Module, variants: Substitutes, *, client: Client | None = None
) -> Iterator[SubstitutionReport]:
    """Runs another variant in layers or heads of a model inside the block: see `qkv.substitute`."""
    substitutes = _parse(variants, client)
    check_layers_exist(model, [pattern for pattern, _ in substitutes])
    handler = _Substituter(substitutes)
    with Interceptor(model, handler, is_recorder=False):
        yield handler.report
    if problems := handler.problems():
        text = f"attention was not substituted: {'; '.join(problems)}"
        warnings.warn(text, SubstituteWarning, stacklevel=3)


class _Substitute:
    """A variant for some heads of a layer.

    Args:
        choice: a variant's name, or an object with `variant`, `parameters` and `heads`.
        client: of the service that computes it.
    """

    def __init__(self, choice: Choice, client: Client | None) -> None:
        fields: dict[str, Any] = {"variant": choice} if isinstance(choice, str) else {**choice}
        unknown = fields.keys() - {"variant", "parameters", "heads"}
        if unknown or not isinstance(fields.get("variant"), str):
            raise InvalidContent(
                f"a substitute is invalid: got {choice!r:.80}, expected a variant's name or an "
                'object with "variant", "parameters" and "heads"'
            )
        self.variant: str = fields["variant"]
        heads = fields.get("heads")
        self.heads = None if heads is None else to_numbers("heads", heads)
        self._parameters: dict[str, Any] = dict(fields.get("parameters") or {})
        self._client = client
        self._signature = VariantSignature.find(self.variant, client)
        if client is None:
            from qkv.attention import catalogue

            catalogue.find(self.variant).parse(self._parameters)

    def attend(self, call: ModelCall, parts: list[Part], original: CallOutput) -> CallOutput:
        """Returns output and weights of a call; padding keeps those of the model's own attention.

        Args:
            call: the call.
            parts: those of the call. The mask of the call will not do: the default bias of
                `sigmoid` counts the keys that it hides.
            original: of the model's own attention; the result has weights if it has.
        """
        output, weights = original.output, original.weights
        for part in parts:
            arguments = self._signature.arguments(call, part) | self._parameters
            tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor)}
            parameters = {n: x for n, x in arguments.items() if n not in tensors}
            function = VariantFunction(self.variant, parameters, self._client)
            output = part.put(output, function(tensors).to(output.dtype))
            if weights is not None:
                part_weights = function.weights(tensors).to(weights.dtype)
                weights = part.put(weights, part_weights, is_weights=True)
        return CallOutput(output, weights)


def _parse(variants: Substitutes, client: Client | None) -> list[tuple[str, _Substitute]]:
    """Returns the substitutes with the patterns of their layers."""
    if isinstance(variants, str) or (isinstance(variants, Mapping) and "variant" in variants):
        return [("*", _Substitute(variants, client))]
    if not isinstance(variants, Mapping) or not variants:
        raise InvalidContent(
            f"variants is invalid: got {variants!r:.80}, expected a variant's name or an object "
            "with a variant for each of some layers"
        )
    return [(pattern, _Substitute(choice, client)) for pattern, choice in variants.items()]


class _Substituter:
    """Handles the calls of a model. Threads may share it."""

    def __init__(self, substitutes: list[tuple[str, _Substitute]]) -> None:
        self.report = SubstitutionReport()
        self._substitutes = substitutes
        self._used: set[str] = set()
        self._missed: dict[str, str] = {}
        self._lock = threading.Lock()

    def handle(self, call: ModelCall, run: RunOriginal) -> CallOutput:
        """Returns the output of the substitute of the call's layer."""
        match = self._find(call.layer)
        if match is None or not all(x.numel() for x in (call.query, call.key, call.value)):
            return run()
        pattern, substitute = match
        H = call.query.shape[1]
        heads = choose_numbers("heads", substitute.heads, range(H), call.layer)
        chosen = None if heads == tuple(range(H)) else torch.tensor(heads)
        selected = call if chosen is None else select_heads(call, heads)
        parts = parts_of(selected)
        replaces_all = chosen is None and all(part.is_whole(call) for part in parts)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not replaces_all):
            original = run()
        before = original if chosen is None else _map(original, lambda x: x[:, list(heads)])
        after = substitute.attend(selected, parts, before)
        changed, total = _change(before.output, after.output, parts)
        with self._lock:
            self._used.add(pattern)
            if not is_recomputed():
                self.report.add(call.layer, substitute.variant, heads, changed, total)
        if chosen is None:
            return original.replaced(*after[:2])
        index = chosen.to(after.output.device)
        weights = original.weights
        if weights is not None and after.weights is not None:
            weights = weights.index_copy(1, index, after.weights)
        output = original.output.index_copy(1, index, after.output)
        return original.replaced(output, weights)

    def miss(self, layer: str, reason: str) -> None:
        """Notes a layer that cannot be intercepted."""
        if self._find(layer) is not None:
            with self._lock:
                self._missed.setdefault(layer, reason)

    def problems(self) -> list[str]:
        """Returns a sentence for each chosen layer or pattern that was not substituted."""
        problems = [f"{layer or 'the model'}: {reason}" for layer, reason in self._missed.items()]
        seen = {*self._missed, *(row.layer for row in self.report.rows)}
        owners = {layer: match[0] for layer in seen if (match := self._find(layer)) is not None}
        for pattern, _ in self._substitutes:
            if pattern in self._used or pattern in owners.values():
                continue
            is_hidden = any(is_selected(layer, pattern) for layer in owners)
            reason = (
                "another pattern took its layers" if is_hidden else "no attention call was made"
            )
            problems.append(f"{pattern}: {reason}")
        return problems

    def _find(self, layer: str) -> tuple[str, _Substitute] | None:
        fitting = (each for each in reversed(self._substitutes) if is_selected(layer, each[0]))
        return next(fitting, None)


@torch.no_grad()
def _change(before: Tensor, after: Tensor, parts: list[Part]) -> tuple[float, float]:
    """Returns the sums of squares of the change and of the output before, without padding."""
    changed = total = 0.0
    for part in parts:
        old, new = (part.select(x, part.queries).double() for x in (before, after))
        changed += float((new - old).square().sum())
        total += float(old.square().sum())
    return changed, total


def _map(output: CallOutput, function: Callable[[Tensor], Tensor]) -> CallOutput:
    """Applies a function to output and weights."""
    weights = None if output.weights is None else function(output.weights)
    return CallOutput(function(output.output), weights)
