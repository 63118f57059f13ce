"""Bodies of requests as models: a route reads and validates them before FastAPI's handler.

FastAPI reads a body before anything else, without a bound, and makes its own errors of those that
the reader raises. `body_route` returns the route class of a router whose handlers have a parameter
`body`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Final, Union, get_args, get_origin, get_type_hints

import pydantic
from fastapi import Depends, Header, Request, Response
from fastapi.routing import APIRoute
from pydantic import PlainValidator

from qkv.api.job_runner import TIMEOUT_HEADER, JobRunner
from qkv.api.request_body import (
    ReceivedMessage,
    in_thread_if_large,
    read_body,
    read_message,
    require_json,
)
from qkv.engine.admission import AdmittedBody
from qkv.errors import InvalidContent, pointer_to
from qkv.jobs.fields import field_error
from qkv.wire import json, require_acceptable
from qkv.wire.message import Message

_NAME: Final = "body"  # of the parameter of a handler


@dataclass(frozen=True)
class BodyFormat:
    """The way in which a body is read.

    Attributes:
        limit: most bytes.
        group: the field of its tensors; None: it is JSON without tensors.
        accepted: media types of the response if it has one form, any of which a client accepts;
            none: the response has the formats of tensors.
        is_optional: the body may be empty, and its Content-Type is not checked.
        check: called before the body is read; it raises to refuse the request.
        decode: parses JSON without tensors.
        to_error: describes an invalid field, by the names that the body has at its top and at any
            depth.
    """

    limit: int
    group: str | None = None
    accepted: tuple[str, ...] = ()
    is_optional: bool = False
    check: Callable[[], None] = lambda: None
    decode: Callable[[bytes], dict[str, Any]] = json.decode_fields
    to_error: Callable[..., Exception] = field_error


class _ReadRequest(Request):
    """A request whose body is read: FastAPI gets the model in place of bytes and of JSON."""

    def __init__(self, request: Request, model: Any, received: ReceivedMessage) -> None:
        super().__init__(request.scope, request.receive)
        self.model, self.received = model, received

    async def body(self) -> Any:
        """Returns the model."""
        return self.model

    async def json(self) -> Any:
        """Returns the model."""
        return self.model


class BodyRoute(APIRoute):
    """A route that admits a request, reads its body and validates it, before FastAPI's handler.

    A handler has the model as its parameter `body`. The request is admitted until the handler has
    returned, or releases the admission of what it has `Received`.

    Attributes:
        job_runner: admits requests; None: all are.
        format: of the body.
    """

    job_runner: ClassVar[JobRunner | None]
    format: ClassVar[BodyFormat]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the function that FastAPI calls with a request."""
        handle = super().get_route_handler()
        hint = get_type_hints(self.endpoint, include_extras=True).get(_NAME)
        if hint is None:
            return handle
        body, job_runner = _Body(hint, self.format), self.job_runner

        async def read_and_handle(request: Request) -> Response:
            with ExitStack() as stack:
                body.check(request)
                admission = None
                if job_runner is not None:
                    job_runner.deadline_s()  # raises, before the body is read
                    admission = stack.enter_context(job_runner.admit())
                received = await body.read(request, admission)
                if admission is not None:
                    admission.is_received = True
                model = await body.validate(received)
                return await handle(_ReadRequest(request, model, received))

        return read_and_handle


def body_route(job_runner: JobRunner | None, format: BodyFormat) -> type[BodyRoute]:
    """Returns the class of the routes with bodies of a format; `job_runner` admits them."""
    return type("BodyRoute", (BodyRoute,), {"job_runner": job_runner, "format": format})


async def _received(request: Request) -> ReceivedMessage:
    assert isinstance(request, _ReadRequest)
    return request.received


Received = Annotated[ReceivedMessage, Depends(_received)]
"""The message of a request with a `BodyRoute`, its formats and its admission."""

_Timeout = Annotated[
    Any,
    PlainValidator(
        lambda value: value,  # `JobRunner.deadline_s` parses it
        json_schema_input_type=Annotated[float, pydantic.Field(gt=0, le=1_000_000_000)],
    ),
    Header(
        alias=TIMEOUT_HEADER,
        description="Seconds that the request may be queued. After them it does not run. "
        "Conversions and lists of layers also end after them.",
    ),
]
"""The header of every operation that has a deadline."""


async def _deadline(request: Request, _: _Timeout = None) -> float | None:
    job_runner: JobRunner = request.app.state.runtime.job_runner
    return job_runner.deadline_s()


