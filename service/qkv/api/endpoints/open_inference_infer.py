"""POST /v2/models/{model}/infer: runs a variant for clients of the Open Inference Protocol."""

import time
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

import orjson
import pydantic
from fastapi import APIRouter, Body, Request, Response

from qkv.api.bodies import DEADLINE
from qkv.api.endpoints.open_inference_repository import (
    VERSION,
    ModelCatalogue,
)
from qkv.api.endpoints.open_inference_request import InferFields, InferRequest, parse_fields
from qkv.api.job_runner import JobRunner
from qkv.api.openapi.open_inference_operation import error_responses, new_router
from qkv.api.openapi.operation import BINARY, SERVER_TIMING, variant_name
from qkv.api.request_body import TensorResponse, in_thread_if_large, read_body
from qkv.api.request_record import record
from qkv.api.routes import run_route
from qkv.api.run_timing import server_timing, timing_fields
from qkv.engine.admission import AdmittedBody
from qkv.jobs.annotations import notes_of
from qkv.jobs.buffer_layout import BufferLayout
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.jobs.plan_cache import BoundedCache, plan_bytes
from qkv.jobs.result import Result
from qkv.settings import Settings
from qkv.wire import json, open_inference
from qkv.wire.message import Message
from qkv.wire.open_inference_responses import InferResponse

BINARY_TYPE: Final = "application/octet-stream"
"""The media type of JSON with tensors after it."""
_BINARY_CONTENT: Final = {
    BINARY_TYPE: {"schema": BINARY | {"description": "The JSON, then the tensors."}}
}
_LENGTH_PARAMETER: Final = {
    "name": open_inference.LENGTH_HEADER,
    "in": "header",
    "required": False,
    "description": "Bytes of the JSON, if tensors follow it.",
    "schema": {"type": "integer", "minimum": 0},
}
_COMPRESSION_LEVEL: Final = 1  # floats hardly compress at any level
_LENGTH_NAME: Final = open_inference.LENGTH_HEADER.lower().encode()
_MAX_HEADS_BYTES: Final = 20 << 20


class InferBody(NamedTuple):
    """The body of an inference request, which a known head need not decode.

    Attributes:
        content: JSON, optionally with the bytes of tensors after it.
        length: bytes of the JSON; None: all.
        received_at: time of its last byte, by `time.perf_counter`.
        admission: counts the request.
    """

    content: bytes | memoryview
    length: int | None
    received_at: float
    admission: AdmittedBody


_Body = Annotated[
    InferBody,
    pydantic.PlainValidator(lambda body: body, json_schema_input_type=InferRequest),
    Body(),
]


class _KnownHead(NamedTuple):
    """All that follows from the JSON of a request but its id.

    Attributes:
        fields: the fields of the request.
        plan: its plan.
        layout: where the tensors are in the bytes after the JSON.
    """

    fields: InferFields
    plan: Plan
    layout: BufferLayout


class InferHandler:
    """The handler of inference requests.

    Args:
        job_runner: runs the jobs.
        models: the models.
        settings: limits of a body.
    """

    def __init__(self, job_runner: JobRunner, models: ModelCatalogue, settings: Settings) -> None:
        self._job_runner, self._models = job_runner, models
        self._max_body_bytes = settings.max_body_bytes
        self._heads: BoundedCache[_KnownHead] = BoundedCache(_MAX_HEADS_BYTES)

    async def read(self, request: Request, admission: AdmittedBody) -> InferBody:
        """Reads the body of a request.

        Raises:
            NotFound: its model or version does not exist, or is unloaded.
            QkvError: as `read_body`.
        """
        parameters = request.path_params
        model, version = parameters["model"], parameters.get("version", VERSION)
        if version != VERSION or not self._models.is_loaded(model):
            self._models.find_loaded(model, version)
        length = open_inference.json_length(_text(record().headers.get(_LENGTH_NAME)))
        content = await read_body(request, self._max_body_bytes, lambda _: length, admission.grow)
        return InferBody(content, length, time.perf_counter(), admission)

    async def handle(
        self, request: Request, body: InferBody, model: str, version: str = VERSION
    ) -> Response:
        """Runs one request.

        Args:
            request: the request.
            body: its body.
            model, version: in its path.

        Raises:
            QkvError: the request is invalid, or could not be run.
        """
        content, length, received_at, admission = body
        head = open_inference.split_head(content, length)
        known = None if head is None else self._heads.get((model, version, head.key))
        if head is not None and known is not None and known.layout.size == len(head.data):
            id, fields = head.id, known.fields
            plan = known.plan  # it has the layer of a loaded model
            job = Job.checked(plan, known.layout.read(head.data), plan.inputs.layer)
        else:
            id, fields, job = await self._validate(content, length, model, version, head)
        admission.release()
        result = await self._job_runner.run(
            request,
            received_at,
            job,
            priority=fields.priority,
            wait_s=fields.timeout_s,
        )
        content_encoding = _response_encoding(record().headers.get(b"accept-encoding"))
        if content_encoding is None and fields.binary.issuperset(fields.outputs):
            return _new_response(model, id, fields, job.plan, result, None)
        return await in_thread_if_large(
            result.nbytes,
            lambda: _new_response(model, id, fields, job.plan, result, content_encoding),
        )

    async def _validate(
        self,
        body: bytes | memoryview,
        length: int | None,
        model: str,
        version: str,
        head: open_inference.Head | None,
    ) -> tuple[str | None, InferFields, Job]:
        """Returns id, fields and job of a request; keeps what follows from its head."""
        message = await in_thread_if_large(
            len(body), lambda: open_inference.decode(body, "inputs", length)
        )
        id, fields = parse_fields(message, self._models.find(model), version)
        run_message = Message(fields.run_fields, message.tensors)
        job = await self._job_runner.new_job(fields.variant, run_message)
        is_as_sent = (
            job.tensors == message.tensors and "bool" not in job.plan.inputs.dtypes.values()
        )
        if head is not None and is_as_sent and head.may_be_kept(id):
            specs = [(name, t.dtype, t.shape) for name, t in message.tensors.items()]
            layout = BufferLayout(specs, alignment=1)
            if layout.size == len(head.data):  # no tensor has its numbers in the JSON
                key = model, version, head.key
                held_bytes = plan_bytes(head.key, fields, specs)
                self._heads.put(key, _KnownHead(fields, job.plan, layout), held_bytes)
        return id, fields, job


