"""Problems, probes, the timing of runs, comparisons and sweeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field
from pydantic.json_schema import SkipJsonSchema

from qkv.wire.response import Count, NonNegative, PositiveCount, Response, doc, omitted
from qkv.wire.tensor_types import enumeration

NOTES: Final = (
    "Parameters of a loaded layer that the variant lacks and does not apply, and facts that make "
    "the numbers less exact"
)


WeightsKind: Any = enumeration("WeightsKind", "stochastic", "signed", "unnormalised")


class Problem(Response):
    """A problem document (RFC 9457)."""

    type: Annotated[str, doc("The kind of problem; stable.")]
    title: str
    status: int
    detail: Annotated[str, doc("The received and the expected value.")]
    pointer: str | SkipJsonSchema[None] = omitted(
        "JSON pointer to the invalid part of the request."
    )
    limit: Count | SkipJsonSchema[None] = omitted("The exceeded limit, with 413.")


ProblemDocument: Any = Annotated[
    Mapping[str, Any], BeforeValidator(lambda value: value, json_schema_input_type=Problem)
]
"""A problem document as JSON, with the members of a newer service."""


class Passed(Response):
    """The response of a probe whose check passes."""

    status: Literal["ok"]


class Failed(Response):
    """The response of a probe whose check fails."""

    status: Literal["down"]


class Timing(Response):
    """Measured times in milliseconds; computed counts of flops and bytes."""

    queue_ms: Annotated[NonNegative, doc("In the queue.")]
    transfer_ms: Annotated[NonNegative, doc("Copying tensors to the device and back.")]
    compute_ms: Annotated[NonNegative, doc("Computing the variant and its layer.")]
    total_ms: Annotated[NonNegative, doc("From the last byte of the request to the response.")]
    batch_size: Annotated[PositiveCount, doc("Requests in the batch, including this one.")]
    device: Annotated[str, doc("The device of the run.")]
    backend: Annotated[str, doc("The code path of the variant.")]
    flops: Annotated[Count, doc("Of the matrix products.")]
    bytes: Annotated[Count, doc("Of all input and output tensors.")]


class OutputError(Response):
    """The error of an output against a reference; null if it is not finite or undefined."""

    relative_error: Annotated[
        NonNegative | None,
        doc("Frobenius norm of the difference, divided by that of the reference."),
    ]
    largest_error: Annotated[NonNegative | None, doc("The largest absolute difference.")]
    cosine: Annotated[
        Annotated[float, Field(ge=-1, le=1)] | None,
        doc("Cosine of the angle between the two, as vectors; null if one is all zeros."),
    ]


class Divergence(Response):
    """The divergence of rows of weights from the baseline's rows."""

    mean: Annotated[float, doc("The mean over the rows.")]
    worst: Annotated[float, doc("That of the worst row.")]


class Entropy(Response):
    """The entropy of rows of weights, in nats."""

    mean: Annotated[NonNegative, doc("The mean over the rows.")]
    least: NonNegative
    most: NonNegative


class BaselineWeights(Response):
    """The weights of the baseline. It has no divergence from itself."""

    entropy: Annotated[Entropy | None, doc("Of its rows; null if they have none.")]

    total_variation: ClassVar[None] = None
    kl_divergence: ClassVar[None] = None
    js_divergence: ClassVar[None] = None
    rank_correlation: ClassVar[None] = None


class WeightsComparison(Response):
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


class HeadFigures(Response):
    """One query head of a variant; base class for heads of the baseline and of other variants."""

    output: Annotated[
        OutputError | None,
        doc(
            "As of the variant, for the head's part of the output. Null also if the layer has an "
            "output projection, which adds up the heads."
        ),
    ]
    weights: Weights | None


class ComparedHead(HeadFigures):
    """One query head of a variant, and its distance from the same head of the baseline."""

    weights: Annotated[WeightsComparison | None, doc("Null if no rows were compared.")]


class BaselineHead(HeadFigures):
    """One query head of the baseline."""

    weights: Annotated[BaselineWeights | None, doc("Null if no rows were compared.")]


class VariantTiming(Response):
    """Compute times of the repeats, in milliseconds."""

    median_ms: NonNegative
    least_ms: NonNegative
    most_ms: NonNegative
    repeats: PositiveCount


