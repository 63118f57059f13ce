"""The client: arrays in, the same kind of arrays out."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar
from urllib.parse import quote

import httpx
import numpy as np

from qkv.arrays import Restore, is_array, restorer, to_raw
from qkv.errors import InvalidContent, Unparseable, from_problem
from qkv.message import Message
from qkv.wire import Codec, json, safetensors

__all__ = ["AsyncClient", "Client", "Converted", "Run"]

_T = TypeVar("_T")

_URL: Final = "http://127.0.0.1:8000"
_LONGEST_WAIT_S: Final = 10.0
# a run changes nothing at the service, so that one whose connection broke may be sent again
_BROKEN: Final = (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)


@dataclass(frozen=True, slots=True)
class Run:
    """What a run answered.

    Attributes:
        variant: its name.
        outputs: arrays by name, of the kind that the inputs were.
        timing: milliseconds by stage, batch size, device, backend, flops, bytes.
    """

    variant: str
    outputs: Mapping[str, Any]
    timing: Mapping[str, Any]

    @property
    def output(self) -> Any:
        """(B, H, L, E), in the rank of the inputs."""
        return self.outputs["output"]

    @property
    def weights(self) -> Any:
        """(B, H, L, S), in the rank of the inputs."""
        return self.outputs["weights"]

    @property
    def scores(self) -> Any:
        """(B, H, L, S), in the rank of the inputs: scaled, capped and masked."""
        return self.outputs["scores"]


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion answered.

    Attributes:
        tensors: the weights in the target layout, by name.
        check: how far both layers' outputs lie apart on the same random input.
    """

    tensors: Mapping[str, Any]
    check: Mapping[str, Any]


class Call(NamedTuple, Generic[_T]):
    """A call as bytes, and what makes a result of the answer's bytes."""

    method: str
    path: str
    parse: Callable[[httpx.Response], _T]
    content: bytes = b""
    headers: Mapping[str, str] = {}


class Client:
    """Calls a qkv service. Safe to share between threads; a context manager.

    Args:
        url: of the service.
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
        retries: int = 3,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(base_url=url, timeout=timeout, transport=transport)
        self._retries = retries

    def attend(
        self,
        variant: str,
        *,
        layer: Mapping[str, Any] | str | None = None,
        outputs: list[str] | None = None,
        weights: str | None = None,
        **inputs_and_parameters: Any,
    ) -> Run:
        """Runs a variant.

        Args:
            variant: its name, for instance "softmax".
            layer: a saved layer's name, or {"layout", "heads", "tensors"}.
            outputs: what to return; None: output and weights.
            weights: "full" or "none".
            **inputs_and_parameters: arrays are inputs (`query` (B,H,L,D), `key` (B,G,S,D),
                `value` (B,G,S,E), `mask`, `key_lengths` (B), or `x` (B,L,M) with a layer), all
                else parameters (`causal=True`).

        Raises:
            QkvError: the service refused; the class says how, `detail` why.
            httpx.TransportError: it could not be reached.
        """
        return self.send(build_attend(variant, layer, outputs, weights, inputs_and_parameters))

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
        """The catalogue: of each variant formula, paper, cost, inputs, parameters, outputs.

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
        retries: int = 3,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout, transport=transport)
        self._retries = retries

    async def attend(
        self,
        variant: str,
        *,
        layer: Mapping[str, Any] | str | None = None,
        outputs: list[str] | None = None,
        weights: str | None = None,
        **inputs_and_parameters: Any,
    ) -> Run:
        """Runs a variant: see `Client.attend`."""
        return await self.send(
            build_attend(variant, layer, outputs, weights, inputs_and_parameters)
        )

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


def build_attend(
    variant: str,
    layer: Mapping[str, Any] | str | None,
    outputs: list[str] | None,
    weights: str | None,
    arguments: Mapping[str, Any],
) -> Call[Run]:
    """The call that runs a variant; the arguments are those of `Client.attend`."""
    arrays = {name: value for name, value in arguments.items() if is_array(value)}
    if not arrays:
        raise InvalidContent(
            "none of the arguments is an array; wrap lists with numpy.asarray or torch.tensor"
        )
    for name, value in arguments.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidContent(f"{name} is {value}; parameters are finite")
    parameters = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in arguments.items()
        if name not in arrays and value is not None
    }
    fields = _given(outputs=outputs, weights=weights) | {"parameters": parameters}
    layer_tensors: dict[str, Any] = {}
    if isinstance(layer, Mapping):
        fields["layer"] = {k: v for k, v in layer.items() if k != "tensors"}
        layer_tensors = {n: to_raw(array) for n, array in layer.get("tensors", {}).items()}
    elif layer is not None:
        fields["layer"] = layer
    message = Message(fields, {n: to_raw(array) for n, array in arrays.items()}, layer_tensors)
    restore = restorer(next(iter(arrays.values())))

    def parse(response: httpx.Response) -> Run:
        answer = safetensors.decode(response.content, "outputs")
        outputs = _restored(answer, restore)
        return Run(answer.fields["variant"], outputs, answer.fields["timing"])

    return _post(run_path(variant), message, "inputs", parse)


def build_convert(
    tensors: Mapping[str, Any], source: str, target: str, heads: int | None, bias: str | None
) -> Call[Converted]:
    """The call that converts weights; the arguments are those of `Client.convert`."""
    fields = {"from": source, "to": target} | _given(heads=heads, bias=bias)
    message = Message(fields, {name: to_raw(array) for name, array in tensors.items()})
    restore = restorer(next(iter(tensors.values()), None))

    def parse(response: httpx.Response) -> Converted:
        answer = safetensors.decode(response.content, "tensors")
        return Converted(_restored(answer, restore), answer.fields["check"])

    return _post("/v1/convert", message, "tensors", parse)


def build_message(path: str, message: Message, group: str, answered: str) -> Call[Message]:
    """The call that posts a message and answers one, raw tensors both.

    Numbers that were written without a dtype go as they are, in JSON: what they become depends on
    what they are for, which the service knows.
    """
    literal = any(t.literal for t in (*message.tensors.values(), *message.layer.values()))
    codec: Codec = json if literal else safetensors
    return _post(path, message, group, lambda r: safetensors.decode(r.content, answered), codec)


def run_path(variant: str) -> str:
    """Where a variant runs; a name with a "?" or "/" in it asks for no other than itself."""
    return f"/v1/attention/{quote(variant, safe='', errors='replace')}"


def build_variants() -> Call[list[dict[str, Any]]]:
    """The call that reads the catalogue."""

    def parse(response: httpx.Response) -> list[dict[str, Any]]:
        catalogue: list[dict[str, Any]] = response.json()["variants"]
        return catalogue

    return Call("GET", "/v1/variants", parse)


def _post(
    path: str,
    message: Message,
    group: str,
    parse: Callable[[httpx.Response], _T],
    codec: Codec = safetensors,
) -> Call[_T]:
    headers = {"Content-Type": codec.MEDIA_TYPE, "Accept": safetensors.MEDIA_TYPE}
    return Call("POST", path, parse, b"".join(codec.encode(message, group)), headers)


def _restored(message: Message, restore: Restore) -> dict[str, Any]:
    return {name: restore(raw) for name, raw in message.tensors.items()}


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


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
