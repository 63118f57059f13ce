"""Rules for sending a request again, and the errors of connections.

`Client` and `AsyncClient` use it for runs and for sweeps.
"""

from __future__ import annotations

import re
from typing import Final, NoReturn, TypeVar

import httpx

from qkv.client.request_builders import RequestSpec
from qkv.client.response_errors import media_type, retry_after_s, to_error, unreadable
from qkv.errors import QkvError
from qkv.wire import json

_T = TypeVar("_T")

_MAX_DELAY_S: Final = 10.0
# no request of the client changes anything in the service: it may be sent again
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
        return min(retry_after_s(response), _MAX_DELAY_S)
    if response.is_server_error and media_type(response) != json.PROBLEM_TYPE:
        return backoff_s(attempt)
    return None


def backoff_s(attempt: int) -> float:
    """Returns the delay after a failure for which nothing gives a delay."""
    return min(0.1 * 4.0**attempt, _MAX_DELAY_S)


def parse_response(spec: RequestSpec[_T], response: httpx.Response) -> _T:
    """Returns the result of a response; raises its error if it is one."""
    if not response.is_success:
        raise to_error(response)
    try:
        return spec.parse(response)
    except (
        QkvError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
    ) as error:  # fmt: skip
        accept = spec.headers.get("Accept", json.MEDIA_TYPE)
        raise unreadable(response, accept, error) from None
