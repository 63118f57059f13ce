"""POST /v1/compare: compares variants on the same inputs."""

import asyncio
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field, create_model

from qkv.api.bodies import BodyFormat, Deadline, Received, body_route
from qkv.api.job_runner import JobRunner, cancel_on_disconnect
from qkv.api.measurement_runner import HostThread, MeasurementRunner
from qkv.api.models import (
    DocumentedLayer,
    Fields,
    choice_of,
    documented,
    input_fields,
    of_catalogue,
    optional,
)
from qkv.api.openapi.operation import SERVER_TIMING, in_safetensors, problem_responses
from qkv.api.request_body import TensorResponse, in_thread_if_large
from qkv.api.request_record import record
from qkv.api.run_timing import server_timing
from qkv.attention import catalogue
from qkv.errors import NotAcceptable, NotFound, QkvError
from qkv.jobs.measure.compare import compare
from qkv.jobs.measure.compare_request import CompareFields, CompareRequest
from qkv.jobs.variant_choice import MAX_VARIANTS
from qkv.settings import Settings
from qkv.wire import json
from qkv.wire.responses import CompareResponse
from qkv.wire.tensor_types import Encoding, Tensor

_INPUTS: Final = ConfigDict(extra="forbid", json_schema_extra={"minProperties": 1})
CHOICE: Final = "a variant's name, or an object of `variant` and `parameters`"


def router(job_runner: JobRunner, settings: Settings) -> APIRouter:
    """Returns the route."""
    body_format = BodyFormat(settings.max_body_bytes, "inputs", (json.MEDIA_TYPE,))
    routes = APIRouter(tags=["attention"], route_class=body_route(job_runner, body_format))
    host = HostThread()
    body_type: Any = new_body_type()

    @routes.post(
        "/v1/compare",
        operation_id="compare",
        summary="Compares variants with a baseline on the same inputs.",
        description="Output errors are those of the outputs in their dtype, accumulated in "
        "float64. Weights are compared row by row in float64. All logarithms are natural. Each run "
        "is queued by itself, so that other requests run in between. With `per_head` each figure "
        "of outputs and weights is also that of each query head.",
        response_model=CompareResponse,
        response_description="Measurements of each variant, and notes.",
        responses={
            200: {"headers": SERVER_TIMING},
            **problem_responses(
                400, 413, 415, 422, 429, 500, 503, 504, extra=specific_errors(json.MEDIA_TYPE)
            ),
        },
        openapi_extra={
            "requestBody": {
                "description": f"Tensors, and variants to compare on them: {CHOICE} each.",
                "content": in_safetensors(
                    "The inputs by name; all other fields as JSON under `qkv` in the metadata."
                ),
            }
        },
    )
    async def compare_variants(
        request: Request, body: body_type, received: Received, wait_s: Deadline
    ) -> Response:
        message = received.message
        tensors = (*message.tensors.values(), *message.layer.values())
        size = sum(tensor.nbytes for tensor in tensors if tensor.is_untyped)
        asked = await in_thread_if_large(
            size, lambda: CompareRequest(message, job_runner.limits, body)
        )
        received.release()
        runner = MeasurementRunner(job_runner, host, wait_s)
        running = asyncio.ensure_future(compare(asked, runner, received.received_at))
        response, times = await cancel_on_disconnect(request, running)
        record().add_run(times)
        content = await in_thread_if_large(asked.head_bytes, response.to_json)
        return TensorResponse([content], json.MEDIA_TYPE, [server_timing(times)])

    return routes


@of_catalogue
def new_body_type() -> Any:
    """Returns the model of a body."""
    every = catalogue.variants().values()
    tensors: Fields = {"x": optional(Tensor, "(B, L, M) or (L, M), with a layer")}
    for variant in sorted(every, key=lambda variant: "mask" not in variant.inputs):
        named = {n: optional(kind, f.description) for n, (kind, f) in input_fields(variant).items()}
        tensors = named | tensors
    inputs = create_model("CompareInputs", __config__=_INPUTS, **tensors)
    fields = CompareFields.model_fields
    choice: Any = choice_of("VariantChoice", every)
    listed = Field(
        min_length=1, max_length=MAX_VARIANTS, description=fields["variants"].description
    )
    return create_model(
        "CompareRequest",
        __base__=CompareFields,
        inputs=(documented(dict[str, Any], inputs), ...),
        variants=(Annotated[list[choice], listed], ...),
        anchor=(choice, Field(default="softmax", description=fields["anchor"].description)),
        layer=optional(DocumentedLayer, fields["layer"].description),
        encoding=optional(Encoding | None, "Has no effect: the response has no tensors."),
    )


def specific_errors(*media_types: str) -> list[QkvError]:
    """Returns the errors of a measurement with details of their own."""
    return [
        NotFound("no variant 'sotfmax'; /v1/variants lists all", pointer="/anchor"),
        NotAcceptable(
            f"Accept excludes every format: got 'text/html', expected {' or '.join(media_types)}"
        ),
    ]
