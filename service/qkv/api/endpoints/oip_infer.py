"""POST /v2/models/{model}/infer: runs a variant for clients of the Open Inference Protocol."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, NamedTuple

import pydantic
from fastapi import APIRouter, Request, Response

from qkv.api.endpoints.oip_models import VERSION, default_output, find_loaded, new_router
from qkv.api.fast_path.body_layout import behind
from qkv.api.fast_path.job_cache import LONGEST_HEAD, JobCache
from qkv.api.fast_path.run_cache import Reply, RequestKey, RunCache
from qkv.api.job_runner import JobRunner, RunResult
from qkv.api.request_body import TensorResponse, in_thread_if_large, read_body
from qkv.attention import catalogue
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, QkvError, format_value, pointer_to
from qkv.jobs.fields import field_error
from qkv.jobs.job import Job
from qkv.settings import Settings
from qkv.telemetry.model_stats import ModelStats
from qkv.wire import json, open_inference
from qkv.wire.message import Message
from qkv.wire.oip_responses import InferResponse

__all__ = ["InferHandler", "router"]

_BINARY_TYPE: Final = "application/octet-stream"
_MAX_TIMEOUT_US: Final = (1 << 63) - 1
_MAX_QUOTED_LENGTH: Final = 4096  # no list or object that a variant takes is near it
_COMPRESSION_LEVEL: Final = 1  # floats hardly compress at any level
_HEADER_LINES: Final = (
    f"content-type: {_BINARY_TYPE}\r\n"
    f"{open_inference.LENGTH_HEADER.lower()}: %d\r\nserver-timing: %b\r\n"
).encode()
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


class _InferRequest(NamedTuple):
    """A parsed request.

    Attributes:
        id: the response repeats it.
        message: the same run as a request of the native API.
        outputs: the names of the outputs to return, in order.
        binary: the names of the outputs that are sent as bytes.
        protocol_parameters: priority and timeout.
    """

    id: str | None
    message: Message
    outputs: list[str]
    binary: set[str]
    protocol_parameters: _ProtocolParameters


class InferHandler:
    """Handles inference requests.

    Args:
        job_runner: runs the jobs.
        models: has the loaded flags.
        settings: limits of a body.
        run_cache: caches small requests, to run similar ones on the fast path.
    """

    def __init__(
        self, job_runner: JobRunner, models: ModelStats, settings: Settings, run_cache: RunCache
    ) -> None:
        self._job_runner, self._models, self._run_cache = job_runner, models, run_cache
        self._max_body_bytes = settings.max_body_bytes
        self._job_cache: JobCache[_InferRequest] = JobCache()

    async def handle(self, request: Request, model: str, version: str = VERSION) -> Response:
        """Runs one request.

        Raises:
            QkvError: the request is invalid, or could not be run.
        """
        find_loaded(self._models, model, version)
        lengths = request.headers.getlist(open_inference.LENGTH_HEADER)
        length = open_inference.json_length(", ".join(lengths) if lengths else None)
        with self._job_runner.admit(request) as admission:
            body = await read_body(request, self._max_body_bytes, lambda _: length, admission.grow)
            received_at = time.perf_counter()
            infer_request, job = await self._new_job(body, length, model, version)
        result = await self._job_runner.run(
            request,
            received_at,
            job,
            priority=infer_request.protocol_parameters.priority,
            wait_s=infer_request.protocol_parameters.timeout / 1e6 or None,
        )
        content_encoding = _response_encoding(request.headers.get("accept-encoding", ""))
        is_all_binary = content_encoding is None and infer_request.binary.issuperset(
            infer_request.outputs
        )
        if is_all_binary and length is not None and self._run_cache.may_keep(job):
            self._run_cache.keep(
                RequestKey.of(request.scope["raw_path"], request.scope["headers"]),
                behind(length, body, job),
                job,
                _new_reply_encoder(model, infer_request, result),
                lambda: self._models.is_loaded(model),
            )
        size = 0 if is_all_binary else result.nbytes
        return await in_thread_if_large(
            size, lambda: _new_response(model, infer_request, result, content_encoding)
        )

    async def _new_job(
        self, body: bytes | memoryview, length: int | None, model: str, version: str
    ) -> tuple[_InferRequest, Job]:
        """Returns the parsed request and its job; both are cached by the JSON of the request."""
        key = None
        if length is not None and length <= LONGEST_HEAD:
            key = model, version, bytes(body[:length])
            if (known := self._job_cache.again(key, body)) is not None:
                return known
        message = await in_thread_if_large(
            len(body), lambda: open_inference.decode(body, "inputs", length)
        )
        infer_request = _parse_request(message, catalogue.find(model), version)
        job = await self._job_runner.new_job(model, infer_request.message)
        infer_request = infer_request._replace(message=Message())
        if key is not None:
            self._job_cache.keep(key, body, infer_request, job)
        return infer_request, job


def router(infer: InferHandler) -> APIRouter:
    """Returns the routes."""
    routes = new_router()
    summary = "Runs a model."
    at = "/v2/models/{model}"
    routes.add_api_route(
        f"{at}/infer", infer.handle, methods=["POST"], summary=summary, name="infer"
    )
    routes.add_api_route(
        f"{at}/versions/{{version}}/infer",
        infer.handle,
        methods=["POST"],
        include_in_schema=False,
    )
    return routes


def _parse_request(message: Message, variant: Variant, version: str) -> _InferRequest:
    """Translates a request into the native API's fields.

    Raises:
        InvalidContent: a field or a parameter is unknown or invalid.
    """
    try:
        fields = _RequestFields.model_validate(message.fields)
    except pydantic.ValidationError as error:
        raise field_error(error, ["inputs", *_RequestFields.model_fields]) from None
    expected_values = {"model_name": variant.name, "model_version": version}
    for field, expected in expected_values.items():
        if (given := getattr(fields, field)) not in (None, "", expected):
            raise InvalidContent(
                f"{field} is wrong: got {given!r:.60}, expected {expected!r} as in the path"
            )
    given = fields.parameters or {}
    protocol_parameters = _parse_protocol_parameters(
        {n: v for n, v in given.items() if n in _ProtocolParameters.model_fields}
    )
    variant_parameters = {
        n: _unquote(n, v) for n, v in given.items() if n not in _ProtocolParameters.model_fields
    }
    requested = fields.outputs or [_RequestedOutput(name=default_output(variant))]
    outputs = [output.name for output in requested]
    binary = {o.name for o in requested if _is_binary(o, protocol_parameters.binary_data_output)}
    run_message = Message({"parameters": variant_parameters, "outputs": outputs}, message.tensors)
    return _InferRequest(fields.id, run_message, outputs, binary, protocol_parameters)


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


def _encode(
    model: str, infer_request: _InferRequest, result: RunResult, timing: dict[str, Any]
) -> tuple[list[bytes | memoryview], int | None]:
    outputs = {name: result.outputs[name] for name in infer_request.outputs}
    entries, chunks = open_inference.encode_tensors(outputs, infer_request.binary)
    response = InferResponse(
        model_name=model,
        model_version=VERSION,
        id=infer_request.id,
        parameters=timing,
        outputs=entries,
    )
    text = json.dump(response)
    return [text, *chunks], len(text) if chunks else None


def _new_reply_encoder(
    model: str, infer_request: _InferRequest, example: RunResult
) -> Callable[[RunResult], Reply]:
    """Returns an encoder of responses that differ from this one in timing and tensors only."""
    text, *_ = _encode(model, infer_request, example, {})[0]
    before, nothing, after = bytes(text).partition(b'"parameters":{}')  # in a string: \\"
    assert nothing

    def reply(result: RunResult) -> Reply:
        text = b'%b"parameters":%b%b' % (before, json.dump(result.timing), after)
        data = [result.outputs[name].data for name in infer_request.outputs]
        return Reply(
            _HEADER_LINES % (len(text), result.server_timing.encode()), [text, *data], model
        )

    return reply


def _new_response(
    model: str, infer_request: _InferRequest, result: RunResult, content_encoding: str | None
) -> Response:
    chunks, length = _encode(model, infer_request, result, result.timing)
    headers = dict(result.headers)
    if length is not None:
        headers[open_inference.LENGTH_HEADER] = str(length)
    if content_encoding is not None:
        chunks = [_compress(chunks, content_encoding)]
        headers["Content-Encoding"] = content_encoding
    return TensorResponse(chunks, json.MEDIA_TYPE if length is None else _BINARY_TYPE, headers)


def _response_encoding(accept_encoding: str) -> str | None:
    """Returns the Content-Encoding of the response; None: none.

    Compresses only if the client accepts exactly one encoding, as Triton's client does on request.
    HTTP libraries accept several by default, and compression of floats costs more than it saves.
    """
    encoding = accept_encoding.strip().lower()
    return encoding if encoding in ("gzip", "deflate") else None


def _compress(chunks: Sequence[bytes | memoryview], coding: str) -> bytes:
    form = zlib.MAX_WBITS | (16 if coding == "gzip" else 0)
    compressor = zlib.compressobj(_COMPRESSION_LEVEL, wbits=form)
    return b"".join([*map(compressor.compress, chunks), compressor.flush()])
