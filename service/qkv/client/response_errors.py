"""The errors of responses: those of the service, and those that are not of a qkv service."""

from __future__ import annotations

import math

import httpx
import orjson

from qkv.errors import TYPE_PREFIX, MalformedRequest, QkvError, ServiceUnavailable, from_problem
from qkv.wire import safetensors


def media_type(response: httpx.Response) -> str:
    """Returns the media type of a response, in lower case and without parameters; "" if absent."""
    kind: str = response.headers.get("content-type", "")
    return kind.partition(";")[0].strip().lower()


def retry_after_s(response: httpx.Response) -> float:
    """Returns the seconds of Retry-After; 1 if it is absent or a date."""
    try:
        seconds = float(response.headers.get("retry-after", 1))
    except ValueError:
        return 1.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 1.0


def to_error(response: httpx.Response) -> QkvError:
    """Builds the exception of an error response."""
    retry_after = int(retry_after_s(response) or 1)
    try:
        problem = orjson.loads(response.content)
    except ValueError:
        problem = None
    if isinstance(problem, dict) and str(problem.get("type")).startswith(TYPE_PREFIX):
        return from_problem(response.status_code, problem, retry_after)
    if response.has_redirect_location:
        return MalformedRequest(
            f"the response is a redirect: got HTTP {response.status_code} to "
            f"{response.headers['location']!r:.200}, expected a response of a qkv service. The "
            "client follows no redirect: set its URL to that of the service"
        )
    detail = f"the response has no problem document: got {_describe(response)}, expected one of qkv"
    if response.status_code == 503:  # of a proxy that is at its limits
        return ServiceUnavailable(detail, retry_after=retry_after)
    return MalformedRequest(detail)


def unreadable(response: httpx.Response, expected: str, reason: object = "") -> MalformedRequest:
    """Builds the exception of a successful response that is not one of qkv.

    Args:
        response: to the request.
        expected: the media type of the request's responses.
        reason: the error of the parser.
    """
    is_same = media_type(response) == expected
    kind = "damaged, or not from a qkv service" if is_same else "not from a qkv service"
    if isinstance(reason, KeyError):
        reason = f"it has no {reason}"
    ending = f": {reason}" if is_same and reason else f", expected {expected}"
    return MalformedRequest(f"the response is {kind}: got {_describe(response)}{ending}")


def _describe(response: httpx.Response) -> str:
    """Returns status, media type and first characters of a response."""
    kind = media_type(response)
    head = f"HTTP {response.status_code}, {kind[:60] or 'no media type'}"
    try:
        content = response.content
    except httpx.ResponseNotRead:  # of a stream
        return head
    if not content or kind == safetensors.MEDIA_TYPE:
        return f"{head}, {len(content)} bytes"
    text = " ".join(content[:200].decode(errors="replace").split())
    return f"{head}, that begins with {text[:60]!r}"
