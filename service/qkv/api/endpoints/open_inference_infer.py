"""POST /v2/models/{model}/infer: runs a variant for clients of the Open Inference Protocol."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

import pydantic
from fastapi import APIRouter, Request, Response

from qkv.api.endpoints.open_inference_catalogue import (
    VERSION,
    Model,
    ModelCatalogue,
    default_output,
)
from qkv.api.endpoints.open_inference_infer_schemas import BINARY_TYPE, describe_infer
from qkv.api.endpoints.open_inference_models import new_router
from qkv.api.job_runner import JobRunner
from qkv.api.request_body import TensorResponse, in_thread_if_large, read_body
from qkv.api.request_record import headers_of
from qkv.api.run_timing import server_timing, timing_fields
from qkv.attention import catalogue
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, QkvError, format_value, pointer_to
from qkv.jobs.annotations import notes_of
from qkv.jobs.buffer_layout import BufferLayout
from qkv.jobs.fields import field_error
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.jobs.plan_cache import BoundedCache, plan_bytes
from qkv.jobs.result import Result
from qkv.settings import Settings
from qkv.wire import json, open_inference
from qkv.wire.message import Message
from qkv.wire.open_inference_responses import InferResponse

__all__ = ["InferHandler", "router"]

_MAX_TIMEOUT_US: Final = (1 << 63) - 1
_MAX_QUOTED_LENGTH: Final = 4096  # no list or object that a variant takes is near it
_COMPRESSION_LEVEL: Final = 1  # floats hardly compress at any level
_LENGTH_NAME: Final = open_inference.LENGTH_HEADER.lower().encode()
_MAX_HEADS_BYTES: Final = 20 << 20
_SEQUENCE_PARAMETERS: Final = ("sequence_id", "sequence_start", "sequence_end")


class _RequestedOutput(pydantic.BaseModel):
    """An output that a request names."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    name: str
    parameters: dict[str, Any] | None = None


class _RequestFields(pydantic.BaseModel):
    """The fields of a request, without its tensors."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    id: str | None = None
    model_name: str | None = None  # KServe's client repeats the names in the path
    model_version: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[_RequestedOutput] | None = None


class _ProtocolParameters(pydantic.BaseModel):
    """The parameters of the protocol; all others are the variant's."""

    model_config = pydantic.ConfigDict(strict=True)

    binary_data_output: bool = False
    priority: Annotated[int, pydantic.Field(ge=0, le=_MAX_TIMEOUT_US)] = 0
    timeout: Annotated[int, pydantic.Field(ge=0, le=_MAX_TIMEOUT_US)] = 0  # microseconds; 0: none


class _InferFields(NamedTuple):
    """The fields of a request but its id, validated.

    Attributes:
        variant: the name of the variant.
        run_fields: the fields of the same run as a request of the native API.
        outputs: the names of the outputs to return, in order.
        binary: the names of the outputs that are sent as bytes.
        priority: as for `Engine.submit`.
        timeout_s: seconds that it may be queued; None: no limit.
    """

    variant: str
    run_fields: dict[str, Any]
    outputs: list[str]
    binary: set[str]
    priority: int
    timeout_s: float | None


class _KnownHead(NamedTuple):
    """All that follows from the JSON of a request but its id.

    Attributes:
        fields: the fields of the request.
        plan: its plan.
        layout: where the tensors are in the bytes after the JSON.
    """

    fields: _InferFields
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

    async def handle(self, request: Request, model: str, version: str = VERSION) -> Response:
        """Runs one request.

        Raises:
            QkvError: the request is invalid, or could not be run.
        """
        if version != VERSION or not self._models.is_loaded(model):
            self._models.find_loaded(model, version)
        headers = headers_of(request.scope)
        length = open_inference.json_length(_text(headers.get(_LENGTH_NAME)))
        with self._job_runner.admit(request) as admission:
            body = await read_body(request, self._max_body_bytes, lambda _: length, admission.grow)
            received_at = time.perf_counter()
            head = open_inference.split_head(body, length)
            known = None if head is None else self._heads.get((model, version, head.key))
            if head is not None and known is not None and known.layout.size == len(head.data):
                id, fields = head.id, known.fields
                plan = known.plan  # it has the layer of a loaded model
                job = Job.checked(plan, known.layout.read(head.data), plan.inputs.layer)
            else:
                id, fields, job = await self._validate(body, length, model, version, head)
        result = await self._job_runner.run(
            request,
            received_at,
            job,
            priority=fields.priority,
            wait_s=fields.timeout_s,
        )
        content_encoding = _response_encoding(headers.get(b"accept-encoding"))
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
    ) -> tuple[str | None, _InferFields, Job]:
        """Returns id, fields and job of a request; keeps what follows from its head."""
        message = await in_thread_if_large(
            len(body), lambda: open_inference.decode(body, "inputs", length)
        )
        id, fields = _parse_fields(message.fields, self._models.find(model), version)
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


