"""The responses of `POST /v1/compare`, `POST /v1/sweep` and `/v2`, as dataclasses.

The service builds them, `wire.json.dump` encodes them, the client parses them with `from_json`,
and the OpenAPI document takes its schemas from them. A field whose default is None is left out of
the JSON while it is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from qkv.tensors import DTYPES

__all__ = [
    "DATATYPES",
    "BaselineComparison",
    "BaselineWeights",
    "BatchStatistics",
    "BinarySize",
    "Cell",
    "CompareResponse",
    "CompareTiming",
    "ComparedVariant",
    "Crossover",
    "Divergence",
    "Done",
    "Entropy",
    "InferResponse",
    "InferTensor",
    "InferenceStatistics",
    "InputConfig",
    "InputMetadata",
    "InputParameters",
    "Loaded",
    "ModelConfig",
    "ModelError",
    "ModelInstances",
    "ModelList",
    "ModelMetadata",
    "ModelNotReady",
    "ModelReady",
    "ModelStatistics",
    "OutputConfig",
    "OutputError",
    "OutputMetadata",
    "OutputParameters",
    "Progress",
    "RepositoryModel",
    "ServerLive",
    "ServerMetadata",
    "ServerReady",
    "Stage",
    "StatisticsResponse",
    "Stopped",
    "StringValue",
    "TransactionPolicy",
    "Unloaded",
    "VariantComparison",
    "VariantTiming",
    "VersionPolicy",
    "Weights",
    "WeightsComparison",
    "from_json",
    "is_left_out",
    "json_fields",
    "json_name",
]

_T = TypeVar("_T")
_JSON_NAME: Final = "json_name"

DATATYPES: Final = {
    "float64": "FP64",
    "float32": "FP32",
    "float16": "FP16",
    "bfloat16": "BF16",
    "int64": "INT64",
    "bool": "BOOL",
}
"""The Open Inference Protocol's name of each dtype."""
assert DATATYPES.keys() == DTYPES.keys()