class VariantComparison(Response):
    """The measurements of a variant; base class for the baseline and the other variants."""

    variant: Annotated[str, doc("The variant's name.")]
    parameters: Annotated[Mapping[str, Any], doc("As in the request.")]
    weights_are: WeightsKind
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
    heads: tuple[HeadFigures, ...] | SkipJsonSchema[None] = omitted(
        "Each query head, in order; left out without `per_head` in the request."
    )


class ComparedVariant(VariantComparison):
    """The measurements of a variant, and its distance from the baseline."""

    weights: Annotated[WeightsComparison | None, doc("Null if no rows were compared.")]
    heads: tuple[ComparedHead, ...] | SkipJsonSchema[None] = omitted(
        "Each query head, in order; left out without `per_head` in the request."
    )


class BaselineComparison(VariantComparison):
    """The measurements of the baseline, which the variants are compared with."""

    weights: Annotated[BaselineWeights | None, doc("Null if no rows were compared.")]
    heads: tuple[BaselineHead, ...] | SkipJsonSchema[None] = omitted(
        "Each query head, in order; left out without `per_head` in the request."
    )


class CompareTiming(Response):
    """Times of all jobs of a comparison, in milliseconds."""

    queue_ms: Annotated[NonNegative, doc("In the queue.")]
    transfer_ms: Annotated[NonNegative, doc("Copying tensors to the device and back.")]
    compute_ms: Annotated[NonNegative, doc("Computing.")]
    runs: Annotated[PositiveCount, doc("Number of jobs.")]
    device: Annotated[str, doc("Device of the jobs.")]
    total_ms: Annotated[NonNegative, doc("From the last byte of the request to the response.")]


class CompareResponse(Response):
    """The response of `POST /v1/compare`."""

    anchor: BaselineComparison
    variants: Annotated[
        tuple[ComparedVariant, ...],
        Field(min_length=1, description="In the order of the request."),
    ]
    notes: Annotated[
        tuple[str, ...], doc("Facts that the figures do not show, in a sentence or two each.")
    ]
    timing: CompareTiming


class Progress(Response):
    """The event `progress` of a sweep, sent before each cell."""

    done: Annotated[Count, doc("Cells that are measured.")]
    total: Annotated[Count, doc("Cells of the sweep.")]
    variant: Annotated[str, doc("The variant of the next cell.")]
    length: Annotated[PositiveCount, doc("The length of the next cell.")]


class Cell(Response):
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
    median_ms: NonNegative | SkipJsonSchema[None] = omitted("Median compute time of the repeats.")
    least_ms: NonNegative | SkipJsonSchema[None] = omitted()
    most_ms: NonNegative | SkipJsonSchema[None] = omitted()
    repeats: PositiveCount | SkipJsonSchema[None] = omitted()
    flops: Count | SkipJsonSchema[None] = omitted("Of the matrix products, by the formula.")
    bytes: Count | SkipJsonSchema[None] = omitted("Of all input tensors and the output.")
    peak_bytes: Count | SkipJsonSchema[None] = omitted(
        "Peak memory of torch's allocator in a run, beyond the inputs."
    )
    problem: ProblemDocument | SkipJsonSchema[None] = omitted(
        "The problem document, if the variant cannot run."
    )
    way: str | SkipJsonSchema[None] = omitted(
        "How a token is computed: state, cache or recompute; None: a whole call."
    )
    held_bytes: Count | SkipJsonSchema[None] = omitted(
        "Bytes of the cache or of the state, kept from token to token."
    )


class Crossover(Response):
    """A pair of variants and the lengths between which the other one becomes faster.

    At both lengths the slowest repeat of the faster variant is below the fastest repeat of the
    other. Crossings inside the range of the repeats are noise, and are left out.
    """

    before: Annotated[
        Count,
        Field(alias="from", description="Index of the variant that is faster at the first length."),
    ]
    after: Annotated[
        Count,
        Field(alias="to", description="Index of the variant that is faster at the second length."),
    ]
    length: Annotated[
        NonNegative,
        doc(
            "Where the medians cross, on straight lines between the measured lengths with both "
            "axes logarithmic."
        ),
    ]
    between: Annotated[
        tuple[PositiveCount, ...],
        Field(min_length=2, max_length=2, description="The two measured lengths."),
    ]


class Done(Response):
    """The event `done`, sent at the end of a sweep."""

    cells: Annotated[Count, doc("Number of cells.")]
    crossovers: tuple[Crossover, ...]


class Stopped(Response):
    """The event `error`, sent if a sweep ends early."""

    problem: Annotated[ProblemDocument, doc("The problem document.")]
