"""The responses below `/v2`: the Open Inference Protocol and Triton's extensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from qkv.tensors import DTYPES
from qkv.wire.response import Count, PositiveCount, Response, doc, omitted
from qkv.wire.responses import NOTES, Timing
from qkv.wire.tensor_types import InferData, enumeration

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

Datatype: Any = enumeration("Datatype", *DATATYPES.values())
Axes: TypeAlias = Annotated[Sequence[str], doc("One letter per axis.")]
Sizes: TypeAlias = Annotated[
    Sequence[Annotated[int, Field(json_schema_extra={"anyOf": [{"const": -1}, {"minimum": 1}]})]],
    doc("The size of each axis; -1: any size."),
]


class ModelError(Response):
    """The response of an error below `/v2`."""

    error: str


class ServerMetadata(Response):
    """The response of `GET /v2`."""

    name: Literal["qkv"]
    version: str
    extensions: Sequence[str]


class ServerLive(Response):
    """The response of `GET /v2/health/live`."""

    live: bool


class ServerReady(Response):
    """The response of `GET /v2/health/ready`: `ready` for the specification, `live` for KServe."""

    live: bool
    ready: bool


class ModelList(Response):
    """The response of `GET /v2/models`."""

    models: Annotated[Sequence[str], doc("The loaded models.")]


class ModelReady(Response):
    """The response for a loaded model."""

    name: str
    ready: Literal[True]


class ModelNotReady(Response):
    """The response for an unloaded model."""

    error: str
    name: str
    ready: Literal[False]


class InputParameters(Response):
    """Parameters of an input."""

    datatypes: Annotated[Sequence[Datatype], doc("Every datatype that it may have.")]
    axes: Axes
    optional: bool


class InputMetadata(Response):
    """An input of a model."""

    name: str
    datatype: Datatype
    shape: Sizes
    parameters: InputParameters


class OutputParameters(Response):
    """Parameters of an output."""

    axes: Axes
    on_request: Annotated[bool, doc("True if it is returned only if the request names it.")]


class OutputMetadata(Response):
    """An output of a model."""

    name: str
    datatype: Datatype
    shape: Sizes
    parameters: OutputParameters


class ModelMetadata(Response):
    """The response of `GET /v2/models/{model}`."""

    name: str
    versions: Sequence[Literal["1"]]
    platform: Literal["qkv"]
    inputs: tuple[InputMetadata, ...]
    outputs: tuple[OutputMetadata, ...]


class VersionPolicy(Response):
    """Triton's ModelVersionPolicy: the latest version is served."""

    latest: Mapping[str, Count]


class InputConfig(Response):
    """Triton's ModelInput."""

    name: str
    data_type: str
    dims: Sizes
    optional: bool


class OutputConfig(Response):
    """Triton's ModelOutput."""

    name: str
    data_type: str
    dims: Sizes


class ModelInstances(Response):
    """Triton's ModelInstanceGroup."""

    name: str
    kind: Literal["KIND_CPU", "KIND_GPU"]
    count: PositiveCount


class StringValue(Response):
    """Triton's ModelParameter."""

    string_value: Annotated[str, doc("The JSON schema of the parameter.")]


class TransactionPolicy(Response):
    """Triton's ModelTransactionPolicy."""

    decoupled: Literal[False]


class ModelConfig(Response):
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


class Stage(Response):
    """Number of runs of a stage, and their time."""

    count: Count
    ns: Annotated[Count, doc("Nanoseconds in total.")]


class InferenceStatistics(Response):
    """Stages of all requests of a model."""

    success: Stage
    fail: Stage
    queue: Stage
    compute_input: Stage
    compute_infer: Stage
    compute_output: Stage


class BatchStatistics(Response):
    """Stages of all batches of one size."""

    batch_size: PositiveCount
    compute_input: Stage
    compute_infer: Stage
    compute_output: Stage


class ModelStatistics(Response):
    """Statistics of a model, summed over all workers."""

    name: str
    version: Literal["1"]
    last_inference: Annotated[Count, doc("Milliseconds since 1970; 0: none yet.")]
    inference_count: Count
    execution_count: Count
    inference_stats: InferenceStatistics
    batch_stats: tuple[BatchStatistics, ...]


class StatisticsResponse(Response):
    """The response of `GET /v2/models/stats` and `GET /v2/models/{model}/stats`."""

    model_stats: tuple[ModelStatistics, ...]


class RepositoryModel(Response):
    """An entry in the response of `POST /v2/repository/index`."""

    name: str
    version: Literal["1"]
    state: Literal["READY", "UNAVAILABLE"]
    reason: Annotated[str, doc("Empty if the model is ready.")]


class Loaded(Response):
    """The response of `POST /v2/repository/models/{model}/load`."""

    name: str
    load: Literal[True]


class Unloaded(Response):
    """The response of `POST /v2/repository/models/{model}/unload`."""

    name: str
    unload: Literal[True]


class BinarySize(Response):
    """Parameters of a tensor whose bytes follow the JSON."""

    binary_data_size: Annotated[Count, doc("Bytes of the tensor.")]


class InferTensor(Response):
    """A tensor: its numbers in `data`, or the number of its bytes in `parameters`.

    The bytes follow the JSON, in the order of the list.
    """

    name: str
    datatype: Datatype
    shape: Annotated[Sequence[Count], Field(max_length=8)]
    parameters: BinarySize | SkipJsonSchema[None] = omitted()
    data: InferData | SkipJsonSchema[None] = omitted()


class InferParameters(Timing):
    """The timing of a run, and notes."""

    notes: str | SkipJsonSchema[None] = omitted(f"{NOTES}, separated by semicolons.")


class InferResponse(Response):
    """The response of `POST /v2/models/{model}/infer`."""

    model_name: str
    model_version: Literal["1"]
    id: str | SkipJsonSchema[None] = omitted("The id of the request, if it has one.")
    parameters: InferParameters
    outputs: Sequence[InferTensor]
