"""POST /v1/verify/{variant}: draws the inputs of a case, and judges outputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from qkv.api.case_limits import MAX_NUMBERS
from qkv.api.case_messages import AXES, FIGURES, CaseFields, DrawFields, draw_case, judge_case
from qkv.api.job_runner import JobRunner
from qkv.api.openapi.operation import (
    TIMEOUT,
    describe,
    in_both_formats,
    problem_responses,
    unknown_variant,
    variant_parameter,
)
from qkv.api.openapi.schemas import (
    COUNT,
    ENCODING,
    FLAG,
    NUMBER,
    TEXT,
    Schema,
    closed,
    either,
    enumeration,
    list_of,
    model_fields,
    named,
    nullable,
    tensor_of,
)
from qkv.api.request_body import ReceivedMessage, TensorResponse, read_message
from qkv.api.work_threads import WorkThreads
from qkv.attention import catalogue
from qkv.settings import Settings
from qkv.tensors import FLOATING
from qkv.testing.families import FAMILIES
from qkv.testing.judgement import GRADIENT
from qkv.wire import json, require_acceptable

__all__ = ["MAX_BODY_BYTES", "router"]

MAX_BODY_BYTES: Final = 64 * MAX_NUMBERS
"""Limit of the body: 64 bytes for each number of the largest case. In lists, float64 takes 26."""


def router(job_runner: JobRunner, settings: Settings) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(tags=["verification"])
    threads, limit = WorkThreads("verify", 1), min(MAX_BODY_BYTES, settings.max_body_bytes)

    @routes.post(
        "/v1/verify/{variant}",
        operation_id="verify",
        summary="Draws inputs, and judges the outputs of your attention for them.",
        description="Two requests. The first draws a case: inputs, and the specification that "
        "draws them. The second has this specification and your outputs, and gets the verdict: the "
        "worst error against float64, its budget, and the names of known bugs that give these "
        "outputs. The service stores nothing.",
        openapi_extra=_describe(),
    )
    async def verify(request: Request) -> Response:
        variant = request.path_params["variant"]
        catalogue.find(variant)
        wait_s = job_runner.deadline_of(request)
        with job_runner.admit(request) as admission:
            received = await read_message(request, "outputs", limit, admission.grow)
            admission.is_received = True
            work = _work(request, variant, received)
            # admitted until the end: the tensors of the request stay in memory while it waits
            return await threads.run(request, received.received_at, wait_s, lambda _: work())

    return routes


def _work(request: Request, variant: str, received: ReceivedMessage) -> Callable[[], Response]:
    """Returns the function that draws or judges the case of a request.

    Raises:
        NotAcceptable: the request does not accept a verdict, which is JSON.
    """
    message, codec = received.message, received.response_codec
    if "case" not in message.fields:
        return lambda: TensorResponse(
            codec.encode(draw_case(variant, message), "inputs"), codec.MEDIA_TYPE
        )
    require_acceptable(", ".join(request.headers.getlist("accept")), json.MEDIA_TYPE)
    return lambda: Response(json.dump(judge_case(variant, message)), media_type=json.MEDIA_TYPE)


def _describe() -> dict[str, Any]:
    """Returns the description of the operation."""
    body = in_both_formats(
        "Without `case` the service draws a case; with it, it judges outputs.",
        either(_draw_request(), _judge_request()),
        "The outputs by name; all other fields as JSON under `qkv` in the metadata.",
    )
    good = in_both_formats(
        "A case: its inputs, and the specification that draws them. Or the verdict on outputs.",
        either(_drawn_case(), _verdict()),
        "The inputs by name; all other fields as JSON under `qkv`. A verdict is JSON only.",
    )
    errors = problem_responses(
        400, 406, 413, 415, 422, 429, 500, 503, 504, extra=[unknown_variant()]
    )
    return describe({"200": good} | errors, body, [variant_parameter("variant"), TIMEOUT])


def _draw_request() -> Schema:
    return named("DrawRequest", closed({**_spec(DrawFields), "encoding": ENCODING}, ()))


def _judge_request() -> Schema:
    outputs = {n: tensor_of(FLOATING, "In the dtype of the case") for n in _result_names()}
    results = named("JudgedOutputs", closed(outputs, ["output"]))
    every = {"case": _case(), "outputs": results, "encoding": ENCODING}
    return named("JudgeRequest", closed(every, ["case", "outputs"]))


def _drawn_case() -> Schema:
    specs = [i for v in catalogue.variants().values() for i in v.inputs.values()]
    dtypes = {i.name: FLOATING if "float32" in i.dtypes else i.dtypes for i in specs}
    dtypes |= {"mask": ("bool",), "grad_output": FLOATING}
    inputs = {n: tensor_of(d, f"The input `{n}`") for n, d in dtypes.items()}
    fields = {"case": _case(), "inputs": named("DrawnInputs", closed(inputs, ()))}
    encoding = enumeration("Encoding", ["lists", "base64"])
    return named("DrawnCase", closed(fields | {"encoding": encoding}))


def _case() -> Schema:
    """Returns the component of the specification of a case."""
    return named("CaseSpecification", closed(_spec(CaseFields), ["variant", "seed", "digest"]))


def _spec(model: type[DrawFields] | type[CaseFields]) -> dict[str, Schema]:
    fields = model_fields(model)
    sizes = closed({x: {"type": "integer", "minimum": 1} for x in AXES}, ())
    names = {n for v in catalogue.variants().values() for n in v.parameters.model_fields}
    parameters = named("AnyParameters", closed({n: {} for n in sorted(names)}, ()))
    family = enumeration("InputFamily", FAMILIES)
    for name, schema in (
        ("family", family), ("sizes", named("AxisSizes", sizes)), ("parameters", parameters)
    ):  # fmt: skip
        fields[name] = schema | {"description": fields[name]["description"]}
    return fields


def _verdict() -> Schema:
    figures = _figures()
    whole = {
        "passed": FLAG | {"description": "True if every number is within budget."},
        "diagnosis": list_of(
            TEXT, description="Names of known bugs that give these outputs, best first."
        ),
        "result": enumeration("ResultName", _result_names())
        | {"description": "The result of the figures: the worst."},
    }
    results = dict.fromkeys(_result_names(), named("Figures", closed(figures)))
    judged = named("JudgedResults", closed(results, ["output"]))
    return named("Verdict", closed({**figures, **whole, "results": judged}))


def _figures() -> dict[str, Schema]:
    texts = {
        "passed": "True if every number of the result is within budget.",
        "error": "The absolute error at the worst index.",
        "budget": "The error allowed there.",
        "units": "error / budget, the largest of the result.",
        "worst_index": "The index of the worst number.",
        "expected": "The float64 result there.",
        "got": "The number sent there.",
        "cosine": "Of the whole result with the expected one; null if a number is not finite.",
        "torch_error": "The largest error of torch's own kernel; null if there is none.",
        "torch_units": "The same in units of the budget.",
    }
    kinds: dict[str, Schema] = {
        "passed": FLAG,
        "worst_index": list_of(COUNT),
        **dict.fromkeys(("cosine", "torch_error", "torch_units"), nullable(NUMBER)),
    }
    return {n: kinds.get(n, NUMBER) | {"description": texts[n]} for n in FIGURES}


def _result_names() -> list[str]:
    gradients = {
        GRADIENT + i.name
        for v in catalogue.variants().values()
        for i in v.inputs.values()
        if not i.is_optional
    }
    return ["output", *sorted(gradients)]
