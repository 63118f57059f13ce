"""Compares variants on captured calls, piece by piece, and continues where it broke off."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from qkv.client.arrays import is_array
from qkv.client.client import Client
from qkv.client.comparison import Comparison
from qkv.client.progress_bar import ProgressBar
from qkv.client.request_builders import (
    Choice,
    build_choice,
    build_choices,
    build_compare_message,
    build_inputs_message,
)
from qkv.client.tables import variant_labels
from qkv.errors import InvalidContent, PayloadTooLarge, QkvError
from qkv.models.attention_call import AttentionCall
from qkv.models.call_pieces import Piece, cut
from qkv.models.head_comparison import HeadComparison
from qkv.models.head_row import HeadSums, figures_of
from qkv.models.masks import Part, parts_of
from qkv.models.model_call import Missed, ModelCall
from qkv.models.variants import VariantSignature

_VARIANTS: Final = 16  # in a request, the most that the service takes

HeadResults: TypeAlias = list[tuple[int, int, HeadSums]]
"""Sums by the index of the head in its call, and by the number of the variant."""


class _Variant(NamedTuple):
    """A variant of a comparison.

    Attributes:
        label: its name, with the parameters that distinguish it from others of that name.
        signature: of the variant.
        parameters: those that the user gave; they override those of a call.
    """

    label: str
    signature: VariantSignature
    parameters: Mapping[str, Any]

    def choice(self, call: ModelCall, part: Part) -> dict[str, Any]:
        """Returns the variant as a request for a part of a call names it."""
        options = self.signature.options(call, part)
        return {"variant": self.signature.name, "parameters": {**options, **self.parameters}}


class _Request(NamedTuple):
    """Variants on a piece of a call.

    Attributes:
        piece: of the call.
        variants: their numbers.
    """

    piece: Piece
    variants: tuple[int, ...]

    def smaller(self, error: QkvError) -> list[_Request]:
        """Returns the requests to send instead of one that was refused; empty if there are none."""
        if isinstance(error, PayloadTooLarge):
            if self.mask_problem(error) is not None:
                return []  # every smaller piece has this mask too
            return [self._replace(piece=half) for half in self.piece.halves()]
        alone = [self._replace(variants=(n,)) for n in self.variants]
        return alone if len(alone) > 1 else []  # the other variants may be valid

    def mask_problem(self, error: QkvError) -> str | None:
        """Returns the problem if the mask of a head alone exceeds the limit of an error."""
        limit, size = error.members.get("limit"), self.piece.mask_bytes
        # other limits are numbers of scores or heads
        if not isinstance(limit, int) or "bytes" not in error.detail or size <= limit:
            return None
        return f"the mask alone is too large: got {size} bytes, expected at most {limit}"

    def failed(self, problem: str) -> HeadResults:
        """Returns sums that have a problem and no figures."""
        queries = self.piece.query_count
        heads = self.piece.heads
        return [(h, n, HeadSums(queries, problem)) for h in heads for n in self.variants]


PieceResults: TypeAlias = dict[Any, HeadResults | list[_Request]]
"""The results of each request of a comparison, or the smaller requests to send instead."""


def compare_calls(
    calls: Sequence[AttentionCall],
    unfinished: MutableMapping[str, PieceResults],
    variants: Sequence[Choice],
    *,
    anchor: Choice,
    rows: int | None,
    client: Client | None,
    progress: bool,
    parameters: Mapping[str, Any],
    missed: Sequence[Missed],
) -> HeadComparison:
    """Returns the comparison; the arguments are those of `Calls.compare`.

    Args:
        unfinished: results of comparisons that broke off, which this one continues and adds to.
        missed: the layers that were not captured, for the result.
    """
    if not calls:
        raise InvalidContent("there are no calls to compare: run the model inside qkv.capture")
    baseline, others = _choose(variants, anchor, parameters, client)
    chosen = [(v.signature.name, v.parameters) for v in (baseline, *others)]
    key = json.dumps([chosen, rows, client is None], sort_keys=True)
    comparer = _Comparer(baseline, others, rows, client, unfinished.setdefault(key, {}))
    sums: dict[tuple[str, int], list[HeadSums]] = {}
    bar = ProgressBar("call") if progress else None
    try:
        for number, call in enumerate(calls):
            if bar is not None:
                bar.show(number, len(calls), call.layer)
            sums_of_heads = [
                sums.setdefault((call.layer, head), [HeadSums() for _ in others])
                for head in call.heads
            ]
            for head, variant, piece_sums in comparer.compare(number, call):
                sums_of_heads[head][variant].merge(piece_sums)
        if bar is not None:
            bar.close(finished=True)
            bar = None
    finally:
        if bar is not None:
            bar.close()
    del unfinished[key]
    head_rows = [
        each.row(layer, head, variant.label)
        for (layer, head), of_head in sums.items()
        for variant, each in zip(others, of_head, strict=True)
    ]
    return HeadComparison(tuple(head_rows), baseline.label, tuple(missed))


class _Comparer:
    """Compares variants on one call after the other.

    Args:
        baseline: the variant that the others are compared with.
        variants: the others.
        rows, client: those of `Calls.compare`.
        results: of the pieces that are done.
    """

    def __init__(
        self,
        baseline: _Variant,
        variants: Sequence[_Variant],
        rows: int | None,
        client: Client | None,
        results: PieceResults,
    ) -> None:
        self._baseline, self._variants = baseline, variants
        self._rows, self._client, self._results = rows, client, results

    def compare(self, number: int, call: AttentionCall) -> Iterator[tuple[int, int, HeadSums]]:
        """Yields the sums of each piece of a call, as `HeadResults` has them."""
        for part_number, part in enumerate(parts_of(call)):
            usable = []
            for n, variant in enumerate(self._variants):
                if (problem := self._problem(variant, part)) is None:
                    usable.append(n)
                    continue
                whole = Piece(call, part, 0, len(part.items) * call.query.shape[1])
                yield from _Request(whole, (n,)).failed(problem)
            for start in range(0, len(usable), _VARIANTS):
                group = tuple(usable[start : start + _VARIANTS])
                for piece in cut(call, part, self._rows, len(group) + 1):
                    request = _Request(piece, group)
                    yield from self._results_of((number, part_number), request)

    def _problem(self, variant: _Variant, part: Part) -> str | None:
        """Returns the reason why a variant cannot be compared on a part; None: it can."""
        if (problem := self._baseline.signature.problem(part)) is not None:
            return f"the baseline cannot run: {problem}"
        return variant.signature.problem(part)

    def _results_of(self, place: tuple[int, int], request: _Request) -> HeadResults:
        """Returns the results of a request, known or new, or those of smaller requests."""
        piece = request.piece
        key = (*place, piece.first, piece.last, request.variants)
        if key not in self._results:
            try:
                self._results[key] = self._send(request)
            except (PayloadTooLarge, InvalidContent) as error:
                problem = request.mask_problem(error) or error.detail
                self._results[key] = request.smaller(error) or request.failed(problem)
        return [
            result
            for each in self._results[key]
            for result in (self._results_of(place, each) if isinstance(each, _Request) else [each])
        ]

    def _send(self, request: _Request) -> HeadResults:
        """Returns the results of a request, from the service or from this process."""
        piece = request.piece
        variants = [self._variants[n] for n in request.variants]
        every = [self._baseline, *variants]
        inputs = frozenset[str]().union(*(v.signature.inputs for v in every))
        fields = {"rows": self._rows, "repeats": 1, "per_head": True}
        message, _ = build_inputs_message(None, piece.tensors(inputs), fields)
        del message.fields["parameters"]
        choices = [variant.choice(piece.call, piece.part) for variant in every]
        message.fields["anchor"], *message.fields["variants"] = choices
        if self._client is None:
            from qkv.local import compare

            comparison = Comparison.from_json(compare(message))
        else:
            comparison = self._client._send(build_compare_message(message))
        sums_of: dict[tuple[int, int], HeadSums] = {}
        for n, entry in zip(request.variants, comparison.variants, strict=True):
            heads = zip(piece.heads, entry.heads or (), comparison.anchor.heads or (), strict=True)
            for head, compared, baseline in heads:
                sums = sums_of.setdefault((head, n), HeadSums())
                sums.add(piece.query_count, figures_of(compared, baseline))
        return [(head, n, sums) for (head, n), sums in sums_of.items()]


def _choose(
    variants: Sequence[Choice],
    anchor: Choice,
    parameters: Mapping[str, Any],
    client: Client | None,
) -> tuple[_Variant, list[_Variant]]:
    """Returns the baseline and the variants of a comparison.

    A parameter for all goes to those that take it.

    Raises:
        InvalidContent: the variants are no list, one is repeated, or none takes a parameter.
        NotFound: there is no such variant.
    """
    choices = [build_choice(anchor, {}), *build_choices(variants, {})]
    if len(choices) == 1:
        raise InvalidContent('variants is empty: expected at least one name, such as ["linear"]')
    names = [_name(choice) for choice in choices]
    signatures = VariantSignature.find_all(names, client)
    for name, value in parameters.items():
        if is_array(value):
            raise InvalidContent(f"{name} is an array: got a tensor, expected a parameter")
        if not any(name in s.parameters for s in signatures.values()):
            raise InvalidContent(f"none of {', '.join(signatures)} has a parameter {name!r:.60}")
    chosen = []
    for name, choice in zip(names, choices, strict=True):
        signature, given = signatures[name], choice["parameters"]
        if unknown := given.keys() - signature.parameters:
            raise InvalidContent(f"{name} has no parameter {min(unknown)!r:.60}")
        shared = {n: x for n, x in parameters.items() if n in signature.parameters}
        both = {"variant": name, "parameters": {**shared, **given}}
        chosen.append(_Variant(name, signature, build_choice(both, {})["parameters"]))
    labels = variant_labels([(each.signature.name, each.parameters) for each in chosen[1:]])
    for n, label in enumerate(labels, 1):
        chosen[n] = chosen[n]._replace(label=label.replace("\n", " "))
    keys = [json.dumps([v.signature.name, v.parameters], sort_keys=True) for v in chosen[1:]]
    for variant, key in zip(chosen[1:], keys, strict=True):
        if keys.count(key) > 1:
            name = variant.signature.name
            raise InvalidContent(f"variants has {name} twice, with equal parameters")
    return chosen[0], chosen[1:]


def _name(choice: Mapping[str, Any]) -> str:
    name = choice.get("variant")
    if not isinstance(name, str) or choice.keys() - {"variant", "parameters"}:
        raise InvalidContent(
            f"a variant is invalid: got {dict(choice)!r:.80}, expected a name, or "
            '{"variant": "linear", "parameters": {}}'
        )
    return name
