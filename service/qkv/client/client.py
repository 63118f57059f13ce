"""The client: arrays in, the same kind of arrays out."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from qkv.client.comparison import Comparison
from qkv.client.event_parser import Event, EventParser
from qkv.client.request_builders import (
    Choice,
    RequestSpec,
    StreamSpec,
    build_attend,
    build_compare,
    build_convert,
    build_gradients,
    build_sweep,
    build_variants,
)
from qkv.client.results import Converted, Gradients, Run
from qkv.client.retries import (
    CONNECTION_ERRORS,
    DEFAULT_URL,
    auth_header,
    backoff_s,
    check_event_stream,
    parse_response,
    retry_delay_s,
    to_error,
)
from qkv.client.sweep import Sweep

__all__ = ["Client"]

_T = TypeVar("_T")


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
        url: str = DEFAULT_URL,
        *,
        timeout: float | None = 60.0,
        api_key: str | None = None,
        retries: int = 3,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(
            base_url=url, headers=auth_header(api_key), timeout=timeout, transport=transport
        )
        self._retries = retries

    def attend(
        self,
        variant: str,
        *,
        layer: Mapping[str, Any] | None = None,
        outputs: list[str] | None = None,
        weights: str | Mapping[str, Any] | None = None,
        **inputs_and_parameters: Any,
    ) -> Run:
        """Runs a variant.

        Args:
            variant: its name, for instance "softmax".
            layer: {"layout", "heads", "tensors"}.
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
        layer: Mapping[str, Any] | None = None,
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

    def compare(
        self,
        variants: Sequence[Choice],
        *,
        anchor: Choice = "softmax",
        repeats: int | None = None,
        rows: int | None = 1024,
        layer: Mapping[str, Any] | None = None,
        **inputs_and_parameters: Any,
    ) -> Comparison:
        """Runs variants side by side on the same inputs.

        Args:
            variants: names, or {"variant": "taylor", "parameters": {...}}.
            anchor: what they are held against.
            repeats: how often each is timed; None: as the service does.
            rows: of each head whose weights are compared, at most, evenly spread; None: all.
            layer: as `attend` takes it.
            **inputs_and_parameters: as `attend` takes them; parameters are for every variant, the
                anchor too, and a variant's own go before them.

        Raises:
            QkvError: the service refused; the class says how, `detail` why.
            httpx.TransportError: it could not be reached.
        """
        return self.send(
            build_compare(variants, anchor, repeats, rows, layer, inputs_and_parameters)
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
        progress: bool = True,
        **parameters: Any,
    ) -> Sweep:
        """Times variants at lengths, on inputs that the service draws.

        Nothing is asked before the first cell is. Refusals are retried and raised there too; what
        breaks after the first event is not sent again.

        Args:
            variants: names, or {"variant": "taylor", "parameters": {...}}.
            lengths: of queries and keys.
            batch, heads, width, dtype: of the inputs; None: as the service does.
            repeats: how often each is timed; None: as the service does.
            seed: of the inputs.
            progress: show a bar, in a terminal or a notebook.
            **parameters: for every variant; its own go before them.

        Returns:
            An iterator of `Cell`; closing it, or leaving its `with`, ends the sweep.

        Raises:
            InvalidContent: an array is among the parameters.
        """
        inputs = {"batch": batch, "heads": heads, "width": width, "dtype": dtype}
        fields = {**inputs, "repeats": repeats, "seed": seed}
        return Sweep(self.stream(build_sweep(variants, lengths, fields, parameters)), progress)

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

    def send(self, spec: RequestSpec[_T]) -> _T:
        """Sends a request built by one of the `build_*` functions, and parses its response."""
        for attempt in range(self._retries + 1):
            is_last = attempt == self._retries
            try:
                response = self._http.request(
                    spec.method, spec.path, content=spec.content, headers=spec.headers
                )
                if is_last or (delay_s := retry_delay_s(response)) is None:
                    return parse_response(spec, response)
            except CONNECTION_ERRORS:
                if is_last:
                    raise
                delay_s = backoff_s(attempt)
            time.sleep(delay_s)
        raise AssertionError

    def stream(self, spec: StreamSpec) -> Generator[Event]:
        """Yields the events of a response. Retries only until the first event."""
        for attempt in range(self._retries + 1):
            is_last, has_started = attempt == self._retries, False
            try:
                with self._http.stream(
                    "POST", spec.path, content=spec.content, headers=spec.headers
                ) as response:
                    if response.is_success:
                        check_event_stream(response)
                        parser = EventParser()
                        for chunk in response.iter_bytes():
                            for event in parser.feed(chunk):
                                has_started = True
                                yield event
                        return
                    response.read()
                    if is_last or (delay_s := retry_delay_s(response)) is None:
                        raise to_error(response)
            except CONNECTION_ERRORS:
                if is_last or has_started:
                    raise
                delay_s = backoff_s(attempt)
            time.sleep(delay_s)
