"""The responses of `POST /v1/compare` and `POST /v1/sweep`, as structs.

The service builds them, `wire.json.dump` encodes them, the client parses them, and the OpenAPI
document takes its schemas from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import (
    Annotated,
    Any,
    ClassVar,
    TypeAlias,
)

from msgspec import Meta, field

from qkv.wire.response import Count, NonNegative, PositiveCount, Response, doc

__all__ = [
    "BaselineComparison",
    "BaselineHead",
    "BaselineWeights",
    "Cell",
    "CompareResponse",
    "CompareTiming",
    "ComparedHead",
    "ComparedVariant",
    "Crossover",
    "Divergence",
    "Done",
    "Entropy",
    "HeadFigures",
    "OutputError",
    "Progress",
    "Stopped",
    "VariantComparison",
    "VariantTiming",
    "Weights",
    "WeightsComparison",
]


class OutputError(Response, frozen=True):
    """The error of an output against a reference; null if it is not finite or undefined."""

    relative_error: Annotated[
        NonNegative | None,
        doc("Frobenius norm of the difference, divided by that of the reference."),
    ]
    largest_error: Annotated[NonNegative | None, doc("The largest absolute difference.")]
    cosine: Annotated[
        Annotated[float, Meta(ge=-1, le=1)] | None,
        doc("Cosine of the angle between the two, as vectors; null if one is all zeros."),
    ]


class Divergence(Response, frozen=True):
    """The divergence of rows of weights from the baseline's rows."""

    mean: Annotated[float, doc("The mean over the rows.")]
    worst: Annotated[float, doc("That of the worst row.")]


class Entropy(Response, frozen=True):
    """The entropy of rows of weights, in nats."""

    mean: Annotated[NonNegative, doc("The mean over the rows.")]
    least: NonNegative
    most: NonNegative


class BaselineWeights(Response, frozen=True):
    """The weights of the baseline. It has no divergence from itself."""

    entropy: Annotated[Entropy | None, doc("Of its rows; null if they have none.")]

    total_variation: ClassVar[None] = None
    kl_divergence: ClassVar[None] = None
    js_divergence: ClassVar[None] = None
    rank_correlation: ClassVar[None] = None


class WeightsComparison(Response, frozen=True):
    """The weights of a variant and the baseline, row by row; null if a measure is undefined."""

    total_variation: Annotated[
        Divergence | None,
        doc("Half the sum of |a - b|, from 0 to 1 if both are stochastic."),
    ]
    kl_divergence: Annotated[
        Divergence | None,
        doc("Sum of a log(a / b), a the baseline's row, in nats; null if it is infinite."),
    ]
    js_divergence: Annotated[
        Divergence | None,
        doc("Jensen-Shannon: the mean of both divergences from (a + b) / 2, to log 2."),
    ]
    rank_correlation: Annotated[
        Divergence | None,
        doc(
            "Spearman's, of the keys that either gives weight; the worst is the least. "
            "Null if no row has an order."
        ),
    ]
    entropy: Annotated[Entropy | None, doc("Of its rows; null if they have none.")]


Weights: TypeAlias = WeightsComparison | BaselineWeights


class HeadFigures(Response, frozen=True):
    """One query head of a variant; base class for heads of the baseline and of other variants."""

    output: Annotated[
        OutputError | None,
        doc(
            "As of the variant, for the head's part of the output. Null also if the layer has an "
            "output projection, which adds up the heads."
        ),
    ]
    weights: Weights | None


class ComparedHead(HeadFigures, frozen=True):
    """One query head of a variant, and its distance from the same head of the baseline."""

    weights: Annotated[WeightsComparison | None, doc("Null if no rows were compared.")]


class BaselineHead(HeadFigures, frozen=True):
    """One query head of the baseline."""

    weights: Annotated[BaselineWeights | None, doc("Null if no rows were compared.")]


class VariantTiming(Response, frozen=True):
    """Compute times of the repeats, in milliseconds."""

    median_ms: NonNegative
    least_ms: NonNegative
    most_ms: NonNegative
    repeats: PositiveCount


class VariantComparison(Response, frozen=True):
    """The measurements of a variant; base class for the baseline and the other variants."""

    variant: Annotated[str, doc("The variant's name.")]
    parameters: Annotated[Mapping[str, Any], doc("As in the request.")]
    weights_are: Annotated[
        str, Meta(extra_json_schema={"enum": ["stochastic", "signed", "unnormalised"]})
    ]
    output: Annotated[
        OutputError | None,
        doc(
            "Error against the baseline's output. The error of the baseline is against its own run "
            "in float64, and null if it ran in float64."
        ),
    ]
    weights: Weights | None
    timing: Annotated[VariantTiming, doc("Of each repeat, alone on the device.")]
    flops: Annotated[Count, doc("Of the matrix products, by the formula.")]
    bytes: Annotated[Count, doc("Of all input tensors and the output.")]
    peak_bytes: Annotated[
        Count, doc("Peak memory of torch's allocator in a run, beyond the inputs.")
    ]
    heads: Annotated[
        tuple[HeadFigures, ...] | None,
        doc("Each query head, in order; left out without `per_head` in the request."),
    ] = None


