"""POST /v1/verify/{variant}: draws the inputs of a case, and judges outputs for them."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Discriminator, Field, Tag, create_model
from pydantic.json_schema import SkipJsonSchema

from qkv.api.bodies import BodyFormat, Deadline, Received, body_route
from qkv.api.case_messages import CaseFields, DrawFields, draw_case, judge_case
from qkv.api.job_runner import JobRunner
from qkv.api.models import (
    closed,
    documented,
    encoding_field,
    of_catalogue,
    optional,
    required,
    tensor_type,
)
from qkv.api.openapi.operation import (
    in_safetensors,
    problem_responses,
    unknown_variant,
    variant_name,
)
from qkv.api.request_body import ReceivedMessage, TensorResponse, record_response
from qkv.api.work_threads import WorkThreads
from qkv.attention import catalogue
from qkv.settings import Settings
from qkv.tensors import FLOATING
from qkv.testing.call import STATE
from qkv.testing.case_limits import MAX_NUMBERS
from qkv.testing.case_spec import AXES
from qkv.testing.families import FAMILIES
from qkv.testing.judgement import GRADIENT
from qkv.wire import json, require_acceptable, verify_responses
from qkv.wire.tensor_types import Encoding, Tensor, enumeration

MAX_BODY_BYTES: Final = 64 * MAX_NUMBERS
"""Limit of the body: 64 bytes for each number of the largest case. In lists, float64 takes 26."""
_BRANCHES: Final = ("<draw>", "<judge>")  # the forms of a body, in places of errors


def router(job_runner: JobRunner, settings: Settings) -> APIRouter:
    """Returns the route."""
    body_format = BodyFormat(min(MAX_BODY_BYTES, settings.max_body_bytes), "outputs")
    routes = APIRouter(tags=["verification"], route_class=body_route(job_runner, body_format))
    threads = WorkThreads("verify", 1)
    name: Any = variant_name()
    response_model: Any
    body_type: Any
    body_type, response_model = new_models()

    @routes.post(
        "/v1/verify/{variant}",
        operation_id="verify",
        summary="Draws inputs, and judges the outputs of your attention for them.",
        description="Two requests. The first draws a case: inputs, and the specification that "
        "draws them. The second has this specification and your outputs, and gets the verdict: the "
        "worst error against float64, its budget, and the names of known bugs that give these "
        "outputs. The service stores nothing.",
        response_model=response_model,
        response_description="A case: its inputs, and the specification that draws them. Or the "
        "verdict on outputs.",
        responses={
            200: {
                "content": in_safetensors(
                    "The inputs by name; all other fields as JSON under `qkv`. A verdict is JSON "
                    "only."
                )
            },
            **problem_responses(
                400, 406, 413, 415, 422, 429, 500, 503, 504, extra=[unknown_variant()]
            ),
        },
        openapi_extra={
            "requestBody": {
                "description": "Without `case` the service draws a case; with it, it judges "
                "outputs.",
                "content": in_safetensors(
                    "The outputs by name; all other fields as JSON under `qkv` in the metadata."
                ),
            }
        },
    )
    async def verify(
        request: Request, variant: name, body: body_type, received: Received, wait_s: Deadline
    ) -> Response:
        catalogue.find(variant)
        work = _work(request, variant, body, received)
        # admitted until the end: the tensors of the request stay in memory while it waits
        return await threads.run(request, received.received_at, wait_s, lambda _: work())

    return routes


def _work(
    request: Request, variant: str, body: Any, received: ReceivedMessage
) -> Callable[[], Response]:
    """Returns the function that draws or judges the case of a request.

    Raises:
        NotAcceptable: the request does not accept a verdict, which is JSON.
    """
    message, codec = received.message, received.response_codec
    if isinstance(body, DrawFields):
        return lambda: TensorResponse(
            codec.encode(draw_case(variant, body, message), "inputs"), codec.MEDIA_TYPE
        )
    require_acceptable(", ".join(request.headers.getlist("accept")), json.MEDIA_TYPE)
    return lambda: record_response(judge_case(variant, body.case, message))


@of_catalogue
def new_models() -> Any:
    """Returns the types of bodies and of responses."""
    case_type = _with_types("CaseSpecification", CaseFields)
    return _body(case_type), _drawn_case(case_type) | _verdict()


def _body(case_type: Any) -> Any:
    """Returns the type of a body: that draws, or that judges."""
    refused: Any = (SkipJsonSchema[dict[str, Any]], Field(default={}))  # with a reason: no case
    draw = _with_types("DrawRequest", DrawFields, outputs=refused, encoding=encoding_field)
    about = "In the dtype of the case"
    named = {n: optional(Tensor, about) for n in _result_names()}
    outputs = closed("JudgedOutputs", named | {"output": required(Tensor, about)})
    judge = closed(
        "JudgeRequest",
        {
            "case": (case_type, ...),
            "outputs": (documented(dict[str, Any], outputs), ...),
            "encoding": encoding_field,
        },
    )
    return Annotated[
        Annotated[draw, Tag(_BRANCHES[0])] | Annotated[judge, Tag(_BRANCHES[1])],
        Discriminator(_branch),
    ]


def _branch(value: Any) -> str:
    is_judged = "case" in value if isinstance(value, Mapping) else hasattr(value, "case")
    return _BRANCHES[is_judged]


def _with_types(name: str, base: type[BaseModel], **more: Any) -> Any:
    """Returns a model with the types of family, sizes and parameters in the document."""
    sizes = closed("AxisSizes", {x: optional(Annotated[int, Field(ge=1)]) for x in AXES})
    names = {n for v in catalogue.variants().values() for n in v.parameters.model_fields}
    parameters = closed("AnyParameters", {n: optional(Any) for n in sorted(names)})
    types = {
        "family": enumeration("InputFamily", *FAMILIES),
        "sizes": sizes,
        "parameters": parameters,
    }
    fields: dict[str, Any] = {}
    for field, json_type in types.items():
        known = base.model_fields[field]
        fields[field] = (documented(known.annotation, json_type), known)
    return create_model(name, __base__=base, **(fields | more))


def _drawn_case(case_type: Any) -> Any:
    """Returns the model of a drawn case."""
    specs = [i for v in catalogue.variants().values() for i in v.inputs.values()]
    dtypes = {i.name: FLOATING if "float32" in i.dtypes else i.dtypes for i in specs}
    dtypes |= {"mask": ("bool",), "grad_output": FLOATING, STATE: ("float32", "float64")}
    inputs = {n: optional(tensor_type(d), f"The input `{n}`") for n, d in dtypes.items()}
    fields = {"case": case_type, "inputs": closed("DrawnInputs", inputs), "encoding": Encoding}
    return closed("DrawnCase", {name: (kind, ...) for name, kind in fields.items()})


def _verdict() -> Any:
    """Returns the model of a verdict, with the names of the results."""
    names, figures = _result_names(), verify_responses.Figures
    results = {n: optional(figures) for n in names} | {"output": (figures, ...)}
    judged = closed("JudgedResults", results)
    about = verify_responses.Verdict.model_fields["result"].description
    return create_model(
        "Verdict",
        __base__=verify_responses.Verdict,
        result=required(enumeration("ResultName", *names), about),
        results=(judged, ...),
    )


def _result_names() -> list[str]:
    gradients = {
        GRADIENT + i.name
        for v in catalogue.variants().values()
        for i in v.inputs.values()
        if not i.is_optional
    }
    return ["output", STATE, *sorted(gradients)]
