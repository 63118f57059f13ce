"""What every attempt at a call shares: when another follows, and what a refusal raises."""

from __future__ import annotations

import math
import re
from typing import Final, TypeVar

import httpx

from qkv.client.event_parser import MEDIA_TYPE as EVENTS
from qkv.client.request_builders import Call
from qkv.errors import QkvError, Unparseable, from_problem

__all__ = [
    "BROKEN",
    "URL",
    "backoff",
    "check_events",
    "key_header",
    "parsed",
    "refusal",
    "wait_before_next",
]

_T = TypeVar("_T")

URL: Final = "http://127.0.0.1:8000"
_LONGEST_WAIT_S: Final = 10.0
# a run changes nothing at the service, so that one whose connection broke may be sent again
BROKEN: Final = (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)


def key_header(api_key: str | None) -> dict[str, str]:
    """What says that a caller has a key."""
    if api_key is None:
        return {}
    if not re.fullmatch(r"[!-~]+", api_key):  # or an error of a library below would show it
        raise ValueError("api_key has characters that no key has, or none at all")
    return {"Authorization": f"Bearer {api_key}"}


def wait_before_next(response: httpx.Response) -> float | None:
    """Seconds until a refused call may be sent again; None: it is answered, for good or bad."""
    if response.status_code != 503 or "retry-after" not in response.headers:
        return None
    return min(_retry_after(response), _LONGEST_WAIT_S)


def _retry_after(response: httpx.Response) -> float:
    """Seconds, as it says; 1 where it says none, or a date."""
    try:
        seconds = float(response.headers.get("retry-after", 1))
    except ValueError:
        return 1.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 1.0


def backoff(attempt: int) -> float:
    """Seconds until a call whose connection failed is sent again."""
    return min(0.1 * 4.0**attempt, _LONGEST_WAIT_S)


def parsed(call: Call[_T], response: httpx.Response) -> _T:
    """The result, or what the service says went wrong."""
    if not response.is_success:
        raise refusal(response)
    try:
        return call.parse(response)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unparseable(f"the answer is not that of a qkv service: {error}") from None


def refusal(response: httpx.Response) -> QkvError:
    """What the service says went wrong."""
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        return Unparseable(f"HTTP {response.status_code} without a problem document")
    return from_problem(response.status_code, problem, int(_retry_after(response) or 1))


def check_events(response: httpx.Response) -> None:
    """Raises where a call that is answered by events is answered by something else."""
    kind = response.headers.get("content-type", "none").partition(";")[0].strip()
    if kind.lower() != EVENTS:
        raise Unparseable(f"the answer is not that of a qkv service: {kind:.60} is no {EVENTS}")
