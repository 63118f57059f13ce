"""The client: arrays in, the same kind of arrays out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np

from qkv.arrays import Restore, is_array, restorer, to_raw
from qkv.errors import InvalidContent, QkvError, Unparseable, from_problem
from qkv.message import Message
from qkv.wire import json

__all__ = ["Client", "Converted", "Run"]


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


class Client:
    """Calls a qkv service. Safe to share between threads; a context manager.

    Args:
        url: of the service.
        timeout: seconds for a whole call; None: no limit.
        transport: httpx transport, for tests.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        timeout: float | None = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(base_url=url, timeout=timeout, transport=transport)

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
        message, restore = _build(inputs_and_parameters, layer, outputs, weights)
        answer = self._post(f"/v1/attention/{variant}", message, "inputs", "outputs")
        arrays = {name: restore(raw) for name, raw in answer.tensors.items()}
        with _of_qkv():
            return Run(answer.fields["variant"], arrays, answer.fields["timing"])

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
        fields = {"from": source, "to": target} | _given(heads=heads, bias=bias)
        raw = {name: to_raw(array) for name, array in tensors.items()}
        answer = self._post("/v1/convert", Message(fields, raw, encoding="base64"), "tensors")
        restore = restorer(next(iter(tensors.values()), None))
        arrays = {name: restore(t) for name, t in answer.tensors.items()}
        with _of_qkv():
            return Converted(arrays, answer.fields["check"])

    def variants(self) -> list[dict[str, Any]]:
        """The catalogue: of each variant formula, paper, cost, inputs, parameters, outputs.

        Raises:
            QkvError: the service refused.
            httpx.TransportError: it could not be reached.
        """
        response = self._http.get("/v1/variants")
        _check(response)
        with _of_qkv():
            catalogue: list[dict[str, Any]] = response.json()["variants"]
            return catalogue

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

    def _post(self, path: str, message: Message, group: str, answered: str = "tensors") -> Message:
        response = self._http.post(
            path,
            content=json.encode(message, group),
            headers={"Content-Type": json.MEDIA_TYPE},
        )
        _check(response)
        return json.decode(response.content, answered)


def _build(
    arguments: Mapping[str, Any],
    layer: Mapping[str, Any] | str | None,
    outputs: list[str] | None,
    weights: str | None,
) -> tuple[Message, Restore]:
    """The message of a run, and what makes the caller's kind of array of its answer."""
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
    tensors = {name: to_raw(array) for name, array in arrays.items()}
    message = Message(fields, tensors, layer_tensors, encoding="base64")
    return message, restorer(next(iter(arrays.values())))


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


@contextmanager
def _of_qkv() -> Iterator[None]:
    """What answers may be no qkv."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise Unparseable(f"the answer is not that of a qkv service: {error}") from None


def _check(response: httpx.Response) -> None:
    """Raises what the service says went wrong."""
    if response.is_success:
        return
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        raise Unparseable(f"HTTP {response.status_code} without a problem document")
    retry_after = response.headers.get("retry-after", "1")
    error: QkvError = from_problem(
        response.status_code, problem, int(retry_after) if retry_after.isdecimal() else 1
    )
    raise error
