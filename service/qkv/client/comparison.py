"""What a comparison answers: variants side by side on one set of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from qkv.client.tables import Table, digits, labels, scaled

__all__ = ["Compared", "Comparison", "Distance", "Divergence", "Entropy", "Timed", "Weights"]


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
class Timed:
    """Milliseconds of compute over so many repeats."""

    median_ms: float
    least_ms: float
    most_ms: float
    repeats: int


@dataclass(frozen=True, slots=True)
class Compared:
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
    timing: Timed
    flops: int
    bytes: int
    peak_bytes: int | None

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """What the service says of it."""
        return cls(
            **{name: said[name] for name in ("variant", "parameters", "weights_are")},
            output=None if said["output"] is None else Distance(**said["output"]),
            weights=None if said["weights"] is None else _weights(said["weights"]),
            timing=Timed(**said["timing"]),
            **{name: said[name] for name in ("flops", "bytes", "peak_bytes")},
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

    anchor: Compared
    variants: tuple[Compared, ...]
    notes: tuple[str, ...]
    timing: Mapping[str, Any]

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """What the service says."""
        variants = tuple(map(Compared.of, said["variants"]))
        return cls(Compared.of(said["anchor"]), variants, tuple(said["notes"]), said["timing"])

    def table(self, width: int | None = None) -> str:
        """All of it as text: a line for each measure, a column for each variant.

        Args:
            width: letters that a line has room for; None: any number.
        """
        return self._table().text(width)

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        others = [v for v in self.variants if not _same(v, self.anchor)]
        every = [self.anchor, *others]
        names = labels([(v.variant, v.parameters) for v in every])
        anchor = self.anchor.variant
        sections = [
            (f"output: distance to that of {anchor}", _rows(_OUTPUT, every)),
            (f"weights, row by row: distance to those of {anchor}", _rows(_WEIGHTS, every)),
            ("cost", _rows(_COST, every)),
        ]
        own = f"{anchor} is the anchor: its own distance is that to itself in float64."
        spread = "In brackets the worst row, the range of entropies, the range of times."
        return Table(["", *names], sections, [own, spread, *self.notes])


def _same(one: Compared, other: Compared) -> bool:
    return one.variant == other.variant and one.parameters == other.parameters


def _weights(said: Mapping[str, Any]) -> Weights:
    """Of the anchor there is the entropy alone."""
    rest = {n: d and Divergence(**d) for n, d in said.items() if n != "entropy"}
    return Weights(said["entropy"] and Entropy(**said["entropy"]), **rest)


Measure = Callable[[Compared], str]


def _rows(measures: Mapping[str, Measure], every: list[Compared]) -> list[list[str]]:
    return [[name, *map(measure, every)] for name, measure in measures.items()]


def _divergence(name: str) -> Measure:
    def shown(entry: Compared) -> str:
        found = entry.weights and getattr(entry.weights, name)
        return f"{digits(found.mean)} ({digits(found.worst)})" if found else "–"

    return shown


def _entropy(entry: Compared) -> str:
    found = entry.weights and entry.weights.entropy
    if not found:
        return "–"
    return f"{digits(found.mean)} ({digits(found.least)}–{digits(found.most)})"


def _milliseconds(entry: Compared) -> str:
    least, median, most = (
        digits(ms) for ms in (entry.timing.least_ms, entry.timing.median_ms, entry.timing.most_ms)
    )
    return f"{median} ({least}–{most})"


def _distance(name: str) -> Measure:
    def shown(entry: Compared) -> str:
        found: float | None = getattr(entry.output, name, None)
        # of a cosine it matters how far it is from 1
        return f"{found:.7f}" if found and name == "cosine" else digits(found)

    return shown


_OUTPUT: Final[Mapping[str, Measure]] = {
    "relative error": _distance("relative_error"),
    "largest error": _distance("largest_error"),
    "cosine": _distance("cosine"),
}

_WEIGHTS: Final[Mapping[str, Measure]] = {
    "are": lambda entry: entry.weights_are or "–",
    "total variation": _divergence("total_variation"),
    "KL divergence, nats": _divergence("kl_divergence"),
    "Jensen-Shannon, nats": _divergence("js_divergence"),
    "rank correlation": _divergence("rank_correlation"),
    "entropy, nats": _entropy,
}

_COST: Final[Mapping[str, Measure]] = {
    "milliseconds": _milliseconds,
    "floating-point operations": lambda e: scaled(e.flops, ("", "k", "M", "G", "T", "P"), 1000),
    "bytes in and out": lambda e: scaled(e.bytes, ("B", "KiB", "MiB", "GiB"), 1024),
    "peak memory": lambda e: scaled(e.peak_bytes, ("B", "KiB", "MiB", "GiB"), 1024),
}
