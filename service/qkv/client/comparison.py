"""What a comparison answers: variants side by side on one set of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from qkv.client.tables import Table, format_number, format_scaled, variant_labels

__all__ = [
    "Comparison",
    "Distance",
    "Divergence",
    "Entropy",
    "VariantComparison",
    "VariantTiming",
    "Weights",
]


@dataclass(frozen=True, slots=True)
class Distance:
    """How far an output lies from another.

    Attributes:
        relative_error: the Frobenius norm of the difference over that of the other.
        largest_error: of any element.
        cosine: of the two as one long vector each; None where one is all zeros.
    """

    relative_error: float | None
    largest_error: float | None
    cosine: float | None


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far rows of weights lie from others: on average, and where they are farthest."""

    mean: float | None
    worst: float | None


@dataclass(frozen=True, slots=True)
class Entropy:
    """Nats, over the rows."""

    mean: float | None
    least: float | None
    most: float | None


@dataclass(frozen=True, slots=True)
class Weights:
    """A variant's weights, row by row; None where a measure has no meaning for them.

    Attributes:
        entropy: of the rows.
        total_variation: half the sum of absolute differences.
        kl_divergence: nats, from the anchor's row to the variant's.
        js_divergence: nats, Jensen-Shannon.
        rank_correlation: of the order that a row puts the keys in; worst is the least.
    """

    entropy: Entropy | None
    total_variation: Divergence | None = None
    kl_divergence: Divergence | None = None
    js_divergence: Divergence | None = None
    rank_correlation: Divergence | None = None


@dataclass(frozen=True, slots=True)
class VariantTiming:
    """Milliseconds of compute over so many repeats."""

    median_ms: float
    least_ms: float
    most_ms: float
    repeats: int


@dataclass(frozen=True, slots=True)
class VariantComparison:
    """One variant of a comparison.

    Attributes:
        variant: its name.
        parameters: as it ran.
        weights_are: "stochastic", "signed" or "unnormalised"; None where it has none.
        output: its distance to the anchor's; of the anchor, to its own in float64, None where it
            ran in that itself.
        weights: against the anchor's, None where it has none; of the anchor the entropy alone.
        timing: of each repeat, alone on the device.
        flops, bytes: as a run has them.
        peak_bytes: memory beside inputs and answer; None where it is not known.
    """

    variant: str
    parameters: Mapping[str, Any]
    weights_are: str | None
    output: Distance | None
    weights: Weights | None
    timing: VariantTiming
    flops: int
    bytes: int
    peak_bytes: int | None

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Builds it from the service's JSON."""
        return cls(
            **{name: fields[name] for name in ("variant", "parameters", "weights_are")},
            output=None if fields["output"] is None else Distance(**fields["output"]),
            weights=None if fields["weights"] is None else _parse_weights(fields["weights"]),
            timing=VariantTiming(**fields["timing"]),
            **{name: fields[name] for name in ("flops", "bytes", "peak_bytes")},
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Variants side by side.

    Attributes:
        anchor: what the others are held against.
        variants: the others, in the order asked for.
        notes: sentences on what the figures do not say, such as that all weights are near uniform.
        timing: of the whole: device and more.
    """

    anchor: VariantComparison
    variants: tuple[VariantComparison, ...]
    notes: tuple[str, ...]
    timing: Mapping[str, Any]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Builds it from the service's JSON."""
        variants = tuple(map(VariantComparison.from_json, fields["variants"]))
        return cls(
            VariantComparison.from_json(fields["anchor"]),
            variants,
            tuple(fields["notes"]),
            fields["timing"],
        )

    def table(self, width: int | None = None) -> str:
        """All of it as text: a line for each measure, a column for each variant.

        Args:
            width: letters that a line has room for; None: any number.
        """
        return self._table().text(width)

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        others = [v for v in self.variants if not _is_same_variant(v, self.anchor)]
        every = [self.anchor, *others]
        names = variant_labels([(v.variant, v.parameters) for v in every])
        anchor = self.anchor.variant
        sections = [
            (f"output: distance to that of {anchor}", _table_rows(_OUTPUT_MEASURES, every)),
            (
                f"weights, row by row: distance to those of {anchor}",
                _table_rows(_WEIGHTS_MEASURES, every),
            ),
            ("cost", _table_rows(_COST_MEASURES, every)),
        ]
        own = f"{anchor} is the anchor: its own distance is that to itself in float64."
        spread = "In brackets the worst row, the range of entropies, the range of times."
        return Table(["", *names], sections, [own, spread, *self.notes])


def _is_same_variant(one: VariantComparison, other: VariantComparison) -> bool:
    return one.variant == other.variant and one.parameters == other.parameters


def _parse_weights(fields: Mapping[str, Any]) -> Weights:
    """Of the anchor there is the entropy alone."""
    rest = {n: d and Divergence(**d) for n, d in fields.items() if n != "entropy"}
    return Weights(fields["entropy"] and Entropy(**fields["entropy"]), **rest)


Measure = Callable[[VariantComparison], str]


def _table_rows(measures: Mapping[str, Measure], every: list[VariantComparison]) -> list[list[str]]:
    return [[name, *map(measure, every)] for name, measure in measures.items()]


def _divergence_text(name: str) -> Measure:
    def format_entry(entry: VariantComparison) -> str:
        found = entry.weights and getattr(entry.weights, name)
        return f"{format_number(found.mean)} ({format_number(found.worst)})" if found else "–"

    return format_entry


def _entropy_text(entry: VariantComparison) -> str:
    found = entry.weights and entry.weights.entropy
    if not found:
        return "–"
    return f"{format_number(found.mean)} ({format_number(found.least)}–{format_number(found.most)})"


def _milliseconds_text(entry: VariantComparison) -> str:
    least, median, most = (
        format_number(ms)
        for ms in (entry.timing.least_ms, entry.timing.median_ms, entry.timing.most_ms)
    )
    return f"{median} ({least}–{most})"


def _distance_text(name: str) -> Measure:
    def format_entry(entry: VariantComparison) -> str:
        found: float | None = getattr(entry.output, name, None)
        # of a cosine it matters how far it is from 1
        return f"{found:.7f}" if found and name == "cosine" else format_number(found)

    return format_entry


_OUTPUT_MEASURES: Final[Mapping[str, Measure]] = {
    "relative error": _distance_text("relative_error"),
    "largest error": _distance_text("largest_error"),
    "cosine": _distance_text("cosine"),
}

_WEIGHTS_MEASURES: Final[Mapping[str, Measure]] = {
    "are": lambda entry: entry.weights_are or "–",
    "total variation": _divergence_text("total_variation"),
    "KL divergence, nats": _divergence_text("kl_divergence"),
    "Jensen-Shannon, nats": _divergence_text("js_divergence"),
    "rank correlation": _divergence_text("rank_correlation"),
    "entropy, nats": _entropy_text,
}

_COST_MEASURES: Final[Mapping[str, Measure]] = {
    "milliseconds": _milliseconds_text,
    "floating-point operations": lambda e: format_scaled(
        e.flops, ("", "k", "M", "G", "T", "P"), 1000
    ),
    "bytes in and out": lambda e: format_scaled(e.bytes, ("B", "KiB", "MiB", "GiB"), 1024),
    "peak memory": lambda e: format_scaled(e.peak_bytes, ("B", "KiB", "MiB", "GiB"), 1024),
}