class _Keywords:
    """Keywords that a field adds to its JSON schema; pydantic calls the hook by its name."""

    def __init__(self, **keywords: Any) -> None:
        self._keywords = keywords

    def __get_pydantic_json_schema__(
        self, core_schema: Any, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        return handler(core_schema) | self._keywords


def _doc(description: str) -> _Keywords:
    return _Keywords(description=description)


Count: TypeAlias = Annotated[int, _Keywords(minimum=0)]
PositiveCount: TypeAlias = Annotated[int, _Keywords(minimum=1)]
NonNegative: TypeAlias = Annotated[float, _Keywords(minimum=0)]
Datatype: TypeAlias = Annotated[str, _Keywords(enum=list(DATATYPES.values()))]
Axes: TypeAlias = Annotated[Sequence[str], _doc("One letter per axis.")]
Sizes: TypeAlias = Annotated[
    Sequence[Annotated[int, _Keywords(anyOf=[{"const": -1}, {"minimum": 1}])]],
    _doc("The size of each axis; -1: any size."),
]


# ---------------------------------------------------------------- compare


@dataclass(frozen=True, slots=True)
class OutputError:
    """The error of an output against a reference; null if it is not finite or undefined."""

    relative_error: Annotated[
        NonNegative | None,
        _doc("Frobenius norm of the difference, divided by that of the reference."),
    ]
    largest_error: Annotated[NonNegative | None, _doc("The largest absolute difference.")]
    cosine: Annotated[
        Annotated[float, _Keywords(minimum=-1, maximum=1)] | None,
        _doc("Cosine of the angle between the two, as vectors; null if one is all zeros."),
    ]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The divergence of rows of weights from the anchor's rows."""

    mean: Annotated[float, _doc("The mean over the rows.")]
    worst: Annotated[float, _doc("That of the worst row.")]


@dataclass(frozen=True, slots=True)
class Entropy:
    """The entropy of rows of weights, in nats."""

    mean: Annotated[NonNegative, _doc("The mean over the rows.")]
    least: NonNegative
    most: NonNegative


@dataclass(frozen=True, slots=True)
class BaselineWeights:
    """The weights of the anchor. It has no divergence from itself."""

    entropy: Annotated[Entropy | None, _doc("Of its rows; null if they have none.")]

    total_variation: ClassVar[None] = None
    kl_divergence: ClassVar[None] = None
    js_divergence: ClassVar[None] = None
    rank_correlation: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class WeightsComparison:
    """The weights of a variant against the anchor's, row by row; null if a measure is undefined."""

    total_variation: Annotated[
        Divergence | None,
        _doc("Half the sum of |a - b|, from 0 to 1 if both are stochastic."),
    ]
    kl_divergence: Annotated[
        Divergence | None,
        _doc("sum a log(a / b), a the anchor's row, in nats; null if it is infinite."),
    ]
    js_divergence: Annotated[
        Divergence | None,
        _doc("Jensen-Shannon: the mean of both divergences from (a + b) / 2, to log 2."),
    ]
    rank_correlation: Annotated[
        Divergence | None,
        _doc(
            "Spearman's, of the keys that either gives weight; the worst is the least. "
            "Null if no row has an order."
        ),
    ]
    entropy: Annotated[Entropy | None, _doc("Of its rows; null if they have none.")]


Weights: TypeAlias = WeightsComparison | BaselineWeights


@dataclass(frozen=True, slots=True)
class VariantTiming:
    """Compute times of the repeats, in milliseconds."""

    median_ms: NonNegative
    least_ms: NonNegative
    most_ms: NonNegative
    repeats: PositiveCount


@dataclass(frozen=True, slots=True)
class VariantComparison:
    """The measurements of a variant; base of the anchor's and of the others'."""

    variant: Annotated[str, _doc("The variant's name.")]
    parameters: Annotated[Mapping[str, Any], _doc("As in the request.")]
    weights_are: Annotated[str, _Keywords(enum=["stochastic", "signed", "unnormalised"])]
    output: Annotated[
        OutputError | None,
        _doc(
            "Error against the anchor's output. For the anchor: against its own in float64, null "
            "if it ran in float64."
        ),
    ]
    weights: Weights | None
    timing: Annotated[VariantTiming, _doc("Of each repeat, alone on the device.")]
    flops: Annotated[Count, _doc("Of the matrix products, by the formula.")]
    bytes: Annotated[Count, _doc("Of all input tensors and the output.")]
    peak_bytes: Annotated[
        Count, _doc("Peak memory of torch's allocator in a run, beyond the inputs.")
    ]


@dataclass(frozen=True, slots=True)
class ComparedVariant(VariantComparison):
    """The measurements of a variant, and its distance from the anchor."""

    weights: Annotated[WeightsComparison | None, _doc("Null if no rows were compared.")]


@dataclass(frozen=True, slots=True)
class BaselineComparison(VariantComparison):
    """The measurements of the anchor, which the variants are compared with."""

    weights: Annotated[BaselineWeights | None, _doc("Null if no rows were compared.")]


@dataclass(frozen=True, slots=True)
class CompareTiming:
    """Times of all jobs of a comparison, in milliseconds."""

    queue_ms: Annotated[NonNegative, _doc("In the queue.")]
    transfer_ms: Annotated[NonNegative, _doc("Copying tensors to the device and back.")]
    compute_ms: Annotated[NonNegative, _doc("Computing.")]
    runs: Annotated[PositiveCount, _doc("Number of jobs.")]
    device: Annotated[str, _doc("Device of the jobs.")]
    total_ms: Annotated[NonNegative, _doc("From the last byte of the request to the response.")]


@dataclass(frozen=True, slots=True)
class CompareResponse:
    """The response of `POST /v1/compare`."""

    anchor: BaselineComparison
    variants: Annotated[
        tuple[ComparedVariant, ...],
        _Keywords(minItems=1, description="In the order of the request."),
    ]
    notes: Annotated[
        tuple[str, ...], _doc("Facts that the figures do not show, in a sentence or two each.")
    ]
    timing: CompareTiming


# ---------------------------------------------------------------- sweep


@dataclass(frozen=True, slots=True)
class Progress:
    """The event `progress` of a sweep, sent before each cell."""

    done: Annotated[Count, _doc("Cells that are measured.")]
    total: Annotated[Count, _doc("Cells of the sweep.")]
    variant: Annotated[str, _doc("The variant of the next cell.")]
    length: Annotated[PositiveCount, _doc("The length of the next cell.")]


@dataclass(frozen=True, slots=True)
class Cell:
    """The event `cell` of a sweep: one variant at one length, with times or with a problem.

    Without a problem all other fields are set; with one, those from `median_ms` on are None.
    """

    index: Annotated[Count, _doc("Index of the variant in the request.")]
    parameters: Annotated[Mapping[str, Any], _doc("As in the request.")]
    variant: Annotated[str, _doc("The variant's name.")]
    length: Annotated[PositiveCount, _doc("Length of queries and keys.")]
    median_ms: Annotated[NonNegative | None, _doc("Median compute time of the repeats.")] = None
    least_ms: NonNegative | None = None
    most_ms: NonNegative | None = None
    repeats: PositiveCount | None = None
    flops: Annotated[Count | None, _doc("Of the matrix products, by the formula.")] = None
    bytes: Annotated[Count | None, _doc("Of all input tensors and the output.")] = None
    peak_bytes: Annotated[
        Count | None, _doc("Peak memory of torch's allocator in a run, beyond the inputs.")
    ] = None
    problem: Annotated[
        Mapping[str, Any] | None, _doc("The problem document, if the variant cannot run.")
    ] = None


@dataclass(frozen=True, slots=True)
class Crossover:
    """A pair of variants and the lengths between which the other one becomes faster.

    At both lengths the slowest repeat of the faster variant is below the fastest repeat of the
    other. Crossings inside the range of the repeats are noise, and are left out.
    """

    before: Annotated[Count, _doc("Index of the variant that is faster at the first length.")] = (
        field(metadata={_JSON_NAME: "from"})
    )
    after: Annotated[Count, _doc("Index of the variant that is faster at the second length.")] = (
        field(metadata={_JSON_NAME: "to"})
    )
    length: Annotated[
        NonNegative,
        _doc(
            "Where the medians cross, on straight lines between the measured lengths with both "
            "axes logarithmic."
        ),
    ]
    between: Annotated[tuple[PositiveCount, PositiveCount], _doc("The two measured lengths.")]


@dataclass(frozen=True, slots=True)
class Done:
    """The event `done`, sent at the end of a sweep."""

    cells: Annotated[Count, _doc("Number of cells.")]
    crossovers: tuple[Crossover, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    """The event `error`, sent if a sweep ends early."""

    problem: Annotated[Mapping[str, Any], _doc("The problem document.")]


# ---------------------------------------------------------------- Open Inference Protocol, V2


@dataclass(frozen=True, slots=True)
class ModelError:
    """The response of an error below `/v2`."""

    error: str


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """The response of `GET /v2`."""

    name: Literal["qkv"]
    version: str
    extensions: Sequence[str]


@dataclass(frozen=True, slots=True)
class ServerLive:
    """The response of `GET /v2/health/live`."""

    live: bool


@dataclass(frozen=True, slots=True)
class ServerReady:
    """The response of `GET /v2/health/ready`: `ready` for the specification, `live` for KServe."""

    live: bool
    ready: bool


@dataclass(frozen=True, slots=True)
class ModelList:
    """The response of `GET /v2/models`."""

    models: Annotated[Sequence[str], _doc("The loaded models.")]


@dataclass(frozen=True, slots=True)
class ModelReady:
    """The response for a loaded model."""

    name: str
    ready: Literal[True]


@dataclass(frozen=True, slots=True)
class ModelNotReady:
    """The response for an unloaded model."""

    error: str
    name: str
    ready: Literal[False]


@dataclass(frozen=True, slots=True)
class InputParameters:
    """Parameters of an input."""

    datatypes: Annotated[Sequence[Datatype], _doc("Every datatype that it may have.")]
    axes: Axes
    optional: bool


@dataclass(frozen=True, slots=True)
class InputMetadata:
    """An input of a model."""

    name: str
    datatype: Datatype
    shape: Sizes
    parameters: InputParameters


@dataclass(frozen=True, slots=True)
class OutputParameters:
    """Parameters of an output."""

    axes: Axes
    on_request: Annotated[bool, _doc("True if it is returned only if the request names it.")]


@dataclass(frozen=True, slots=True)
class OutputMetadata:
    """An output of a model."""

    name: str
    datatype: Datatype
    shape: Sizes
    parameters: OutputParameters


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The response of `GET /v2/models/{model}`."""

    name: str
    versions: Annotated[Sequence[str], _Keywords(const=["1"])]
    platform: Literal["qkv"]
    inputs: tuple[InputMetadata, ...]
    outputs: tuple[OutputMetadata, ...]


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Triton's ModelVersionPolicy: the latest version is served."""

    latest: Mapping[str, Count]


@dataclass(frozen=True, slots=True)
class InputConfig:
    """Triton's ModelInput."""

    name: str
    data_type: str
    dims: Sizes
    optional: bool


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """Triton's ModelOutput."""

    name: str
    data_type: str
    dims: Sizes


@dataclass(frozen=True, slots=True)
class ModelInstances:
    """Triton's ModelInstanceGroup."""

    name: str
    kind: Literal["KIND_CPU", "KIND_GPU"]
    count: PositiveCount


@dataclass(frozen=True, slots=True)
class StringValue:
    """Triton's ModelParameter."""

    string_value: Annotated[str, _doc("The JSON schema of the parameter.")]


@dataclass(frozen=True, slots=True)
class TransactionPolicy:
    """Triton's ModelTransactionPolicy."""

    decoupled: Literal[False]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The response of `GET /v2/models/{model}/config`: ModelConfig of Triton's model_config.proto.

    max_batch_size is 0: B is an axis like any other, and batches form of requests, not of their
    items.
    """

    name: str
    platform: Literal[""]
    backend: Literal["qkv"]
    version_policy: VersionPolicy
    max_batch_size: Literal[0]
    input: tuple[InputConfig, ...]
    output: tuple[OutputConfig, ...]
    instance_group: tuple[ModelInstances, ...]
    parameters: Mapping[str, StringValue]
    model_transaction_policy: TransactionPolicy


@dataclass(frozen=True, slots=True)
class Stage:
    """Number of runs of a stage, and their time."""

    count: Count
    ns: Annotated[Count, _doc("Nanoseconds in total.")]


@dataclass(frozen=True, slots=True)
class InferenceStatistics:
    """Stages of all requests of a model."""

    success: Stage
    fail: Stage
    queue: Stage
    compute_input: Stage
    compute_infer: Stage
    compute_output: Stage


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Stages of all batches of one size."""

    batch_size: PositiveCount
    compute_input: Stage
    compute_infer: Stage
    compute_output: Stage


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """Statistics of a model, summed over all workers."""

    name: str
    version: Literal["1"]
    last_inference: Annotated[Count, _doc("Milliseconds since 1970; 0: none yet.")]
    inference_count: Count
    execution_count: Count
    inference_stats: InferenceStatistics
    batch_stats: tuple[BatchStatistics, ...]


@dataclass(frozen=True, slots=True)
class StatisticsResponse:
    """The response of `GET /v2/models/stats` and `GET /v2/models/{model}/stats`."""

    model_stats: tuple[ModelStatistics, ...]


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """An entry in the response of `POST /v2/repository/index`."""

    name: str
    version: Literal["1"]
    state: Literal["READY", "UNAVAILABLE"]
    reason: Annotated[str, _doc("Empty if the model is ready.")]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The response of `POST /v2/repository/models/{model}/load`."""

    name: str
    load: Literal[True] = True


@dataclass(frozen=True, slots=True)
class Unloaded:
    """The response of `POST /v2/repository/models/{model}/unload`."""

    name: str
    unload: Literal[True] = True


@dataclass(frozen=True, slots=True)
class BinarySize:
    """Parameters of a tensor whose bytes follow the JSON."""

    binary_data_size: Annotated[Count, _doc("Bytes of the tensor.")]


@dataclass(frozen=True, slots=True)
class InferTensor:
    """A tensor: its numbers in `data`, or the number of its bytes in `parameters`.

    The bytes follow the JSON, in the order of the list.
    """

    name: str
    datatype: Datatype
    shape: Annotated[Sequence[Count], _Keywords(maxItems=8)]
    parameters: BinarySize | None = None
    data: Annotated[Any, _doc("Flat, or nested as in the shape.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InferResponse:
    """The response of `POST /v2/models/{model}/infer`."""

    model_name: str
    model_version: Literal["1"]
    id: Annotated[str | None, _doc("The id of the request, if it has one.")] = None
    parameters: Annotated[Mapping[str, Any], _doc("The timing.")]
    outputs: Sequence[InferTensor]


# ---------------------------------------------------------------- from and to JSON


class _JsonField(NamedTuple):
    """A field of a dataclass in JSON.

    Attributes:
        name: the attribute.
        key: its name in JSON.
        left_out: it is left out while it is None.
        parse: parses its JSON value.
    """

    name: str
    key: str
    left_out: bool
    parse: Callable[[Any], Any]


def json_fields(response: Any) -> dict[str, Any]:
    """Returns the fields of a response by their JSON names, without those that are left out.

    Raises:
        TypeError: it is not one of these dataclasses.
    """
    kind: Any = type(response)
    values = ((f, getattr(response, f.name)) for f in _json_fields(kind))
    return {f.key: value for f, value in values if not (f.left_out and value is None)}


def from_json(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """Returns a dataclass with values from JSON. Ignores unknown fields, as of a newer service.

    Raises:
        KeyError, TypeError: a field is missing, or an object is not an object.
    """
    hashable: Any = kind  # for mypy
    return kind(
        **{
            f.name: f.parse(values[f.key])
            for f in _json_fields(hashable)
            if f.key in values or not f.left_out
        }
    )


def json_name(attribute: Field[Any]) -> str:
    """Returns the name of a field in JSON."""
    return str(attribute.metadata.get(_JSON_NAME, attribute.name))


def is_left_out(attribute: Field[Any]) -> bool:
    """Returns True if a field is left out of the JSON while it is None."""
    return attribute.default is None


@cache
def _json_fields(kind: Any) -> tuple[_JsonField, ...]:
    if not is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is not a response")
    hints = get_type_hints(kind)
    return tuple(
        _JsonField(f.name, json_name(f), is_left_out(f), _parser(hints[f.name]))
        for f in fields(kind)
    )


def _parser(hint: Any) -> Callable[[Any], Any]:
    """Returns the function that parses a JSON value into a field of this type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if type(None) in arguments:
        parse = _parser(next(a for a in arguments if a is not type(None)))
        return lambda value: None if value is None else parse(value)
    if origin is tuple:
        parse = _parser(arguments[0])
        return lambda value: tuple(map(parse, value))
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: from_json(hint, value)
    return lambda value: value