DEADLINE: Final = Depends(_deadline)
Deadline = Annotated[float | None, DEADLINE]
"""The seconds that a request may be queued, by header and settings; None: no limit."""


class _Body:
    """The body of a route.

    Args:
        hint: the type of the parameter of its handler.
        format: of the body.
    """

    def __init__(self, hint: Any, format: BodyFormat) -> None:
        self._type, self._format = known_type(hint), format

    def check(self, request: Request) -> None:
        """Checks what can be checked of a request before its body is read.

        Raises:
            NotAcceptable, UnsupportedMediaType: the response or the body has one form, another
                than the headers have.
            QkvError: the check of the format refuses it.
        """
        if self._format.accepted:
            accept = ", ".join(request.headers.getlist("accept"))
            require_acceptable(accept, *self._format.accepted)
        if self._format.group is None and not self._format.is_optional:
            require_json(request)
        self._format.check()

    async def read(self, request: Request, admission: AdmittedBody | None) -> ReceivedMessage:
        """Reads and decodes the body; errors as those of `read_message`."""
        format = self._format
        if format.group is not None:
            assert admission is not None
            return await read_message(request, format.group, format.limit, admission)
        grow = None if admission is None else admission.grow
        whole = await read_body(request, format.limit, json.aligned_offset, grow)
        received_at, text = time.perf_counter(), bytes(whole)
        message = Message()
        if text.strip() or not format.is_optional:
            message = await in_thread_if_large(len(text), lambda: Message(format.decode(text)))
        return ReceivedMessage(message, received_at, len(text), json, admission)

    async def validate(self, received: ReceivedMessage) -> Any:
        """Returns the model of a body.

        Raises:
            QkvError: the body is invalid.
        """
        document = _document(received.message, self._format.group)
        return await in_thread_if_large(received.size, lambda: self._validate(document))

    def _validate(self, document: dict[str, Any]) -> Any:
        kind = self._type
        try:
            return kind.adapter.validate_python(document)
        except pydantic.ValidationError as error:
            raise self._format.to_error(
                error, kind.known, nested=kind.nested, branches=kind.branches
            ) from None


@dataclass(frozen=True)
class _BodyType:
    """A type of bodies, with the names that its errors may have.

    Attributes:
        adapter: validates.
        known: the fields at the top of a body.
        nested: those at any depth.
        branches: the names of the branches of its unions.
    """

    adapter: pydantic.TypeAdapter[Any]
    known: list[str]
    nested: frozenset[str]
    branches: frozenset[str]


@cache
def known_type(hint: Any) -> _BodyType:
    """Returns the type of a parameter of a handler: FastAPI makes each route twice."""
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(hint)
    schema = adapter.json_schema()
    known = list(dict.fromkeys(_fields_of(schema)))
    return _BodyType(adapter, known, frozenset(_names(schema)), frozenset(_tags(hint)))


def _document(message: Message, group: str | None) -> dict[str, Any]:
    """Returns a body with its tensors in their places.

    Raises:
        InvalidContent: the metadata of a file has a field in the place of its tensors.
    """
    document = dict(message.fields)
    if group is not None:
        if group in document:
            raise InvalidContent(
                f"unknown field {group!r} in the metadata: expected tensors of the file",
                pointer=pointer_to(group),
            )
        document[group] = message.tensors
    for name, tensors in (("layer", message.layer), ("check", message.check)):
        given = document.get(name, {})
        if tensors and isinstance(given, dict):  # the model refuses another
            inner = {"tensors": tensors} if name == "layer" else tensors
            document[name] = {**given, **inner}
    return document


def _tags(hint: Any) -> Iterator[str]:
    """Yields the names of the branches of a union, which pydantic has in the places of errors."""
    for argument in get_args(hint):
        if isinstance(argument, pydantic.Tag):
            yield argument.tag
        elif get_origin(argument) in (Annotated, Union, UnionType):
            yield from _tags(argument)


def _fields_of(schema: dict[str, Any]) -> Iterator[str]:
    """Yields the names of the fields of a body, those of each branch of a union."""
    definitions = schema.get("$defs", {})
    for branch in schema.get("oneOf", [schema]):
        name = branch.get("$ref", "").rpartition("/")[2]
        yield from definitions.get(name, branch).get("properties", {})


def _names(node: Any) -> Iterator[str]:
    """Yields the names of the fields of all objects in a schema."""
    if isinstance(node, list):
        for item in node:
            yield from _names(item)
    elif isinstance(node, dict):
        properties = node.get("properties")
        yield from properties if isinstance(properties, dict) else ()
        for inner in node.values():
            yield from _names(inner)
