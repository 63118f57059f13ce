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
from qkv.api.fast_path.job_cache import LONGEST_HEAD, Prepared
from qkv.api.fast_path.run_cache import Asked, Reply, Shortcuts
from qkv.api.job_runner import Result, Runs
from qkv.api.request_body import Outgoing, body, elsewhere
from qkv.attention import catalogue
from qkv.attention.catalogue import Variant
from qkv.errors import InvalidContent, QkvError, pointer_to, shown
from qkv.jobs.fields import invalid_field
from qkv.jobs.job import Job
from qkv.settings import Settings
from qkv.telemetry.model_stats import Models
from qkv.wire import json
from qkv.wire import open_inference as v2
from qkv.wire.message import Message

__all__ = ["Infer", "router"]

_BINARY_TYPE: Final = "application/octet-stream"
_MOST_US: Final = (1 << 63) - 1
_LONGEST_QUOTED: Final = 4096  # no list or object that a variant takes is near it
_PACK_LEVEL: Final = 1  # floats hardly shrink, whatever the effort
_LINES: Final = (
    f"content-type: {_BINARY_TYPE}\r\n{v2.LENGTH_HEADER.lower()}: %d\r\nserver-timing: %b\r\n"
).encode()
_STATELESS: Final = ("sequence_id", "sequence_start", "sequence_end")


class _Requested(pydantic.BaseModel):
    """An output that a request asks for."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    name: str
    parameters: dict[str, Any] | None = None


class _Request(pydantic.BaseModel):
    """A request, its tensors apart."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    id: str | None = None
    model_name: str | None = None  # KServe's client repeats what the path says
    model_version: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[_Requested] | None = None


class _Reserved(pydantic.BaseModel):
    """The parameters that are the protocol's, not the variant's."""

    model_config = pydantic.ConfigDict(strict=True)

    binary_data_output: bool = False
    priority: Annotated[int, pydantic.Field(ge=0, le=_MOST_US)] = 0
    timeout: Annotated[int, pydantic.Field(ge=0, le=_MOST_US)] = 0  # microseconds; 0: none


class _Asked(NamedTuple):
    """What a request asks for.

    Attributes:
        id: to be echoed.
        message: the run, as the native API would have it.
        outputs: what to return, in this order.
        binary: those of them that go as bytes.
        reserved: priority and timeout.
    """

    id: str | None
    message: Message
    outputs: list[str]
    binary: set[str]
    reserved: _Reserved


class Infer:
    """Runs a variant for a request of the protocol.

    Args:
        runs: what runs it.
        models: which of them are loaded.
        settings: their limits.
        shortcuts: told what may be answered at once when it comes again.
    """

    def __init__(
        self, runs: Runs, models: Models, settings: Settings, shortcuts: Shortcuts
    ) -> None:
        self._runs, self._models, self._shortcuts = runs, models, shortcuts
        self._max_body_bytes = settings.max_body_bytes
        self._prepared: Prepared[_Asked] = Prepared()

    async def __call__(self, request: Request, model: str, version: str = VERSION) -> Response:
        """Reads the request, runs it, and answers."""
        find_loaded(self._models, model, version)
        lengths = request.headers.getlist(v2.LENGTH_HEADER)
        length = v2.json_length(", ".join(lengths) if lengths else None)
        with self._runs.enter(request) as place:
            whole = await body(request, self._max_body_bytes, lambda _: length, place.grow)
            received = time.perf_counter()
            asked, job = await self._job(whole, length, model, version)
        ran = await self._runs.run(
            request,
            received,
            job,
            priority=asked.reserved.priority,
            wait_s=asked.reserved.timeout / 1e6 or None,
        )
        packing = _packing(request.headers.get("accept-encoding", ""))
        is_quick = packing is None and asked.binary.issuperset(asked.outputs)
        if is_quick and length is not None and self._shortcuts.may_keep(job):
            self._shortcuts.keep(
                Asked.of(request.scope["raw_path"], request.scope["headers"]),
                behind(length, whole, job),
                job,
                _repeated(model, asked, ran),
                lambda: self._models.is_loaded(model),
            )
        size = 0 if is_quick else ran.nbytes
        return await elsewhere(size, lambda: _answer(model, asked, ran, packing))

    async def _job(
        self, whole: bytes | memoryview, length: int | None, model: str, version: str
    ) -> tuple[_Asked, Job]:
        """What is asked for; where JSON of the same letters has come before, as it was then."""
        key = None
        if length is not None and length <= LONGEST_HEAD:
            key = model, version, bytes(whole[:length])
            if (known := self._prepared.again(key, whole)) is not None:
                return known
        message = await elsewhere(len(whole), lambda: v2.decode(whole, "inputs", length))
        asked = _asked(message, catalogue.find(model), version)
        job = await self._runs.job(model, asked.message)
        asked = asked._replace(message=Message())
        if key is not None:
            self._prepared.keep(key, whole, asked, job)
        return asked, job


def router(infer: Infer) -> APIRouter:
    """The route."""
    routes = new_router()
    summary = "Runs a variant."
    at = "/v2/models/{model}"
    routes.add_api_route(
        f"{at}/infer", infer.__call__, methods=["POST"], summary=summary, name="infer"
    )
    routes.add_api_route(
        f"{at}/versions/{{version}}/infer",
        infer.__call__,
        methods=["POST"],
        include_in_schema=False,
    )
    return routes


