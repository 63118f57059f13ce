"""The responses below `/v2`, as structs: the Open Inference Protocol and Triton's extensions.

The service builds them, and the OpenAPI document takes its schemas from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeAlias,
)

from msgspec import Meta

from qkv.tensors import DTYPES
from qkv.wire.response import Count, PositiveCount, Response, doc

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

Datatype: TypeAlias = Annotated[str, Meta(extra_json_schema={"enum": list(DATATYPES.values())})]
Axes: TypeAlias = Annotated[Sequence[str], doc("One letter per axis.")]
Sizes: TypeAlias = Annotated[
    Sequence[Annotated[int, Meta(extra_json_schema={"anyOf": [{"const": -1}, {"minimum": 1}]})]],
    doc("The size of each axis; -1: any size."),
]


class ModelError(Response, frozen=True):
    """The response of an error below `/v2`."""

    error: str


class ServerMetadata(Response, frozen=True):
    """The response of `GET /v2`."""

    name: Literal["qkv"]
    version: str
    extensions: Sequence[str]


class ServerLive(Response, frozen=True):
    """The response of `GET /v2/health/live`."""

    live: bool


class ServerReady(Response, frozen=True):
    """The response of `GET /v2/health/ready`: `ready` for the specification, `live` for KServe."""

    live: bool
    ready: bool


class ModelList(Response, frozen=True):
    """The response of `GET /v2/models`."""

    models: Annotated[Sequence[str], doc("The loaded models.")]


class ModelReady(Response, frozen=True):
    """The response for a loaded model."""

    name: str
    ready: Literal[True]


class ModelNotReady(Response, frozen=True):
    """The response for an unloaded model."""

    error: str
    name: str
    ready: Literal[False]


class InputParameters(Response, frozen=True):
    """Parameters of an input."""

    datatypes: Annotated[Sequence[Datatype], doc("Every datatype that it may have.")]
    axes: Axes
    optional: bool


class InputMetadata(Response, frozen=True):
    """An input of a model."""

    name: str
    datatype: Datatype
    shape: Sizes
    parameters: InputParameters


class OutputParameters(Response, frozen=True):
    """Parameters of an output."""

    axes: Axes
    on_request: Annotated[bool, doc("True if it is returned only if the request names it.")]


class OutputMetadata(Response, frozen=True):
    """An output of a model."""

    name: str
    datatype: Datatype
    shape: Sizes
    parameters: OutputParameters


class ModelMetadata(Response, frozen=True):
    """The response of `GET /v2/models/{model}`."""

    name: str
    versions: Sequence[Literal["1"]]
    platform: Literal["qkv"]
    inputs: tuple[InputMetadata, ...]
    outputs: tuple[OutputMetadata, ...]


class VersionPolicy(Response, frozen=True):
    """Triton's ModelVersionPolicy: the latest version is served."""

    latest: Mapping[str, Count]


class InputConfig(Response, frozen=True):
    """Triton's ModelInput."""

    name: str
    data_type: str
    dims: Sizes
    optional: bool


class OutputConfig(Response, frozen=True):
    """Triton's ModelOutput."""

    name: str
    data_type: str
    dims: Sizes


class ModelInstances(Response, frozen=True):
    """Triton's ModelInstanceGroup."""

    name: str
    kind: Literal["KIND_CPU", "KIND_GPU"]
    count: PositiveCount


class StringValue(Response, frozen=True):
    """Triton's ModelParameter."""

    string_value: Annotated[str, doc("The JSON schema of the parameter.")]


class TransactionPolicy(Response, frozen=True):
    """Triton's ModelTransactionPolicy."""

    decoupled: Literal[False]


class ModelConfig(Response, frozen=True):
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


class Stage(Response, frozen=True):
    """Number of runs of a stage, and their time."""

    count: Count
    ns: Annotated[Count, doc("Nanoseconds in total.")]


class InferenceStatistics(Response, frozen=True):
    """Stages of all requests of a model."""

    success: Stage
    fail: Stage
    queue: Stage
    compute_input: Stage
    compute_infer: Stage
    compute_output: Stage


class BatchStatistics(Response, frozen=True):
    """Stages of all batches of one size."""

    batch_size: PositiveCount
    compute_input: Stage
    compute_infer: Stage
    compute_output: Stage


class ModelStatistics(Response, frozen=True):
    """Statistics of a model, summed over all workers."""

    name: str
    version: Literal["1"]
    last_inference: Annotated[Count, doc("Milliseconds since 1970; 0: none yet.")]
    inference_count: Count
    execution_count: Count
    inference_stats: InferenceStatistics
    batch_stats: tuple[BatchStatistics, ...]


class StatisticsResponse(Response, frozen=True):
    """The response of `GET /v2/models/stats` and `GET /v2/models/{model}/stats`."""

    model_stats: tuple[ModelStatistics, ...]


class RepositoryModel(Response, frozen=True):
    """An entry in the response of `POST /v2/repository/index`."""

    name: str
    version: Literal["1"]
    state: Literal["READY", "UNAVAILABLE"]
    reason: Annotated[str, doc("Empty if the model is ready.")]


class Loaded(Response, frozen=True):
    """The response of `POST /v2/repository/models/{model}/load`."""

    name: str
    load: Literal[True]


class Unloaded(Response, frozen=True):
    """The response of `POST /v2/repository/models/{model}/unload`."""

    name: str
    unload: Literal[True]


class BinarySize(Response, frozen=True):
    """Parameters of a tensor whose bytes follow the JSON."""

    binary_data_size: Annotated[Count, doc("Bytes of the tensor.")]


class InferTensor(Response, frozen=True):
    """A tensor: its numbers in `data`, or the number of its bytes in `parameters`.

    The bytes follow the JSON, in the order of the list.
    """

    name: str
    datatype: Datatype
    shape: Annotated[Sequence[Count], Meta(max_length=8)]
    parameters: BinarySize | None = None
    data: Annotated[Any, doc("Flat, or nested as in the shape.")] = None


class InferResponse(Response, frozen=True, kw_only=True):
    """The response of `POST /v2/models/{model}/infer`."""

    model_name: str
    model_version: Literal["1"]
    id: Annotated[str | None, doc("The id of the request, if it has one.")] = None
    parameters: Annotated[Mapping[str, Any], doc("The timing.")]
    outputs: Sequence[InferTensor]