def router(infer: InferHandler) -> APIRouter:
    """Returns the routes."""
    routes = new_router()
    summary = "Runs a model."
    at = "/v2/models/{model}"
    routes.add_api_route(
        f"{at}/infer",
        infer.handle,
        methods=["POST"],
        summary=summary,
        name="infer",
        openapi_extra=describe_infer(),
    )
    routes.add_api_route(
        f"{at}/versions/{{version}}/infer",
        infer.handle,
        methods=["POST"],
        include_in_schema=False,
    )
    return routes


def _parse_fields(
    given: dict[str, Any], model: Model, version: str
) -> tuple[str | None, _InferFields]:
    """Returns the id of a request, and its other fields translated into those of the native API.

    Raises:
        InvalidContent: a field or a parameter is unknown or invalid.
    """
    try:
        fields = _RequestFields.model_validate(given)
    except pydantic.ValidationError as error:
        raise field_error(error, ["inputs", *_RequestFields.model_fields]) from None
    expected_values = {"model_name": model.name, "model_version": version}
    for field, expected in expected_values.items():
        if (value := getattr(fields, field)) not in (None, "", expected):
            raise InvalidContent(
                f"{field} is wrong: got {value!r:.60}, expected {expected!r} as in the path"
            )
    parameters = dict(fields.parameters or {})
    variant = model.variant
    if model.layer is not None:
        variant = _find_variant(parameters.pop("variant", variant.name))
    protocol_parameters = _parse_protocol_parameters(
        {n: v for n, v in parameters.items() if n in _ProtocolParameters.model_fields}
    )
    variant_parameters = {
        n: _unquote(n, v)
        for n, v in parameters.items()
        if n not in _ProtocolParameters.model_fields
    }
    requested = fields.outputs or [_RequestedOutput(name=default_output(variant))]
    outputs = [output.name for output in requested]
    for group, specs in variant.groups.items():
        if group in outputs:
            raise InvalidContent(
                f"outputs names {group}: expected each of its tensors, such as {', '.join(specs)}"
            )
    binary = {o.name for o in requested if _is_binary(o, protocol_parameters.binary_data_output)}
    run_fields: dict[str, Any] = {"parameters": variant_parameters, "outputs": outputs}
    if model.layer is not None:
        run_fields["layer"] = {"name": model.name}
    timeout_s = protocol_parameters.timeout / 1e6 or None
    return fields.id, _InferFields(
        variant.name, run_fields, outputs, binary, protocol_parameters.priority, timeout_s
    )


def _find_variant(name: object) -> Variant:
    """Returns the variant that a request to a layer names.

    Raises:
        InvalidContent: there is no such variant.
    """
    known = catalogue.variants()
    if not isinstance(name, str) or name not in known:
        raise InvalidContent(
            f"variant is unknown: got {format_value(name)}, expected {', '.join(known)}",
            pointer=pointer_to("parameters", "variant"),
        )
    return known[name]


def _parse_protocol_parameters(given: dict[str, Any]) -> _ProtocolParameters:
    try:
        return _ProtocolParameters.model_validate(given)
    except pydantic.ValidationError as error:
        raise field_error(error, list(_ProtocolParameters.model_fields), "parameters") from None


def _unquote(name: str, value: Any) -> Any:
    """Returns a parameter's value. Lists and objects may be JSON in a string, because Triton's
    clients send scalars only."""
    if name in _SEQUENCE_PARAMETERS:
        raise InvalidContent(f"{name} is not supported: no model keeps state between requests")
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    pointer = pointer_to("parameters", name)
    if len(value) > _MAX_QUOTED_LENGTH:
        raise InvalidContent(
            f"parameter {name!r:.60} is too long: got {len(value)} characters of JSON, expected "
            f"at most {_MAX_QUOTED_LENGTH}",
            pointer=pointer,
        )
    try:  # with the limits of any value
        return json.decode_fields(b'{"value":%b}' % value.encode())["value"]
    except (QkvError, UnicodeEncodeError) as error:
        raise InvalidContent(
            f"parameter {name!r:.60} is invalid: got {format_value(value)}, expected JSON: {error}",
            pointer=pointer,
        ) from None


def _is_binary(output: _RequestedOutput, default: bool) -> bool:
    given = dict(output.parameters or {})
    binary = given.pop("binary_data", default)
    if given:
        raise InvalidContent(
            f"output {output.name!r:.60} has an unknown parameter: got {next(iter(given))!r:.60}, "
            "expected binary_data; classification and shared memory are not supported"
        )
    if not isinstance(binary, bool):
        raise InvalidContent(
            f"output {output.name!r:.60} has an invalid binary_data: got {format_value(binary)}, "
            "expected true or false"
        )
    return binary


def _new_response(
    model: str,
    id: str | None,
    fields: _InferFields,
    plan: Plan,
    result: Result,
    content_encoding: str | None,
) -> Response:
    outputs = {name: result.outputs[name] for name in fields.outputs}
    entries, data = open_inference.encode_tensors(outputs, fields.binary)
    noted = {}
    if known := notes_of(plan, result.notes):
        noted["notes"] = "; ".join(known)
    text = json.dump(
        InferResponse(
            model_name=model,
            model_version=VERSION,
            id=id,
            parameters={**timing_fields(result, plan), **noted},
            outputs=entries,
        )
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
