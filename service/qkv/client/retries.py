"""What every attempt at a call shares: when another follows, and what a refusal raises."""

from __future__ import annotations

import math
import re
from typing import Final, TypeVar

import httpx

from qkv.client.event_parser import MEDIA_TYPE as EVENTS
from qkv.client.request_builders import RequestSpec
from qkv.errors import MalformedRequest, QkvError, from_problem

__all__ = [
    "CONNECTION_ERRORS",
    "DEFAULT_URL",
    "auth_header",
    "backoff_s",
    "check_event_stream",
    "parse_response",
    "retry_delay_s",
    "to_error",
]

_T = TypeVar("_T")

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_MAX_DELAY_S: Final = 10.0
# a run changes nothing at the service, so that one whose connection broke may be sent again
CONNECTION_ERRORS: Final = (
    httpx.ConnectError,
    httpx.RemoteProtocolError,
    httpx.ReadError,
    httpx.WriteError,
)


def auth_header(api_key: str | None) -> dict[str, str]:
    """Returns the header that carries an API key."""
    if api_key is None:
        return {}
    if not re.fullmatch(r"[!-~]+", api_key):  # or an error of a library below would show it
        raise ValueError("api_key has characters that no key has, or none at all")
    return {"Authorization": f"Bearer {api_key}"}


def retry_delay_s(response: httpx.Response) -> float | None:
    """Returns the delay until a rejected request may be retried; None: it must not be retried."""
    if response.status_code != 503 or "retry-after" not in response.headers:
        return None
    return min(_retry_after_s(response), _MAX_DELAY_S)


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds, as it says; 1 where it says none, or a date."""
    try:
        seconds = float(response.headers.get("retry-after", 1))
    except ValueError:
        return 1.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 1.0


def backoff_s(attempt: int) -> float:
    """Returns the delay before a request whose connection failed is retried."""
    return min(0.1 * 4.0**attempt, _MAX_DELAY_S)


def parse_response(spec: RequestSpec[_T], response: httpx.Response) -> _T:
    """Returns the result of a response; raises its error if it is one."""
    if not response.is_success:
        raise to_error(response)
    try:
        return spec.parse(response)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedRequest(f"the answer is not that of a qkv service: {error}") from None


def to_error(response: httpx.Response) -> QkvError:
    """Builds the exception of an error response."""
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        return MalformedRequest(f"HTTP {response.status_code} without a problem document")
    return from_problem(response.status_code, problem, int(_retry_after_s(response) or 1))


def check_event_stream(response: httpx.Response) -> None:
    """Raises if a response is not a stream of events."""
    kind = response.headers.get("content-type", "none").partition(";")[0].strip()
    if kind.lower() != EVENTS:
        raise MalformedRequest(
            f"the answer is not that of a qkv service: {kind:.60} is no {EVENTS}"
        )
