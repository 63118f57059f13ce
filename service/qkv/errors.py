"""The exceptions of qkv: each class has an HTTP status and a stable problem type."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, ClassVar, Final

PROTOCOL_ERROR: Final = "qkv.protocol_error"
"""Key of an ASGI scope: the error of a request that its server could not read."""

TYPE_PREFIX: Final = "urn:qkv:problem:"
"""The beginning of the type of every problem of qkv."""

_REASON_PHRASES: Final = {
    413: "Content Too Large",  # Python 3.11 has the phrases of RFC 7231 for 413 and 422
    422: "Unprocessable Content",
    499: "Client Closed Request",  # not of RFC 9110: nginx's, for its logs
}


def _reason_phrase(status: int) -> str:
    """Returns the reason phrase of a status (RFC 9110, section 15)."""
    return _REASON_PHRASES.get(status) or HTTPStatus(status).phrase


class QkvError(Exception):
    """An error with the members of an RFC 9457 problem document.

    A subclass sets `status`. Its `name`, the last part of the problem type, is that of the class;
    its `title` is the reason phrase of the status.

    Args:
        detail: what was received and what was expected, in one or two sentences.
        pointer: JSON pointer (RFC 6901) to the part of the request that is wrong.
        retry_after: seconds after which the client may retry, a whole number; None: that of the
            class, which has none if a retry is of no use.
        **members: further members of the problem document, JSON values.
    """

    retry_after: int | None = None
    status: ClassVar[int] = 500
    name: ClassVar[str] = "internal"
    title: ClassVar[str] = _reason_phrase(500)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.title = _reason_phrase(cls.status)
        if QkvError in cls.__bases__:  # a class below has the problem type of its parent
            cls.name = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()

    def __init__(
        self,
        detail: str,
        *,
        pointer: str | None = None,
        retry_after: int | None = None,
        **members: Any,
    ) -> None:
        super().__init__(detail)
        if retry_after is not None:
            self.retry_after = retry_after
        self.detail = detail
        self.pointer = pointer
        self.members = members

    def problem(self) -> dict[str, Any]:
        """Returns the problem document of RFC 9457, section 3."""
        document: dict[str, Any] = {
            "type": f"{TYPE_PREFIX}{self.name}",
            "title": self.title,
            "status": self.status,
            "detail": _cut(self.detail),
        }
        if self.pointer is not None:
            document["pointer"] = _cut(self.pointer)
        return document | self.members

    def headers(self) -> dict[str, str]:
        """Returns the response headers that the status requires, such as Retry-After (RFC 9110,
        section 10.2.3)."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


class MalformedRequest(QkvError):
    """The body cannot be parsed as its media type, or the request is not HTTP/1.1."""

    status = 400


class Unauthorized(QkvError):
    """The request has no valid API key."""

    status = 401

    def __init__(
        self,
        detail: str = "the API key is missing or wrong: send `Authorization: Bearer <key>`",
        *,
        pointer: str | None = None,
    ) -> None:
        super().__init__(detail, pointer=pointer)

    def headers(self) -> dict[str, str]:
        """Returns WWW-Authenticate (RFC 6750, section 3)."""
        return {"WWW-Authenticate": 'Bearer realm="qkv"'}


class Forbidden(QkvError):
    """The request is for another host, or from a page of another origin."""

    status = 403


class NotFound(QkvError):
    """The variant, model or path does not exist."""

    status = 404


class MethodNotAllowed(QkvError):
    """The path exists, but not for this method."""

    status = 405

    def __init__(self, detail: str, *, allow: str) -> None:
        super().__init__(detail)
        self.allow = allow

    def headers(self) -> dict[str, str]:
        """Returns Allow (RFC 9110, section 15.5.6)."""
        return {"Allow": self.allow}


class NotAcceptable(QkvError):
    """The service has no codec for the media types in Accept."""

    status = 406


class RequestTimeout(QkvError):
    """The client did not send the next part of its request in time."""

    status = 408


class PayloadTooLarge(QkvError):
    """The request, or its response, exceeds a limit of this service."""

    status = 413


class UnsupportedMediaType(QkvError):
    """The service has no codec for the Content-Type or the Content-Encoding."""

    status = 415


class InvalidContent(QkvError):
    """The request was parsed, but a field, shape, dtype or value is wrong."""

    status = 422


class HeadersTooLarge(QkvError):
    """The request line and headers are too long."""

    status = 431


class Internal(QkvError):
    """An internal error. The detail does not describe it; the log does."""


class UnsupportedTransferCoding(QkvError):
    """The body of the request has a transfer coding other than chunked."""

    status = 501


class ServiceUnavailable(QkvError):
    """The service cannot run the request now: it is at a limit, or it is stopping."""

    status = 503
    retry_after = 1


class TooManyRequests(QkvError):
    """The API key has its share of the queue already, and others use the service too."""

    status = 429
    retry_after = 1


def stopping() -> ServiceUnavailable:
    """Returns the error of a request that a stopping service does not complete."""
    return ServiceUnavailable("the service is stopping", retry_after=5)


class ClientDisconnected(QkvError):
    """The client disconnected before the response. Only logs and metrics see this error."""

    status = 499


class DeadlineExceeded(QkvError):
    """The request's deadline passed before it was run."""

    status = 504


def pointer_to(*parts: object) -> str:
    """Returns the JSON pointer to a part of a document (RFC 6901, section 3)."""
    texts = list(map(str, parts))
    joined = "/".join(["", *texts])
    if "~" in joined or joined.count("/") > len(texts):
        return "".join(f"/{text.replace('~', '~0').replace('/', '~1')}" for text in texts)
    return joined


def format_value(value: object, limit: int = 60) -> str:
    """Returns a value from a request as JSON, shortened for an error message."""
    try:
        return _cut(json.dumps(value), limit)
    except (TypeError, ValueError):
        return _cut(repr(value), limit)


def _cut(text: str, limit: int = 600) -> str:
    """Shortens text that may hold what a client sent."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def from_problem(status: int, document: Mapping[str, Any], retry_after: int = 1) -> QkvError:
    """Returns the error that a problem document describes, for a client to raise."""
    detail, pointer = str(document.get("detail", f"HTTP status {status}")), document.get("pointer")
    name = str(document.get("type", "")).rpartition(":")[2]
    error: QkvError
    if name == MethodNotAllowed.name:
        error = MethodNotAllowed(detail, allow="")
    else:
        kinds = {kind.name: kind for kind in QkvError.__subclasses__()}
        error = kinds.get(name, Internal)(detail, pointer=pointer)
    if error.retry_after is not None:
        error.retry_after = retry_after
    known = {"type", "title", "status", "detail", "pointer"}
    error.members = {k: v for k, v in document.items() if k not in known}
    return error
