"""The Python client for asyncio."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from qkv.client.arrays import has_lists, input_dtypes, lists_to_arrays
from qkv.client.comparison import Comparison
from qkv.client.connections import (
    AsyncConnections,
    RequestTemplates,
    new_async_transport,
)
from qkv.client.detected import Detected, build_detect
from qkv.client.environment import auth_header, service_url
from qkv.client.event_source import ServerSentEvent, aiter_events
from qkv.client.request_builders import (
    Choice,
    LayerChoice,
    RequestSpec,
    StreamSpec,
    build_attend,
    build_compare,
    build_convert,
    build_gradients,
    build_layers,
    build_sweep,
    build_variants,
)
from qkv.client.response_errors import to_error
from qkv.client.results import Converted, Gradients, Run
from qkv.client.retries import (
    CONNECTION_ERRORS,
    backoff_s,
    parse_response,
    raise_connection_error,
    retry_delay_s,
)
from qkv.client.sweep import AsyncSweep
from qkv.client.verification import Verdict, build_draw, build_judge

_T = TypeVar("_T")


class AsyncClient:
    """A `Client` for asyncio, with the same arguments, results and errors."""

    def __init__(
        self,
        url: str | None = None,
        *,
        timeout: float | None = 60.0,
        api_key: str | None = None,
        retries: int = 3,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = service_url(url)
        self._transport = transport or AsyncConnections(self._url)
        self._http = httpx.AsyncClient(
            base_url=self._url,
            headers=auth_header(api_key),
            timeout=timeout,
            transport=transport or new_async_transport(self._url),  # of streams
        )
        self._templates = RequestTemplates(self._http)
        self._retries = retries
        self._catalogue: list[dict[str, Any]] = []  # read before the first list

    async def attend(
        self,
        variant: str,
        *,
        layer: LayerChoice | None = None,
        outputs: list[str] | None = None,
        weights: str | Mapping[str, Any] | None = None,
        **inputs_and_parameters: Any,
    ) -> Run:
        """Runs a variant: see `Client.attend`."""
        arguments = await self._arrays(inputs_and_parameters, variant)
        return await self._send(build_attend(variant, layer, outputs, weights, arguments))

    async def gradients(
        self,
        variant: str,
        *,
        grad_output: Any,
        layer: LayerChoice | None = None,
        **inputs_and_parameters: Any,
    ) -> Gradients:
        """Returns the gradients of sum(grad_output * output): see `Client.gradients`."""
        arguments = await self._arrays(
            {**inputs_and_parameters, "grad_output": grad_output}, variant
        )
        return await self._send(build_gradients(variant, layer, arguments))

    async def compare(
        self,
        variants: Sequence[Choice],
        *,
        anchor: Choice = "softmax",
        repeats: int | None = None,
        rows: int | None = 1024,
        per_head: bool = False,
        layer: LayerChoice | None = None,
        **inputs_and_parameters: Any,
    ) -> Comparison:
        """Compares variants with a baseline on the same inputs: see `Client.compare`."""
        arguments = await self._arrays(inputs_and_parameters, anchor, *variants)
        return await self._send(
            build_compare(variants, anchor, repeats, rows, per_head, layer, arguments)
        )

    def sweep(
        self,
        variants: Sequence[Choice],
        lengths: Iterable[int],
        *,
        batch: int | None = None,
        heads: int | None = None,
        width: int | None = None,
        dtype: str | None = None,
        repeats: int | None = None,
        seed: int | None = None,
        mode: str | None = None,
        progress: bool = True,
        **parameters: Any,
    ) -> AsyncSweep:
        """Times variants at several lengths: see `Client.sweep`.

        Iterate over the result with `async for`; do not await it.
        """
        inputs = {"batch": batch, "heads": heads, "width": width, "dtype": dtype}
        fields = {**inputs, "repeats": repeats, "seed": seed, "mode": mode}
        spec = build_sweep(variants, lengths, fields, parameters)
        return AsyncSweep(self._stream(spec), progress)

    async def convert(
        self,
        tensors: Mapping[str, Any],
        *,
        target: str,
        source: str = "auto",
        prefix: str | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        rope: Mapping[str, Any] | None = None,
        to_order: str | None = None,
        grouped: str | None = None,
        bias: str | None = None,
    ) -> Converted:
        """Converts weights to another layout: see `Client.convert`."""
        return await self._send(
            build_convert(
                tensors, source, target, prefix=prefix, heads=heads, kv_heads=kv_heads, rope=rope,
                to_order=to_order, grouped=grouped, bias=bias,
            )
        )  # fmt: skip

    async def detect(
        self,
        tensors: Mapping[str, Any],
        x: Any,
        y: Any,
        *,
        source: str = "auto",
        prefix: str | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        rope: Mapping[str, Any] | None = None,
        scale: float | None = None,
    ) -> list[Detected]:
        """Finds layout, heads and rotary order of a layer: see `Client.detect`."""
        known = {"prefix": prefix, "heads": heads, "kv_heads": kv_heads, "scale": scale}
        fields = {"from": source, **known, "rope": rope and dict(rope)}
        return await self._send(build_detect(tensors, x, y, fields))

    async def verify(
        self,
        function: Callable[..., Any],
        variant: str,
        *,
        family: str = "normal",
        dtype: str = "float32",
        sizes: Mapping[str, int] | None = None,
        gradients: bool = False,
        like: Any = None,
        seed: int | None = None,
        **parameters: Any,
    ) -> Verdict:
        """Judges a function, which may be async: see `Client.verify`."""
        options = {"family": family, "dtype": dtype, "sizes": sizes, "gradients": gradients}
        fields = {**options, "seed": seed, "parameters": parameters}
        drawn = await self._send(build_draw(variant, like, fields))
        results = function(**drawn.arguments)
        if inspect.isawaitable(results):
            results = await results
        return await self._send(build_judge(drawn, results))

    async def layers(self) -> list[dict[str, Any]]:
        """Returns the layers that the service has loaded: see `Client.layers`."""
        return (await self._send(build_layers()))["layers"]

    async def variants(self) -> list[dict[str, Any]]:
        """Returns the catalogue: see `Client.variants`."""
        return await self._send(build_variants())

    async def _arrays(self, arguments: Mapping[str, Any], *choices: Choice) -> Mapping[str, Any]:
        """Returns arguments of a request, with arrays in place of lists that are inputs of one of
        the variants."""
        if not has_lists(arguments):
            return arguments
        if not self._catalogue:
            self._catalogue = await self.variants()
        return lists_to_arrays(arguments, input_dtypes(self._catalogue, choices))

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _send(self, spec: RequestSpec[_T]) -> _T:
        """Sends a request built by one of the `build_*` functions, and parses its response."""
        for attempt in range(self._retries + 1):
            is_last = attempt == self._retries
            try:
                response = await self._exchange(spec)
                if is_last or (delay_s := retry_delay_s(response, attempt)) is None:
                    return parse_response(spec, response)
            except CONNECTION_ERRORS as error:
                if is_last:
                    raise_connection_error(error, self._url)
                delay_s = backoff_s(attempt)
            await asyncio.sleep(delay_s)
        raise AssertionError

    async def _exchange(self, spec: RequestSpec[Any]) -> httpx.Response:
        """Returns the response to one request."""
        request = self._templates.build(spec)
        try:
            return await self._transport.handle_async_request(request)
        except httpx.RequestError as error:
            error.request = request
            raise

    async def _stream(self, spec: StreamSpec) -> AsyncGenerator[ServerSentEvent]:
        """Yields the events of a response. Retries only until the first event."""
        for attempt in range(self._retries + 1):
            is_last, has_started = attempt == self._retries, False
            try:
                async with self._http.stream(
                    "POST", spec.path, content=spec.content, headers=spec.headers
                ) as response:
                    if response.is_success:
                        async with aclosing(aiter_events(response)) as events:
                            async for event in events:
                                has_started = True
                                yield event
                        return
                    await response.aread()
                    if is_last or (delay_s := retry_delay_s(response, attempt)) is None:
                        raise to_error(response)
            except CONNECTION_ERRORS as error:
                if is_last or has_started:
                    raise_connection_error(error, self._url)
                delay_s = backoff_s(attempt)
            await asyncio.sleep(delay_s)