def router(job_runner: JobRunner, infer: InferHandler) -> APIRouter:
    """Returns the routes."""
    routes = new_router(run_route(job_runner, infer.read))
    name: Any = variant_name()

    @routes.post(
        "/v2/models/{model}/infer",
        name="infer",
        summary="Runs a model.",
        response_model=InferResponse,
        response_description="The requested outputs, and the timing.",
        responses={
            200: {"headers": SERVER_TIMING, "content": _BINARY_CONTENT},
            **error_responses(400, 404, 413, 429, 500, 503),
        },
        dependencies=[DEADLINE],
        openapi_extra={
            "parameters": [_LENGTH_PARAMETER],
            "requestBody": {
                "description": "Tensors, parameters, and the requested outputs.",
                "content": _BINARY_CONTENT,
            },
        },
    )
    async def infer_model(request: Request, body: _Body, model: name) -> Response:
        return await infer.handle(request, body, model)

    @routes.post("/v2/models/{model}/versions/{version}/infer", include_in_schema=False)
    async def infer_version(request: Request, body: _Body, model: str, version: str) -> Response:
        return await infer.handle(request, body, model, version)

    return routes


def _new_response(
    model: str,
    id: str | None,
    fields: InferFields,
    plan: Plan,
    result: Result,
    content_encoding: str | None,
) -> Response:
    outputs = {name: result.outputs[name] for name in fields.outputs}
    entries, data = open_inference.encode_tensors(outputs, fields.binary)
    # the fields of an `InferResponse`; to build and encode one takes as long as all of this
    parameters = timing_fields(result, plan)
    if notes := notes_of(plan, result.notes):
        parameters["notes"] = "; ".join(notes)
    text = orjson.dumps(
        {
            "model_name": model,
            "model_version": VERSION,
            **({} if id is None else {"id": id}),
            "parameters": parameters,
            "outputs": entries,
        }
    )
    chunks: list[bytes | memoryview] = [text, *data]
    headers = [server_timing(result.times)]
    if data:
        headers.append((_LENGTH_NAME, b"%d" % len(text)))
    if content_encoding is not None:
        chunks = [_compress(chunks, content_encoding)]
        headers.append((b"content-encoding", content_encoding.encode()))
    return TensorResponse(chunks, BINARY_TYPE if data else json.MEDIA_TYPE, headers)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _response_encoding(accept_encoding: bytes | None) -> str | None:
    """Returns the Content-Encoding of the response; None: none.

    Compresses only if the client accepts exactly one encoding, as Triton's client does on request.
    HTTP libraries accept several by default, and compression of floats costs more than it saves.
    """
    if accept_encoding is None:
        return None
    encoding = accept_encoding.decode("latin-1").strip().lower()
    return encoding if encoding in ("gzip", "deflate") else None


def _compress(chunks: Sequence[bytes | memoryview], coding: str) -> bytes:
    form = zlib.MAX_WBITS | (16 if coding == "gzip" else 0)
    compressor = zlib.compressobj(_COMPRESSION_LEVEL, wbits=form)
    return b"".join([*map(compressor.compress, chunks), compressor.flush()])
