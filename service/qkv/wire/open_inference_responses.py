"""The responses below `/v2`, as dataclasses: the Open Inference Protocol and Triton's extensions.

The service builds them, and the OpenAPI document takes its schemas from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeAlias,
)

from qkv.tensors import DTYPES
from qkv.wire.response_fields import Count, Keywords, PositiveCount, doc

__all__ = [
    "DATATYPES",
    "Axes",
    "BatchStatistics",
    "BinarySize",
    "Datatype",
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
    "OutputMetadata",
    "OutputParameters",
    "RepositoryModel",
    "ServerLive",
    "ServerMetadata",
    "ServerReady",
    "Sizes",
    "Stage",
    "StatisticsResponse",
    "StringValue",
    "TransactionPolicy",
    "Unloaded",
    "VersionPolicy",
]

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

Datatype: TypeAlias = Annotated[str, Keywords(enum=list(DATATYPES.values()))]
Axes: TypeAlias = Annotated[Sequence[str], doc("One letter per axis.")]
Sizes: TypeAlias = Annotated[
    Sequence[Annotated[int, Keywords(anyOf=[{"const": -1}, {"minimum": 1}])]],
    doc("The size of each axis; -1: any size."),
]


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

    models: Annotated[Sequence[str], doc("The loaded models.")]


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

    datatypes: Annotated[Sequence[Datatype], doc("Every datatype that it may have.")]
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
    on_request: Annotated[bool, doc("True if it is returned only if the request names it.")]


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
    versions: Sequence[Literal["1"]]
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

    string_value: Annotated[str, doc("The JSON schema of the parameter.")]


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
    ns: Annotated[Count, doc("Nanoseconds in total.")]


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
    last_inference: Annotated[Count, doc("Milliseconds since 1970; 0: none yet.")]
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
    reason: Annotated[str, doc("Empty if the model is ready.")]


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

    binary_data_size: Annotated[Count, doc("Bytes of the tensor.")]


@dataclass(frozen=True, slots=True)
class InferTensor:
    """A tensor: its numbers in `data`, or the number of its bytes in `parameters`.

    The bytes follow the JSON, in the order of the list.
    """

    name: str
    datatype: Datatype
    shape: Annotated[Sequence[Count], Keywords(maxItems=8)]
    parameters: BinarySize | None = None
    data: Annotated[Any, doc("Flat, or nested as in the shape.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InferResponse:
    """The response of `POST /v2/models/{model}/infer`."""

    model_name: str
    model_version: Literal["1"]
    id: Annotated[str | None, doc("The id of the request, if it has one.")] = None
    parameters: Annotated[Mapping[str, Any], doc("The timing.")]
    outputs: Sequence[InferTensor]
