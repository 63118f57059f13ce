"""The client: arrays in, the same kind of arrays out."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import httpx

from qkv.calls import (
    Call,
    build_attend,
    build_convert,
    build_gradients,
    build_variants,
)
from qkv.errors import Unparseable, from_problem
from qkv.results import Converted, Gradients, Run

__all__ = ["AsyncClient", "Client"]

_T = TypeVar("_T")

_URL: Final = "http://127.0.0.1:8000"
_LONGEST_WAIT_S: Final = 10.0
# a run changes nothing at the service, so that one whose connection broke may be sent again
_BROKEN: Final = (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)


class Client:
    """Calls a qkv service. Safe to share between threads; a context manager.

    Args:
        url: of the service.
        api_key: one of its keys, where it has some.
        timeout: seconds for each step of a call (connect, write, read); None: no limit.
        retries: how often a call is sent again that was refused with Retry-After, or whose
            connection was refused or broke.
        transport: httpx transport, for tests.
    """

    def __init__(
        self,
        url: str = _URL,
        *,
        timeout: float | None = 60.0,
        api_key: str | None = None,
        retries: int = 3,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(
            base_url=url, headers=_key_header(api_key), timeout=timeout, transport=transport
        )
        self._retries = retries

    def attend(
        self,
        variant: str,
        *,
        layer: Mapping[str, Any] | str | None = None,
        outputs: list[str] | None = None,
        weights: str | Mapping[str, Any] | None = None,
        **inputs_and_parameters: Any,
    ) -> Run:
        """Runs a variant.

        Args:
            variant: its name, for instance "softmax".
            layer: a saved layer's name, or {"layout", "heads", "tensors"}.
            outputs: what to return; None: output and weights.
            weights: in what form: "full", "none", "stats", {"rows": [0, 5]}, {"top_k": 8} or
                {"pool": 64}. What it gives stands in the run's `outputs`: `weights`, and with top_k
                `indices`; with stats `entropy`, `largest`, `largest_index`, `effective_keys` and
                `received` in place of `weights`.
            **inputs_and_parameters: arrays are inputs (`query` (B,H,L,D), `key` (B,G,S,D),
                `value` (B,G,S,E), `mask`, `key_lengths` (B), or `x` (B,L,M) with a layer), all
                else parameters (`causal=True`).

        Raises:
            QkvError: the service refused; the class says how, `detail` why.
            httpx.TransportError: it could not be reached.
        """
        return self.send(build_attend(variant, layer, outputs, weights, inputs_and_parameters))

    def gradients(
        self,
        variant: str,
        *,
        grad_output: Any,
        layer: Mapping[str, Any] | str | None = None,
        **inputs_and_parameters: Any,
    ) -> Gradients:
        """The gradients of sum(grad_output * output).

        Args:
            variant: its name, for instance "softmax".
            grad_output: the gradient of the output, shaped as the output is.
            layer: as `attend` takes it; its tensors have gradients too.
            **inputs_and_parameters: as `attend` takes them.

        Raises:
            QkvError: the service refused; the class says how, `detail` why.
            httpx.TransportError: it could not be reached.
        """
        return self.send(build_gradients(variant, grad_output, layer, inputs_and_parameters))

    def convert(
        self,
        tensors: Mapping[str, Any],
        *,
        source: str,
        target: str,
        heads: int | None = None,
        bias: str | None = None,
    ) -> Converted:
        """Takes a layer's weights, such as a `state_dict()`, from one layout to another.

        Raises:
            QkvError: the service refused.
            httpx.TransportError: it could not be reached.
        """
        return self.send(build_convert(tensors, source, target, heads, bias))

    def variants(self) -> list[dict[str, Any]]:
        """The catalogue: of each variant formula, paper, cost, inputs, parameters, outputs, and the
        path of a picture.

        Raises:
            QkvError: the service refused.
            httpx.TransportError: it could not be reached.
        """
        return self.send(build_variants())

    def close(self) -> None:
        """Closes its connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def send(self, call: Call[_T]) -> _T:
        """Sends a call that one of the `build` functions made."""
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            try:
                response = self._http.request(
                    call.method, call.path, content=call.content, headers=call.headers
                )
                if last or (wait := _wait(response)) is None:
                    return _parsed(call, response)
            except _BROKEN:
                if last:
                    raise
                wait = _backoff(attempt)
            time.sleep(wait)
        raise AssertionError


class AsyncClient:
    """The twin of `Client` for asyncio; the same arguments, results and errors."""

    def __init__(
        self,
        url: str = _URL,
        *,
        timeout: float | None = 60.0,
        api_key: str | None = None,
        retries: int = 3,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(
            base_url=url, headers=_key_header(api_key), timeout=timeout, transport=transport
        )
        self._retries = retries

    async def attend(
        self,
        variant: str,
        *,
        layer: Mapping[str, Any] | str | None = None,
        outputs: list[str] | None = None,
        weights: str | Mapping[str, Any] | None = None,
        **inputs_and_parameters: Any,
    ) -> Run:
        """Runs a variant: see `Client.attend`."""
        return await self.send(
            build_attend(variant, layer, outputs, weights, inputs_and_parameters)
        )

    async def gradients(
        self,
        variant: str,
        *,
        grad_output: Any,
        layer: Mapping[str, Any] | str | None = None,
        **inputs_and_parameters: Any,
    ) -> Gradients:
        """The gradients of sum(grad_output * output): see `Client.gradients`."""
        return await self.send(build_gradients(variant, grad_output, layer, inputs_and_parameters))

    async def convert(
        self,
        tensors: Mapping[str, Any],
        *,
        source: str,
        target: str,
        heads: int | None = None,
        bias: str | None = None,
    ) -> Converted:
        """Takes weights from one layout to another: see `Client.convert`."""
        return await self.send(build_convert(tensors, source, target, heads, bias))

    async def variants(self) -> list[dict[str, Any]]:
        """The catalogue: see `Client.variants`."""
        return await self.send(build_variants())

    async def close(self) -> None:
        """Closes its connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def send(self, call: Call[_T]) -> _T:
        """Sends a call that one of the `build` functions made."""
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            try:
                response = await self._http.request(
                    call.method, call.path, content=call.content, headers=call.headers
                )
                if last or (wait := _wait(response)) is None:
                    return _parsed(call, response)
            except _BROKEN:
                if last:
                    raise
                wait = _backoff(attempt)
            await asyncio.sleep(wait)
        raise AssertionError


def _key_header(api_key: str | None) -> dict[str, str]:
    if api_key is None:
        return {}
    if not re.fullmatch(r"[!-~]+", api_key):  # or an error of a library below would show it
        raise ValueError("api_key has characters that no key has, or none at all")
    return {"Authorization": f"Bearer {api_key}"}


def _wait(response: httpx.Response) -> float | None:
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


def _backoff(attempt: int) -> float:
    """Seconds until a call whose connection failed is sent again."""
    return min(0.1 * 4.0**attempt, _LONGEST_WAIT_S)


def _parsed(call: Call[_T], response: httpx.Response) -> _T:
    """The result, or what the service says went wrong."""
    if response.is_success:
        try:
            return call.parse(response)
        except (ValueError, KeyError, TypeError) as error:
            raise Unparseable(f"the answer is not that of a qkv service: {error}") from None
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        raise Unparseable(f"HTTP {response.status_code} without a problem document")
    raise from_problem(response.status_code, problem, int(_retry_after(response) or 1))
