"""The one exception tree: each class carries its HTTP status and its stable problem type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "Internal",
    "InvalidContent",
    "Left",
    "MethodNotAllowed",
    "NotAcceptable",
    "NotFound",
    "NotNow",
    "QkvError",
    "TooLarge",
    "TooLate",
    "TooLong",
    "TooSlow",
    "Unauthorized",
    "Unparseable",
    "UnsupportedMediaType",
    "from_problem",
    "pointer_to",
    "shown",
]


class QkvError(Exception):
    """A fault that is known, with all that an RFC 9457 problem document needs.

    Args:
        detail: what came and what was expected, in one or two sentences for a person.
        pointer: JSON pointer (RFC 6901) to the part of the request that is at fault.
        **members: further members of the problem document, JSON values.
    """

    status: ClassVar[int] = 500
    name: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"

    def __init__(self, detail: str, *, pointer: str | None = None, **members: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.pointer = pointer
        self.members = members

    def problem(self) -> dict[str, Any]:
        """The problem document of RFC 9457, section 3."""
        document: dict[str, Any] = {
            "type": f"urn:qkv:problem:{self.name}",
            "title": self.title,
            "status": self.status,
            "detail": _cut(self.detail),
        }
        if self.pointer is not None:
            document["pointer"] = _cut(self.pointer)
        return document | self.members

    def headers(self) -> dict[str, str]:
        """Headers that the status asks for, such as Retry-After."""
        return {}


class Unparseable(QkvError):
    """The bytes are not what their media type says."""

    status = 400
    name = "unparseable"
    title = "The request cannot be parsed"


class Unauthorized(QkvError):
    """It came without one of the service's keys."""

    status = 401
    name = "unauthorized"
    title = "Unauthorized"

    def __init__(
        self,
        detail: str = "this needs a key: send Authorization: Bearer and one of the service's keys",
        *,
        pointer: str | None = None,
    ) -> None:
        super().__init__(detail, pointer=pointer)

    def headers(self) -> dict[str, str]:
        """RFC 6750, section 3."""
        return {"WWW-Authenticate": 'Bearer realm="qkv"'}


class NotFound(QkvError):
    """No such variant, layer or path."""

    status = 404
    name = "not-found"
    title = "Not found"


class MethodNotAllowed(QkvError):
    """The path exists, the method does not."""

    status = 405
    name = "method-not-allowed"
    title = "Method not allowed"

    def __init__(self, detail: str, *, allow: str) -> None:
        super().__init__(detail)
        self.allow = allow

    def headers(self) -> dict[str, str]:
        """RFC 9110, section 15.5.6: a 405 names what is allowed."""
        return {"Allow": self.allow}


class NotAcceptable(QkvError):
    """Nothing that Accept names is written here."""

    status = 406
    name = "not-acceptable"
    title = "Not acceptable"


class TooSlow(QkvError):
    """It did not come in the time that the service waits for the next part of it."""

    status = 408
    name = "too-slow"
    title = "Too slow"


class TooLarge(QkvError):
    """It can never fit the limits of this service."""

    status = 413
    name = "too-large"
    title = "Too large"


class UnsupportedMediaType(QkvError):
    """The Content-Type has no codec here, or the Content-Encoding is none that is read."""

    status = 415
    name = "unsupported-media-type"
    title = "Unsupported media type"


class InvalidContent(QkvError):
    """Parsed, but wrong: a shape, a dtype, a name, a value."""

    status = 422
    name = "invalid-content"
    title = "Invalid content"


class TooLong(QkvError):
    """What stands before the body is too long."""

    status = 431
    name = "too-long"
    title = "Request header fields too large"


class Internal(QkvError):
    """Our own fault. The detail says nothing of the inside."""


class NotNow(QkvError):
    """It would fit, but not at this moment.

    Args:
        retry_after: whole seconds after which a retry makes sense.
    """

    status = 503
    name = "not-now"
    title = "Not now"

    def __init__(self, detail: str, *, retry_after: int = 1) -> None:
        super().__init__(detail)
        self.retry_after = retry_after

    def headers(self) -> dict[str, str]:
        """RFC 9110, section 10.2.3."""
        return {"Retry-After": str(self.retry_after)}


class Left(QkvError):
    """The caller left before it was answered: nobody reads this, but logs may count it."""

    status = 499
    name = "left"
    title = "The caller left"


class TooLate(QkvError):
    """The deadline passed before the device was free."""

    status = 504
    name = "too-late"
    title = "Too late"


def pointer_to(*parts: object) -> str:
    """The JSON pointer to a part of a document (RFC 6901, section 3)."""
    escaped = (str(part).replace("~", "~0").replace("/", "~1") for part in parts)
    return "".join(f"/{part}" for part in escaped)


def shown(value: object, most: int = 60) -> str:
    """A value from a request as JSON writes it, as far as a person needs it."""
    try:
        return _cut(json.dumps(value), most)
    except (TypeError, ValueError):
        return _cut(repr(value), most)


def _cut(text: str, most: int = 600) -> str:
    """Names that a client chose are echoed, but not at any length."""
    return text if len(text) <= most else f"{text[:most]}..."


def from_problem(status: int, document: Mapping[str, Any], retry_after: int = 1) -> QkvError:
    """The error that a problem document was made of, for a client to raise."""
    detail, pointer = str(document.get("detail", f"HTTP status {status}")), document.get("pointer")
    name = str(document.get("type", "")).rpartition(":")[2]
    error: QkvError
    if name == NotNow.name:
        error = NotNow(detail, retry_after=retry_after)
    elif name == MethodNotAllowed.name:
        error = MethodNotAllowed(detail, allow="")
    else:
        kinds = {kind.name: kind for kind in QkvError.__subclasses__()}
        error = kinds.get(name, Internal)(detail, pointer=pointer)
    known = {"type", "title", "status", "detail", "pointer"}
    error.members = {k: v for k, v in document.items() if k not in known}
    return error