def _asked(message: Message, variant: Variant, version: str) -> _Asked:
    """The request in the native API's words.

    Raises:
        InvalidContent: a field or a parameter is not the protocol's, nor the variant's.
    """
    try:
        fields = _Request.model_validate(message.fields)
    except pydantic.ValidationError as error:
        raise invalid_field(error, ["inputs", *_Request.model_fields]) from None
    here = {"model_name": variant.name, "model_version": version}
    for field, expected in here.items():
        if (given := getattr(fields, field)) not in (None, "", expected):
            raise InvalidContent(f"{field} is {given!r:.60}; the path says {expected!r}")
    given = fields.parameters or {}
    reserved = _reserved({n: v for n, v in given.items() if n in _Reserved.model_fields})
    native = {n: _unquoted(n, v) for n, v in given.items() if n not in _Reserved.model_fields}
    requested = fields.outputs or [_Requested(name=default_output(variant))]
    outputs = [output.name for output in requested]
    binary = {o.name for o in requested if _is_binary(o, reserved.binary_data_output)}
    run = Message({"parameters": native, "outputs": outputs}, message.tensors)
    return _Asked(fields.id, run, outputs, binary, reserved)


def _reserved(given: dict[str, Any]) -> _Reserved:
    try:
        return _Reserved.model_validate(given)
    except pydantic.ValidationError as error:
        raise invalid_field(error, list(_Reserved.model_fields), "parameters") from None


def _unquoted(name: str, value: Any) -> Any:
    """A parameter's value; lists and objects may come as strings that are JSON, because Triton's
    clients send scalars only."""
    if name in _STATELESS:
        raise InvalidContent(f"{name} has no meaning here: no model keeps state between requests")
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    pointer = pointer_to("parameters", name)
    if len(value) > _LONGEST_QUOTED:
        raise InvalidContent(
            f"parameter {name!r:.60} is a string of {len(value)} characters; at most "
            f"{_LONGEST_QUOTED} are read as JSON",
            pointer=pointer,
        )
    try:  # under the limits that hold for any value
        return json.plain(b'{"value":%b}' % value.encode())["value"]
    except (QkvError, UnicodeEncodeError) as error:
        raise InvalidContent(
            f"parameter {name!r:.60} came as {shown(value)}, which looks like JSON: {error}",
            pointer=pointer,
        ) from None


def _is_binary(output: _Requested, default: bool) -> bool:
    given = dict(output.parameters or {})
    binary = given.pop("binary_data", default)
    if given:
        raise InvalidContent(
            f"output {output.name!r:.60} has the parameter {next(iter(given))!r:.60}; known is "
            "binary_data (there is no classification and no shared memory here)"
        )
    if not isinstance(binary, bool):
        raise InvalidContent(
            f"output {output.name!r:.60} has binary_data {shown(binary)}; it must be true or false"
        )
    return binary


def _encoded(
    model: str, asked: _Asked, ran: Result, timing: dict[str, Any]
) -> tuple[list[bytes | memoryview], int | None]:
    fields: dict[str, Any] = {"model_name": model, "model_version": VERSION}
    if asked.id is not None:
        fields["id"] = asked.id
    fields["parameters"] = timing
    message = Message(fields, {name: ran.outputs[name] for name in asked.outputs})
    return v2.encode(message, "outputs", asked.binary)


def _repeated(model: str, asked: _Asked, like: Result) -> Callable[[Result], Reply]:
    """Makes answers as one was made whose outputs all went as bytes; only their timing differs."""
    text, *_ = _encoded(model, asked, like, {})[0]
    before, nothing, after = bytes(text).partition(b'"parameters":{}')  # in a string: \\"
    assert nothing

    def reply(ran: Result) -> Reply:
        text = b'%b"parameters":%b%b' % (before, json.dump(ran.timing), after)
        data = [ran.outputs[name].data for name in asked.outputs]
        return Reply(_LINES % (len(text), ran.server_timing.encode()), [text, *data], model)

    return reply


def _answer(model: str, asked: _Asked, ran: Result, packing: str | None) -> Response:
    chunks, length = _encoded(model, asked, ran, ran.timing)
    headers = dict(ran.headers)
    if length is not None:
        headers[v2.LENGTH_HEADER] = str(length)
    if packing is not None:
        chunks = [_packed(chunks, packing)]
        headers["Content-Encoding"] = packing
    return Outgoing(chunks, json.MEDIA_TYPE if length is None else _BINARY_TYPE, headers)


def _packing(accept_encoding: str) -> str | None:
    """How the answer is packed: where the caller asks for one coding and no other, as Triton's
    client does when told to. A list of codings is what HTTP libraries send without being told, and
    packing floats costs many times what it saves."""
    asked = accept_encoding.strip().lower()
    return asked if asked in ("gzip", "deflate") else None


def _packed(chunks: Sequence[bytes | memoryview], coding: str) -> bytes:
    form = zlib.MAX_WBITS | (16 if coding == "gzip" else 0)
    packer = zlib.compressobj(_PACK_LEVEL, wbits=form)
    return b"".join([*map(packer.compress, chunks), packer.flush()])
