"""POST /v1/convert: converts a layer's weights to another layout, or detects their layout."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import pydantic
from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema

from qkv.api.bodies import BodyFormat, Deadline, Received, body_route
from qkv.api.job_runner import JobRunner
from qkv.api.models import (
    CLOSED,
    AnyLayout,
    LayerTensors,
    Layout,
    closed,
    documented,
    encoding_field,
)
from qkv.api.openapi.operation import in_safetensors, problem_responses
from qkv.api.request_body import TensorResponse
from qkv.api.work_threads import WorkThreads
from qkv.attention.layers.detection import MAX_DETECTED
from qkv.attention.layers.layer_options import LayerOptions
from qkv.attention.layers.qk_norm import QKNorm
from qkv.attention.layers.rope import Rope
from qkv.errors import InvalidContent
from qkv.jobs.convert import ConvertFields, convert_message, known_fields, working_bytes
from qkv.jobs.fields import field_error
from qkv.settings import Settings
from qkv.wire import layer_responses
from qkv.wire.layer_responses import ConversionCheck, RotaryOrder
from qkv.wire.response import Response as Record
from qkv.wire.response import omitted
from qkv.wire.tensor_types import Encoding, Tensor

_THREADS: Final = 2
_FIELDS: Final = ConvertFields.model_fields


class LayerCheck(pydantic.BaseModel):
    """Hidden states, and the output of the real module for them."""

    model_config = CLOSED

    x: Annotated[Tensor, Field(description="Hidden states")]
    y: Annotated[Tensor, Field(description="The module's output")]


_LayerTensors: Any = documented(dict[str, Any], LayerTensors)
_AnyLayout: Any = documented(str, AnyLayout)
_Layout: Any = documented(str | None, Layout)
_OptionalLayout: Any = documented(str | None, Layout | None)
_Check: Any = documented(dict[str, Any], LayerCheck)
_CHECKED: Final = ("<conversion>", "<detection>")  # the branches of a body, in places of errors


class ConvertRequest(ConvertFields):
    """The tensors of a layer, and the target layout."""

    model_config = ConfigDict(json_schema_extra={"required": ["from", "to", "tensors"]})

    source: _AnyLayout = Field(alias="from", description=_FIELDS["source"].description)
    tensors: _LayerTensors
    target: _Layout = Field(None, alias="to", description=_FIELDS["target"].description)
    check: SkipJsonSchema[dict[str, Any] | None] = None  # jobs refuse them with a reason
    scale: SkipJsonSchema[float | None] = None
    encoding: Encoding | None = encoding_field[1]


class DetectRequest(ConvertFields):
    """The tensors of a layer, and a check that finds their layout."""

    source: _AnyLayout = Field(alias="from", description=_FIELDS["source"].description)
    tensors: _LayerTensors
    target: _OptionalLayout = Field(None, alias="to", description=_FIELDS["target"].description)
    check: _Check = Field(description=_FIELDS["check"].description)
    encoding: Encoding | None = encoding_field[1]


def _branch(value: Any) -> str:
    check = value.get("check") if isinstance(value, Mapping) else value.check
    return _CHECKED[check is not None]


BODY_TYPE: Any = Annotated[
    Annotated[ConvertRequest, Tag(_CHECKED[0])] | Annotated[DetectRequest, Tag(_CHECKED[1])],
    Discriminator(_branch),
]


class DetectedLayer(layer_responses.DetectedLayer):
    """A way to run a layer, and how well it fits the output of the real module."""

    layout: Layout
    # the client needs no torch, which the modules of these two import
    rope: Rope | None  # type: ignore[assignment]
    qk_norm: QKNorm | None  # type: ignore[assignment]


_Detected = Annotated[Sequence[DetectedLayer], Field(min_length=1, max_length=MAX_DETECTED)]
_DETECTED: Final = "If the request has `check`: candidates, best first."
ConvertedLayer: Any = closed(
    "ConvertedLayer",
    {
        **{name: (field.annotation, field) for name, field in LayerOptions.model_fields.items()},
        "layout": (Layout, ...),
    },
)


class _Source(Record):
    source: Annotated[Layout, Field(alias="from")]
    prefix: Annotated[str, Field(description="Of the names of the layer's tensors.")]
    ignored: Annotated[
        list[str],
        Field(description="Names of tensors that belong to no part of the attention."),
    ]


class DetectResponse(_Source):
    """The candidates of a detection without a target."""

    detected: Annotated[_Detected, Field(description=_DETECTED)]


class ConvertResponse(_Source):
    """The tensors in the target layout."""

    target: Annotated[Layout, Field(alias="to")]
    rotary_order: Annotated[
        RotaryOrder | None, Field(description="Of the response; null if it is unknown.")
    ]
    layer: Annotated[
        ConvertedLayer,
        Field(description="Of a request with the tensors, without fields at their defaults."),
    ]
    tensors: LayerTensors
    check: ConversionCheck
    detected: _Detected | SkipJsonSchema[None] = omitted(_DETECTED)


def router(job_runner: JobRunner, settings: Settings) -> APIRouter:
    """Returns the route."""
    body_format = BodyFormat(settings.max_body_bytes, "tensors", to_error=_to_error)
    routes = APIRouter(tags=["layers"], route_class=body_route(job_runner, body_format))
    threads = WorkThreads("convert", _THREADS)

    @routes.post(
        "/v1/convert",
        operation_id="convert",
        summary="Converts a layer's weights to another layout, and verifies the result.",
        description="No number changes. Layout v1 has `W_query`, `W_key` and `W_value` of shape "
        "(in, out), applied as `x @ W`. Layout v2 is that of `nn.Linear`: `W_query.weight` of "
        "shape (out, in) and optionally `W_query.bias`. With `check`, the service finds layout, "
        "heads, rotary order and scale by running: it compares candidates with the output of the "
        "real module.",
        response_model=ConvertResponse | DetectResponse,
        response_description="The tensors in the target layout, and the difference of both layers' "
        "outputs on the same random input. With a check, the candidates that fit it best.",
        responses={
            200: {"content": in_safetensors(_file(""))},
            **problem_responses(400, 406, 413, 415, 422, 429, 500, 503, 504),
        },
        openapi_extra={
            "requestBody": {
                "description": "The tensors of a layer, and the target layout, or a check to "
                "detect their layout.",
                "content": in_safetensors(_file(", those of a check as `check.x` and `check.y`")),
            }
        },
    )
    async def convert_weights(
        request: Request, body: BODY_TYPE, received: Received, wait_s: Deadline
    ) -> Response:
        assert received.admission is not None
        received.admission.grow(working_bytes(received.message))
        codec = received.response_codec

        def work(raise_if_stopped: Callable[[], None]) -> list[bytes | memoryview]:
            converted = convert_message(received.message, raise_if_stopped, body)
            raise_if_stopped()
            return codec.encode(converted, "tensors")

        chunks = await threads.run(request, received.received_at, wait_s, work)
        return TensorResponse(chunks, codec.MEDIA_TYPE)

    return routes


def _to_error(error: pydantic.ValidationError, _: object, **names: Any) -> InvalidContent:
    return field_error(error, known_fields(), **names)


def _file(check: str) -> str:
    return f"The tensors by name{check}; all other fields as JSON under `qkv` in the metadata."
