"""The result of a comparison: variants and a baseline on the same inputs.

`Client.compare` and `qkv compare` return and print a `Comparison`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Self, TypeAlias

from qkv.client.tables import Table, format_number, format_scaled, variant_labels
from qkv.wire.responses import CompareResponse, HeadFigures, VariantComparison

__all__ = ["Comparison", "VariantComparison"]


class Comparison(CompareResponse):
    """Variants compared with a baseline on the same inputs.

    Attributes:
        anchor: the baseline.
        variants: in the order of the request.
        notes: limits of the figures, such as weights that are all near uniform.
        timing: of the whole request: device, milliseconds, number of runs.
    """

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Builds it from the service's JSON."""
        return cls.parse(fields)

    def table(self, width: int | None = None) -> str:
        """Returns the results as text: a line for each measure, a column for each variant.

        Args:
            width: characters a line; further columns follow below. None: no limit.
        """
        return self._table().text(width)

    def heads_table(self, width: int | None = None) -> str:
        """Returns the figures of each query head as text: a line for each head of each variant.

        Args:
            width: as for `table`.

        Raises:
            ValueError: the comparison has no figures of the heads.
        """
        every = self._every()
        if self.anchor.heads is None:
            raise ValueError("the comparison has no heads: got per_head=False, expected True")
        labels = (label.replace("\n", ", ") for label in _labels(every))
        sections = [
            (
                label,
                [
                    [f"head {i}", *(measure(head) for measure in _HEAD_MEASURES.values())]
                    for i, head in enumerate(entry.heads or ())
                ],
            )
            for label, entry in zip(labels, every, strict=True)
        ]
        spread = "In brackets: the worst row, the range of entropies."
        return Table(["", *_HEAD_MEASURES], sections, [spread]).text(width)

    def __repr__(self) -> str:
        """Returns one line; `table()` has all figures."""
        errors = [f"{v.variant}: {_relative_error(v)}" for v in self.variants]
        return f"Comparison(anchor={self.anchor.variant!r}, {', '.join(errors)})"

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        every = self._every()
        anchor = self.anchor.variant
        sections = [
            (f"output: distance to that of {anchor}", _table_rows(_OUTPUT_MEASURES, every)),
            (
                f"weights, row by row: distance to those of {anchor}",
                _table_rows(_WEIGHTS_MEASURES, every),
            ),
            ("cost", _table_rows(_COST_MEASURES, every)),
        ]
        baseline_note = f"{anchor} is the baseline: its own distance is to its run in float64."
        spread = "In brackets: the worst row, the range of entropies, the range of times."
        return Table(["", *_labels(every)], sections, [baseline_note, spread, *self.notes])

    def _every(self) -> list[VariantComparison]:
        """Returns the baseline, and the variants other than the baseline."""
        others = [v for v in self.variants if not _is_same_variant(v, self.anchor)]
        return [self.anchor, *others]


def _labels(every: list[VariantComparison]) -> list[str]:
    return variant_labels([(v.variant, v.parameters) for v in every])


def _is_same_variant(one: VariantComparison, other: VariantComparison) -> bool:
    return one.variant == other.variant and one.parameters == other.parameters


def _relative_error(entry: VariantComparison) -> str:
    error = None if entry.output is None else entry.output.relative_error
    return f"relative error {format_number(error)}"


Compared: TypeAlias = VariantComparison | HeadFigures
Measure: TypeAlias = Callable[[Compared], str]
"""Formats one measure of a variant, or of a head."""


def _table_rows(
    measures: Mapping[str, Callable[[VariantComparison], str]], every: list[VariantComparison]
) -> list[list[str]]:
    return [[name, *map(measure, every)] for name, measure in measures.items()]


def _divergence_text(name: str) -> Measure:
    def format_entry(entry: Compared) -> str:
        divergence = entry.weights and getattr(entry.weights, name)
        if not divergence:
            return "–"
        return f"{format_number(divergence.mean)} ({format_number(divergence.worst)})"

    return format_entry


def _entropy_text(entry: Compared) -> str:
    entropy = entry.weights and entry.weights.entropy
    if not entropy:
        return "–"
    mean, least, most = map(format_number, (entropy.mean, entropy.least, entropy.most))
    return f"{mean} ({least}–{most})"


def _milliseconds_text(entry: VariantComparison) -> str:
    least, median, most = (
        format_number(ms)
        for ms in (entry.timing.least_ms, entry.timing.median_ms, entry.timing.most_ms)
    )
    return f"{median} ({least}–{most})"


def _distance_text(name: str) -> Measure:
    def format_entry(entry: Compared) -> str:
        distance: float | None = getattr(entry.output, name, None)
        # all digits of a cosine matter: it is close to 1
        return f"{distance:.7f}" if distance and name == "cosine" else format_number(distance)

    return format_entry


_OUTPUT_MEASURES: Final[Mapping[str, Measure]] = {
    "relative error": _distance_text("relative_error"),
    "largest error": _distance_text("largest_error"),
    "cosine": _distance_text("cosine"),
}

_ROW_MEASURES: Final[Mapping[str, Measure]] = {
    "total variation": _divergence_text("total_variation"),
    "KL divergence, nats": _divergence_text("kl_divergence"),
    "Jensen-Shannon, nats": _divergence_text("js_divergence"),
    "rank correlation": _divergence_text("rank_correlation"),
    "entropy, nats": _entropy_text,
}

_HEAD_MEASURES: Final[Mapping[str, Measure]] = {
    "relative error": _OUTPUT_MEASURES["relative error"],
    **_ROW_MEASURES,
}

_WEIGHTS_MEASURES: Final[Mapping[str, Callable[[VariantComparison], str]]] = {
    "are": lambda entry: entry.weights_are or "–",
    **_ROW_MEASURES,
}

_COST_MEASURES: Final[Mapping[str, Callable[[VariantComparison], str]]] = {
    "milliseconds": _milliseconds_text,
    "floating-point operations": lambda e: format_scaled(
        e.flops, ("", "k", "M", "G", "T", "P"), 1000
    ),
    "bytes in and out": lambda e: format_scaled(e.bytes, ("B", "KiB", "MiB", "GiB"), 1024),
    "peak memory": lambda e: format_scaled(e.peak_bytes, ("B", "KiB", "MiB", "GiB"), 1024),
}
