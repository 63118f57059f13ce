"""Runs a model with another variant in chosen layers or heads, and reports the effect."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from qkv.client.client import Client
from qkv.client.request_builders import Choice
from qkv.client.tables import Table, format_number
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
from qkv.models.variants import VariantFunction, VariantSignature

Substitutes: TypeAlias = str | Mapping[str, Any]
"""One variant for all layers, or a variant for each of some layers."""


@dataclass(frozen=True, slots=True)
class SubstitutedLayer:
    """The effect of a substitution on one layer.

    Attributes:
        layer: qualified name of the module.
        variant: the variant that ran.
        heads: numbers of the substituted heads.
        calls: number of attention calls.
        relative_change: Frobenius norm of the change of these heads' output, divided by that of
            the output that the model's own attention has for the same inputs; None: it is zero.
    """

    layer: str
    variant: str
    heads: tuple[int, ...]
    calls: int
    relative_change: float | None


class SubstitutionReport:
    """The effect of a substitution: `rows`, a table, and the divergence of a model's outputs."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, tuple[int, ...]], tuple[int, float, float]] = {}

    def add(
        self, layer: str, variant: str, heads: tuple[int, ...], changed: float, total: float
    ) -> None:
        """Adds a call: the sums of squares of the change, and of the model's own output."""
        key = layer, variant, heads
        calls, before, whole = self._sums.get(key, (0, 0.0, 0.0))
        self._sums[key] = calls + 1, before + changed, whole + total

    @property
    def rows(self) -> list[SubstitutedLayer]:
        """The substituted layers, in the order of their first calls."""
        return [
            SubstitutedLayer(*key, calls, math.sqrt(changed / total) if total else None)
            for key, (calls, changed, total) in self._sums.items()
        ]

    @staticmethod
    def kl(before: Tensor, after: Tensor, mask: Tensor | None = None) -> float:
        """Returns the mean KL divergence of a model's predictions, in nats.

        Args:
            before: logits (..., V) of the model.
            after: logits of the same shape, with the substitution.
            mask: positions (...) to count, such as the model's `attention_mask`; None: all.

        Raises:
            InvalidContent: the shapes differ.
        """
        if before.shape != after.shape:
            raise InvalidContent(
                f"the logits differ in shape: got {list(after.shape)}, expected "
                f"{list(before.shape)}"
            )
        if mask is not None and mask.shape != before.shape[:-1]:
            raise InvalidContent(
                f"mask is invalid: got shape {list(mask.shape)}, expected {list(before.shape[:-1])}"
            )
        if mask is not None:
            before, after = before[mask.bool()], after[mask.bool()]
        log_p, log_q = (x.detach().double().log_softmax(-1) for x in (before, after))
        terms = log_p.exp() * (log_p - log_q)
        terms = terms.masked_fill(log_p.isneginf(), 0.0)  # 0 log 0 is 0
        return float(terms.sum(-1).mean().clamp(min=0.0))

    def table(self, width: int | None = None) -> str:
        """Returns the rows as text.

        Args:
            width: characters a line; None: no limit.
        """
        return self._table().text(width)

    def __repr__(self) -> str:
        """Returns one line: the number of layers, and the largest change."""
        changes = [r.relative_change for r in self.rows if r.relative_change is not None]
        largest = format_number(max(changes)) if changes else "–"
        return f"SubstitutionReport({len(self.rows)} layers, largest relative change {largest})"

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        lines = [
            [
                row.layer,
                row.variant,
                _list_heads(row.heads),
                str(row.calls),
                format_number(row.relative_change),
            ]
            for row in self.rows
        ]
        header = ["layer", "variant", "heads", "calls", "relative change"]
        return Table(header, [("substituted heads", lines)])


def _list_heads(heads: tuple[int, ...]) -> str:
    is_range = heads == tuple(range(heads[0], heads[0] + len(heads))) and len(heads) > 2
    return f"{heads[0]}–{heads[-1]}" if is_range else ", ".join(map(str, heads))


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