class ComparedVariant(VariantComparison, frozen=True):
    """The measurements of a variant, and its distance from the baseline."""

    weights: Annotated[WeightsComparison | None, doc("Null if no rows were compared.")]
    heads: Annotated[
        tuple[ComparedHead, ...] | None,
        doc("Each query head, in order; left out without `per_head` in the request."),
    ] = None


class BaselineComparison(VariantComparison, frozen=True):
    """The measurements of the baseline, which the variants are compared with."""

    weights: Annotated[BaselineWeights | None, doc("Null if no rows were compared.")]
    heads: Annotated[
        tuple[BaselineHead, ...] | None,
        doc("Each query head, in order; left out without `per_head` in the request."),
    ] = None


class CompareTiming(Response, frozen=True):
    """Times of all jobs of a comparison, in milliseconds."""

    queue_ms: Annotated[NonNegative, doc("In the queue.")]
    transfer_ms: Annotated[NonNegative, doc("Copying tensors to the device and back.")]
    compute_ms: Annotated[NonNegative, doc("Computing.")]
    runs: Annotated[PositiveCount, doc("Number of jobs.")]
    device: Annotated[str, doc("Device of the jobs.")]
    total_ms: Annotated[NonNegative, doc("From the last byte of the request to the response.")]


class CompareResponse(Response, frozen=True):
    """The response of `POST /v1/compare`."""

    anchor: BaselineComparison
    variants: Annotated[
        tuple[ComparedVariant, ...],
        Meta(min_length=1, description="In the order of the request."),
    ]
    notes: Annotated[
        tuple[str, ...], doc("Facts that the figures do not show, in a sentence or two each.")
    ]
    timing: CompareTiming


class Progress(Response, frozen=True):
    """The event `progress` of a sweep, sent before each cell."""

    done: Annotated[Count, doc("Cells that are measured.")]
    total: Annotated[Count, doc("Cells of the sweep.")]
    variant: Annotated[str, doc("The variant of the next cell.")]
    length: Annotated[PositiveCount, doc("The length of the next cell.")]


class Cell(Response, frozen=True):
    """The event `cell` of a sweep: one variant at one length, with times or with a problem.

    Without a problem all other fields are set, but `way` and `held_bytes` only if a token is timed.
    With one, those from `median_ms` on are None.
    """

    index: Annotated[
        Count, doc("Index of the variant in the request; of the curve if a token is timed.")
    ]
    parameters: Annotated[Mapping[str, Any], doc("As in the request.")]
    variant: Annotated[str, doc("The variant's name.")]
    length: Annotated[
        PositiveCount, doc("Length of queries and keys, or of the tokens before the timed one.")
    ]
    median_ms: Annotated[NonNegative | None, doc("Median compute time of the repeats.")] = None
    least_ms: NonNegative | None = None
    most_ms: NonNegative | None = None
    repeats: PositiveCount | None = None
    flops: Annotated[Count | None, doc("Of the matrix products, by the formula.")] = None
    bytes: Annotated[Count | None, doc("Of all input tensors and the output.")] = None
    peak_bytes: Annotated[
        Count | None, doc("Peak memory of torch's allocator in a run, beyond the inputs.")
    ] = None
    problem: Annotated[
        Mapping[str, Any] | None, doc("The problem document, if the variant cannot run.")
    ] = None
    way: Annotated[
        str | None, doc("How a token is computed: state, cache or recompute; None: a whole call.")
    ] = None
    held_bytes: Annotated[
        Count | None, doc("Bytes of the cache or of the state, kept from token to token.")
    ] = None


class Crossover(Response, frozen=True):
    """A pair of variants and the lengths between which the other one becomes faster.

    At both lengths the slowest repeat of the faster variant is below the fastest repeat of the
    other. Crossings inside the range of the repeats are noise, and are left out.
    """

    before: Annotated[Count, doc("Index of the variant that is faster at the first length.")] = (
        field(name="from")
    )
    after: Annotated[Count, doc("Index of the variant that is faster at the second length.")] = (
        field(name="to")
    )
    length: Annotated[
        NonNegative,
        doc(
            "Where the medians cross, on straight lines between the measured lengths with both "
            "axes logarithmic."
        ),
    ]
    between: Annotated[
        tuple[PositiveCount, ...],
        Meta(min_length=2, max_length=2, description="The two measured lengths."),
    ]


class Done(Response, frozen=True):
    """The event `done`, sent at the end of a sweep."""

    cells: Annotated[Count, doc("Number of cells.")]
    crossovers: tuple[Crossover, ...]


class Stopped(Response, frozen=True):
    """The event `error`, sent if a sweep ends early."""

    problem: Annotated[Mapping[str, Any], doc("The problem document.")]
