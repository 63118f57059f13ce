"""The Python client: sends arrays to a service, and returns arrays of the same kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from qkv.client.arrays import has_lists, input_dtypes, lists_to_arrays
from qkv.client.comparison import Comparison
from qkv.client.connections import RequestTemplates, new_transport
from qkv.client.detected import Detected, build_detect
from qkv.client.environment import auth_header, service_url
from qkv.client.event_source import ServerSentEvent, iter_events
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
from qkv.client.sweep import Sweep
from qkv.client.verification import Verdict, build_draw, build_judge

_T = TypeVar("_T")


class Client:
    """A client of a qkv service, which threads may share; a context manager.

    Args:
        url: of the service; None: the variable QKV_URL, else http://127.0.0.1:8000.
        api_key: one of the service's keys; None: the variable QKV_API_KEY, else no key.
        timeout: seconds for each step of a request (connect, write, read); None: no limit.
        retries: how often a request is sent again. This happens after a response with Retry-After,
            after a server error without a problem document (a proxy sent it), and after a
            connection that was refused or broke.
        transport: httpx transport, for tests.

    Raises:
        ValueError: the URL or the key cannot be one.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        timeout: float | None = 60.0,
        api_key: str | None = None,
        retries: int = 3,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url = service_url(url)
        self._transport = transport or new_transport(self._url)
        self._http = httpx.Client(
            base_url=self._url,
            headers=auth_header(api_key),
            timeout=timeout,
            transport=self._transport,
        )
        self._templates = RequestTemplates(self._http)
        self._retries = retries
        self._catalogue: list[dict[str, Any]] = []  # read before the first list

    def attend(
        self,
        variant: str,
        *,
        layer: LayerChoice | None = None,
        outputs: list[str] | None = None,
        weights: str | Mapping[str, Any] | None = None,
        **inputs_and_parameters: Any,
    ) -> Run:
        """Runs a variant on arrays of numpy or torch.

        Args:
            variant: its name, for instance "softmax".
            layer: the projections around the variant, as an object {"layout": "auto", "heads": n,
                "prefix": "...", "tensors": {...}}. The tensors may be the `state_dict()` of a whole
                model: the client sends the floating ones below the prefix. Or the name of a layer
                that the service has loaded, which `layers` lists, such as "minilm.encoder.layer.3",
                or an object with `name` and other fields.
            outputs: the names of the outputs to return; None: output and weights.
            weights: the form of the weights: "full", "none", "stats", {"rows": [0, 5]},
                {"top_k": 8} or {"pool": 64}. The run has them in `outputs`: `weights`, and with
                top_k also `indices`. With stats it has `entropy`, `largest`, `largest_index`,
                `effective_keys` and `received` instead of `weights`.
            **inputs_and_parameters: arrays are inputs: `query` (B,H,L,D), `key` (B,G,S,D),
                `value` (B,G,S,E), `mask`, `key_lengths` (B), `alibi_slopes` (H), `sinks` (H), or
                `x` (B,L,M) with a layer. A list by the name of an input is one too; its numbers get
                the dtype of the arrays, else float32. `state` is the state of another run,
                `run.state`, which `outputs` names as "state". All other values are parameters, such
                as `causal=True`.

        Returns:
            The run, with arrays of the inputs' kind: `output` (B,H,L,E), `weights` (B,H,L,S), and
            the others that were asked for, with as many axes as the inputs have.

        Raises:
            QkvError: the service rejected the request. The class gives the kind of error, and
                `detail` the reason.
            ServiceUnreachable: no service accepts connections at the address.
            httpx.TransportError: the connection broke or timed out.
        """
        arguments = self._arrays(inputs_and_parameters, variant)
        return self._send(build_attend(variant, layer, outputs, weights, arguments))

    def gradients(
        self,
        variant: str,
        *,
        grad_output: Any,
        layer: LayerChoice | None = None,
        **inputs_and_parameters: Any,
    ) -> Gradients:
        """Returns the gradients of sum(grad_output * output).

        Args:
            variant: its name, for instance "softmax".
            grad_output: the gradient of the output, in the shape of the output.
            layer: as for `attend`; the tensors in a request have gradients too.
            **inputs_and_parameters: as for `attend`.

        Returns:
            A gradient for each floating input and each tensor of the layer, by its name and in its
            shape.

        Raises:
            QkvError, ServiceUnreachable, httpx.TransportError: as for `attend`.
        """
        arguments = self._arrays({**inputs_and_parameters, "grad_output": grad_output}, variant)
        return self._send(build_gradients(variant, layer, arguments))

    def compare(
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
        """Compares variants with a baseline on the same inputs.

        Args:
            variants: names, or objects such as {"variant": "taylor", "parameters": {...}}.
            anchor: the baseline, a variant like the others.
            repeats: timed runs of each variant; None: the default of the service.
            rows: how many rows of each head's weights are compared, evenly spread; None: all.
            per_head: True adds the figures of each query head: `heads` of each variant and of the
                anchor, in order. With an output projection, a head has weights but no output.
            layer: as for `attend`.
            **inputs_and_parameters: as for `attend`. Parameters are for all variants and the
                baseline; a variant's own parameters override them.

        Returns:
            The distances of outputs and weights from the baseline's, in float64, and the costs.

        Raises:
            QkvError, ServiceUnreachable, httpx.TransportError: as for `attend`.
        """
        arguments = self._arrays(inputs_and_parameters, anchor, *variants)
        return self._send(
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
    ) -> Sweep:
        """Times variants at several lengths, on random inputs that the service generates.

        The client sends the request when the first cell is read, and raises its errors there. It
        does not send the request again after the first event.

        Args:
            variants: names, or objects such as {"variant": "taylor", "parameters": {...}}.
            lengths: of queries and keys, or of the tokens before the next one.
            batch, heads, width, dtype: of the inputs; None: the defaults of the service.
            repeats: timed runs of each cell; None: the default of the service.
            seed: of the inputs.
            mode: "decode" times the next token: of a variant with a state from its state, of
                another one from a cache and by computing all tokens again. None: whole calls.
            progress: True shows a progress bar in a terminal or a notebook.
            **parameters: for all variants; a variant's own parameters override them.

        Returns:
            An iterator of `Cell`. Closing it, or leaving its `with` block, ends the sweep.

        Raises:
            InvalidContent: one of the parameters is an array.
        """
        inputs = {"batch": batch, "heads": heads, "width": width, "dtype": dtype}
        fields = {**inputs, "repeats": repeats, "seed": seed, "mode": mode}
        return Sweep(self._stream(build_sweep(variants, lengths, fields, parameters)), progress)

    def convert(
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
        """Converts a layer's weights to another layout: numbers are moved, and no bit changes.

        Args:
            tensors: weights by name, such as the `state_dict()` of a layer or of a whole model.
                The client sends the floating tensors below `prefix`.
            target: the layout to convert to, such as "v1" or "llama".
            source: the layout of the weights; "auto" is the one that names and shapes show.
            prefix: the names before those of the layout, such as "model.layers.0.self_attn"; None:
                the only layer.
            heads: query heads, for layouts that keep the tensors of a head together.
            kv_heads: key heads; None: as many as the matrices show, else as many as query heads.
            rope: the rotary embedding of the source, {"order": "interleaved", "dims": 64}.
            to_order: the rotary order of the result, "half" or "interleaved"; None: that of the
                target layout, else that of the source.
            grouped: "repeat" repeats each key and value head for its query heads if the target has
                as many of both; "refuse" (the default of the service) rejects grouped heads.
            bias: "augment" stores a bias, for which v1 has no place, as one more row of the
                weight; "refuse" (the default of the service) rejects it.

        Returns:
            The weights in the target layout, and how far both layers differ on one random input.

        Raises:
            QkvError, ServiceUnreachable, httpx.TransportError: as for `attend`.
        """
        return self._send(
            build_convert(
                tensors, source, target, prefix=prefix, heads=heads, kv_heads=kv_heads, rope=rope,
                to_order=to_order, grouped=grouped, bias=bias,
            )
        )  # fmt: skip

    def detect(
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
        """Finds layout, heads, rotary order and scale of a layer by running it.

        Args:
            tensors: the weights, such as a `state_dict()`, by name.
            x: hidden states (L, M) or (B, L, M).
            y: the output of the real module for x, its output projection included.
            source: the layout of the weights; "auto" tries those that names and shapes allow.
            prefix: of the names of the layer's tensors.
            heads, kv_heads: numbers of query and key heads, if they are known.
            rope: base, order, dims and scaling of the rotary embedding, if they are known.
            scale: one more factor of the scores to try.

        Returns:
            At most ten candidates, best first.

        Raises:
            QkvError, ServiceUnreachable, httpx.TransportError: as for `attend`.
        """
        known = {"prefix": prefix, "heads": heads, "kv_heads": kv_heads, "scale": scale}
        fields = {"from": source, **known, "rope": rope and dict(rope)}
        return self._send(build_detect(tensors, x, y, fields))

    def verify(
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
        """Judges a function on inputs that the service draws.

        The client calls the function with the inputs and the parameters by name, such as
        `function(query=..., key=..., value=..., causal=True)`, with arrays of the shapes of
        `attend`. The function returns the output, in the dtype of its inputs.

        Args:
            function: the function to judge.
            variant: the name of the variant that it computes, for instance "softmax".
            family: of the inputs, for instance "mask"; `qkv oracle --list` lists all.
            dtype: of the inputs and results.
            sizes: by axis letter (B, H, G, L, S, D, E); the family chooses the others.
            gradients: True to judge gradients too: `grad_output` is one more argument, and the
                function returns `output`, `grad_query` and so on by name.
            like: an array of the kind and on the device that the function takes, such as
                `torch.empty(0)`; None: numpy.
            seed: of the inputs; None: the service draws one, so that nobody can foresee them.
            **parameters: of the variant, such as `causal=True`.

        Returns:
            The verdict: whether every number is within its budget, and the names of known bugs that
            give these results.

        Raises:
            QkvError: as for `attend`, or a result is no array.
            ServiceUnreachable, httpx.TransportError: as for `attend`.
        """
        options = {"family": family, "dtype": dtype, "sizes": sizes, "gradients": gradients}
        fields = {**options, "seed": seed, "parameters": parameters}
        drawn = self._send(build_draw(variant, like, fields))
        return self._send(build_judge(drawn, function(**drawn.arguments)))

    def layers(self) -> list[dict[str, Any]]:
        """Returns the layers that the service has loaded: name, layout, heads, width, parameters.

        Raises:
            QkvError, ServiceUnreachable, httpx.TransportError: as for `attend`.
        """
        return self._send(build_layers())["layers"]

    def variants(self) -> list[dict[str, Any]]:
        """Returns the catalogue of variants.

        Each has its formula, paper, cost, inputs, parameters, outputs, and the path of a
        picture.

        Raises:
            QkvError, ServiceUnreachable, httpx.TransportError: as for `attend`.
        """
        return self._send(build_variants())

    def _arrays(self, arguments: Mapping[str, Any], *choices: Choice) -> Mapping[str, Any]:
        """Returns arguments of a request, with arrays in place of lists that are inputs of one of
        the variants."""
        if not has_lists(arguments):
            return arguments
        if not self._catalogue:
            self._catalogue = self.variants()
        return lists_to_arrays(arguments, input_dtypes(self._catalogue, choices))

    def close(self) -> None:
        """Closes the connections."""
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

    def _send(self, spec: RequestSpec[_T]) -> _T:
        """Sends a request built by one of the `build_*` functions, and parses its response."""
        for attempt in range(self._retries + 1):
            is_last = attempt == self._retries
            try:
                response = self._exchange(spec)
                if is_last or (delay_s := retry_delay_s(response, attempt)) is None:
                    return parse_response(spec, response)
            except CONNECTION_ERRORS as error:
                if is_last:
                    raise_connection_error(error, self._url)
                delay_s = backoff_s(attempt)
            time.sleep(delay_s)
        raise AssertionError

    def _exchange(self, spec: RequestSpec[Any]) -> httpx.Response:
        """Returns the response to one request."""
        request = self._templates.build(spec)
        try:
            response = self._transport.handle_request(request)
            response.request = request
            response.read()
        except httpx.RequestError as error:
            error.request = request
            raise
        return response

    def _stream(self, spec: StreamSpec) -> Generator[ServerSentEvent]:
        """Yields the events of a response. Retries only until the first event."""
        for attempt in range(self._retries + 1):
            is_last, has_started = attempt == self._retries, False
            try:
                with self._http.stream(
                    "POST", spec.path, content=spec.content, headers=spec.headers
                ) as response:
                    if response.is_success:
                        for event in iter_events(response):
                            has_started = True
                            yield event
                        return
                    response.read()
                    if is_last or (delay_s := retry_delay_s(response, attempt)) is None:
                        raise to_error(response)
            except CONNECTION_ERRORS as error:
                if is_last or has_started:
                    raise_connection_error(error, self._url)
                delay_s = backoff_s(attempt)
            time.sleep(delay_s)
