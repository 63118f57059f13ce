"""Rules for sending a request again, and the errors of responses and connections.

`Client.send`, `Client.stream` and their `AsyncClient` versions use it.
"""

from __future__ import annotations

import math
import re
from typing import Final, NoReturn, TypeVar

import httpx
import msgspec

from qkv.client.request_builders import RequestSpec
from qkv.errors import MalformedRequest, QkvError, ServiceUnavailable, from_problem
from qkv.wire import json

__all__ = [
    "CONNECTION_ERRORS",
    "ServiceUnreachable",
    "backoff_s",
    "parse_response",
    "raise_connection_error",
    "retry_delay_s",
    "to_error",
]

_T = TypeVar("_T")

_MAX_DELAY_S: Final = 10.0
# a run changes nothing in the service: after a broken connection it may be sent again
CONNECTION_ERRORS: Final = (
    httpx.ConnectError,
    httpx.RemoteProtocolError,
    httpx.ReadError,
    httpx.WriteError,
)


class ServiceUnreachable(httpx.ConnectError):
    """No service accepts connections at the address.

    Attributes:
        url: the address, without a user name or password in it.
        reason: the error of the operating system.
    """

    def __init__(self, url: str, error: httpx.ConnectError) -> None:
        self.url = str(httpx.URL(url).copy_with(userinfo=b""))
        self.reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
        super().__init__(
            f"no service at {self.url}: {self.reason}. Start one with `qkv serve`, "
            "or set the address with Client(url) or QKV_URL"
        )


def raise_connection_error(error: Exception, url: str) -> NoReturn:
    """Raises the error of the last attempt.

    Raises:
        ServiceUnreachable: in place of httpx.ConnectError, which has no address.
        Exception: `error` itself in all other cases.
    """
    if isinstance(error, httpx.ConnectError):
        raise ServiceUnreachable(url, error) from error
    raise error


def retry_delay_s(response: httpx.Response, attempt: int) -> float | None:
    """Returns the delay before a failed request is sent again; None: it must not be sent again.

    A service at its limits, or at the share of a key, responds with Retry-After. A server error
    without a problem document is not of the service but of a proxy in front of it: for instance,
    the worker behind it died.

    Args:
        response: to the request.
        attempt: how often the request was sent again already.
    """
    if "retry-after" in response.headers and response.status_code in (429, 503):
        return min(_retry_after_s(response), _MAX_DELAY_S)
    if response.is_server_error and not _is_problem(response):
        return backoff_s(attempt)
    return None


def _is_problem(response: httpx.Response) -> bool:
    """Returns True if the media type of a response is that of problem documents."""
    kind: str = response.headers.get("content-type", "")
    return kind.partition(";")[0].strip().lower() == json.PROBLEM_TYPE


def _retry_after_s(response: httpx.Response) -> float:
    """Returns the seconds of Retry-After; 1 if it is absent or a date."""
    try:
        seconds = float(response.headers.get("retry-after", 1))
    except ValueError:
        return 1.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 1.0


def backoff_s(attempt: int) -> float:
    """Returns the delay after a failure for which nothing gives a delay."""
    return min(0.1 * 4.0**attempt, _MAX_DELAY_S)


def parse_response(spec: RequestSpec[_T], response: httpx.Response) -> _T:
    """Returns the result of a response; raises its error if it is one."""
    if not response.is_success:
        raise to_error(response)
    try:
        return spec.parse(response)
    except (ValueError, KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise MalformedRequest(f"the response is not from a qkv service: {error}") from None


def to_error(response: httpx.Response) -> QkvError:
    """Builds the exception of an error response."""
    retry_after = int(_retry_after_s(response) or 1)
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if isinstance(problem, dict):
        return from_problem(response.status_code, problem, retry_after)
    detail = f"HTTP {response.status_code} without a problem document"
    if response.status_code == 503:  # of a proxy that is at its limits
        return ServiceUnavailable(detail, retry_after=retry_after)
    return MalformedRequest(detail)
