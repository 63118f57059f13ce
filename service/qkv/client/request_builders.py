"""Builds the HTTP requests of the client and parses their responses.

`Client`, `AsyncClient` and the commands use the `build_*` functions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote

import httpx
import numpy as np
import orjson

from qkv.client.arrays import FromRaw, from_raw_like, is_array, to_raw
from qkv.client.comparison import Comparison
from qkv.client.event_source import EVENT_STREAM
from qkv.client.layer_tensors import select
from qkv.client.results import Converted, Gradients, Run
from qkv.errors import InvalidContent
from qkv.wire import Codec, json, safetensors
from qkv.wire.message import Message

_T = TypeVar("_T")

Choice: TypeAlias = str | Mapping[str, Any]
"""A variant: its name, or an object {"variant": "taylor", "parameters": {...}}."""

LayerChoice: TypeAlias = str | Mapping[str, Any]
"""A layer: the name of a loaded one, or an object."""


class RequestSpec(NamedTuple, Generic[_T]):
    """A request as bytes, and the function that parses its response.

    Attributes:
        method, path, headers: of the request.
        parse: parses the response.
        chunks: the parts of the body, which are sent one after the other.
    """

    method: str
    path: str
    parse: Callable[[httpx.Response], _T]
    chunks: Sequence[bytes | memoryview] = ()
    headers: Mapping[str, str] = {}

    @property
    def content(self) -> bytes:
        """The whole body, a copy."""
        return b"".join(self.chunks)


class StreamSpec(NamedTuple):
    """A request as bytes, with server-sent events as its response."""

    path: str
    content: bytes
    headers: Mapping[str, str]


def build_attend(
    variant: str,
    layer: LayerChoice | None,
    outputs: list[str] | None,
    weights: str | Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
) -> RequestSpec[Run]:
    """Builds the request that runs a variant; the arguments are those of `Client.attend`."""
    message, from_raw = build_inputs_message(
        layer, arguments, _drop_unset(outputs=outputs, weights=weights)
    )

    def parse(response: httpx.Response) -> Run:
        reply = safetensors.decode(response.content, "outputs")
        outputs = _restore_tensors(reply, from_raw)
        fields = reply.fields
        weights_are = fields.get("weights_are")
        notes = fields.get("notes", ())
        form = weights or "full"
        return Run(fields["variant"], outputs, fields["timing"], weights_are, form, notes)

    return build_post(run_path(variant), message, "inputs", parse)


def build_gradients(
    variant: str, layer: LayerChoice | None, arguments: Mapping[str, Any]
) -> RequestSpec[Gradients]:
    """Builds the request for gradients; the arguments are those of `Client.gradients`."""
    message, from_raw = build_inputs_message(layer, arguments, {})

    def parse(response: httpx.Response) -> Gradients:
        reply = safetensors.decode(response.content, "gradients")
        gradients = _restore_tensors(reply, from_raw)
        return Gradients(reply.fields["variant"], gradients, reply.fields["timing"])

    return build_post(gradients_path(variant), message, "inputs", parse)


def build_inputs_message(
    layer: object,
    arguments: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> tuple[Message, FromRaw]:
    """Returns inputs, parameters and layer as a message, and the converter of response tensors."""
    arguments = _with_state(arguments)
    arrays = {name: value for name, value in arguments.items() if is_array(value)}
    if not arrays:
        raise InvalidContent(
            f"the inputs are missing: got no array among {', '.join(arguments) or 'no arguments'}, "
            "expected arrays of numpy or torch, such as query"
        )
    parameters = _drop_unset(**{n: v for n, v in arguments.items() if n not in arrays})
    fields = {**fields, "parameters": parameters}
    layer_tensors: dict[str, Any] = {}
    if isinstance(layer, Mapping):
        fields["layer"] = {k: v for k, v in layer.items() if k != "tensors"}
        layer_tensors = select(layer.get("tensors", {}), layer.get("prefix"), "/layer")
    elif isinstance(layer, str):
        fields["layer"] = {"name": layer}
    elif layer is not None:
        fields["layer"] = layer  # the service rejects it
    tensors = {n: to_raw(array, n) for n, array in arrays.items()}
    message = Message(to_json_fields(fields), tensors, layer_tensors)
    return message, from_raw_like(next(iter(arrays.values())))


def _with_state(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments with the tensors of a state by their names.

    A state without a tail is compact, and so is the one that is returned.
    """
    if not isinstance(state := arguments.get("state"), Mapping):
        return arguments
    rest = {name: value for name, value in arguments.items() if name != "state"}
    if state and not any(name.startswith("state.tail_") for name in state):
        rest["state"] = "compact"
    return {**rest, **state}


def build_compare(
    variants: Sequence[Choice],
    anchor: Choice,
    repeats: int | None,
    rows: int | None,
    per_head: bool,
    layer: LayerChoice | None,
    arguments: Mapping[str, Any],
) -> RequestSpec[Comparison]:
    """Builds the request that compares variants; the arguments are those of `Client.compare`."""
    message, _ = build_inputs_message(
        layer, arguments, {"rows": rows, **_drop_unset(repeats=repeats, per_head=per_head or None)}
    )
    parameters = message.fields.pop("parameters")
    message.fields["variants"] = build_choices(variants, parameters)
    message.fields["anchor"] = build_choice(anchor, parameters)
    return build_compare_message(message)


def build_compare_message(message: Message) -> RequestSpec[Comparison]:
    """Builds the request that compares variants from a message."""
    return build_post(
        "/v1/compare",
        message,
        "inputs",
        lambda response: Comparison.from_json(response.json()),
        choose_codec(message),
        "application/json",
    )


def build_sweep(
    variants: Sequence[Choice],
    lengths: Iterable[int],
    fields: Mapping[str, Any],
    parameters: Mapping[str, Any],
) -> StreamSpec:
    """Builds the request that sweeps over lengths; the arguments are those of `Client.sweep`."""
    for name, value in parameters.items():
        if is_array(value):
            raise InvalidContent(f"{name} is an array, but the service draws the inputs of a sweep")
    body = {
        "variants": build_choices(variants, _drop_unset(**parameters)),
        "lengths": list(map(operator.index, lengths)),
        **_drop_unset(**fields),
    }
    headers = {"Content-Type": "application/json", "Accept": EVENT_STREAM}
    return StreamSpec("/v1/sweep", orjson.dumps(to_json_fields(body)), headers)


def build_choices(
    variants: Sequence[Choice], parameters: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Applies `build_choice` to each variant."""
    if isinstance(variants, str | Mapping):
        raise InvalidContent(f'variants is not a list: got {variants!r:.60}, expected ["linear"]')
    return [build_choice(variant, parameters) for variant in variants]


def build_choice(variant: Choice, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a variant as an object. Its own parameters override those shared by all."""
    if isinstance(variant, str):
        return {"variant": variant, "parameters": dict(parameters)}
    given = _drop_unset(**variant.get("parameters", {}))
    return to_json_fields({**variant, "parameters": {**parameters, **given}})


def build_convert(
    tensors: Mapping[str, Any], source: str, target: str, **options: Any
) -> RequestSpec[Converted]:
    """Builds the request that converts weights; the arguments are those of `Client.convert`."""
    fields = {"from": source, "to": target} | _drop_unset(**options)
    message = Message(to_json_fields(fields), select(tensors, options.get("prefix")))
    from_raw = from_raw_like(tensors[next(iter(message.tensors))] if message.tensors else None)

    def parse(response: httpx.Response) -> Converted:
        reply = safetensors.decode(response.content, "tensors")
        fields = reply.fields
        return Converted(
            _restore_tensors(reply, from_raw),
            fields["check"],
            fields["from"],
            fields["prefix"],
            tuple(fields["ignored"]),
            fields["rotary_order"],
            fields["layer"],
        )

    return build_post("/v1/convert", message, "tensors", parse)


def build_message(
    path: str, message: Message, group: str, response_group: str
) -> RequestSpec[Message]:
    """Builds the request that posts a message and parses its response to a message."""
    codec = choose_codec(message)
    return build_post(
        path, message, group, lambda r: safetensors.decode(r.content, response_group), codec
    )


def run_path(variant: str) -> str:
    """Returns the path that runs a variant. Escapes "?" and "/" in its name."""
    return f"/v1/attention/{quote(variant, safe='', errors='replace')}"


def gradients_path(variant: str) -> str:
    """Returns the path of a variant's gradients."""
    return f"/v1/gradients/{quote(variant, safe='', errors='replace')}"


def build_variants() -> RequestSpec[list[dict[str, Any]]]:
    """Builds the request for the catalogue."""

    def parse(response: httpx.Response) -> list[dict[str, Any]]:
        catalogue: list[dict[str, Any]] = response.json()["variants"]
        return catalogue

    return RequestSpec("GET", "/v1/variants", parse)


def build_layers() -> RequestSpec[dict[str, list[dict[str, Any]]]]:
    """Builds the request for the loaded layers and the checkpoints."""

    def parse(response: httpx.Response) -> dict[str, list[dict[str, Any]]]:
        loaded: dict[str, list[dict[str, Any]]] = response.json()
        return {"layers": loaded["layers"], "checkpoints": loaded["checkpoints"]}

    return RequestSpec("GET", "/v1/layers", parse)


def build_post(
    path: str,
    message: Message,
    group: str,
    parse: Callable[[httpx.Response], _T],
    codec: Codec = safetensors,
    accept: str = safetensors.MEDIA_TYPE,
) -> RequestSpec[_T]:
    """Builds the request that posts a message; `parse` reads its response."""
    headers = {"Content-Type": codec.MEDIA_TYPE, "Accept": accept}
    return RequestSpec("POST", path, parse, list(codec.encode(message, group)), headers)


def choose_codec(message: Message) -> Codec:
    """Returns JSON if a tensor has no dtype, else safetensors.

    A number without a dtype gets one from the input that it is for, which the service knows.
    """
    groups = message.tensors, message.layer, message.check
    has_untyped = any(tensor.is_untyped for group in groups for tensor in group.values())
    return json if has_untyped else safetensors


def to_json_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields with the numbers and arrays of numpy as plain numbers and lists.

    Raises:
        InvalidContent: a value, at any depth, is not finite or has no place in JSON.
    """
    return {name: _to_json(value, name) for name, value in fields.items()}


def _to_json(value: Any, name: str) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidContent(f"{name} has a name that is no text: got {key!r:.60}")
        return to_json_fields(value)
    if isinstance(value, list | tuple):
        return [_to_json(x, name) for x in value]
    if isinstance(value, float) and not math.isfinite(value):  # orjson would write null
        raise InvalidContent(f"{name} is not finite: got {value}")
    try:
        orjson.dumps(value)
    except TypeError as error:
        raise InvalidContent(
            f"{name} cannot be sent: got {value!r:.60}, expected a value of JSON ({error})"
        ) from None
    return value


def _restore_tensors(message: Message, from_raw: FromRaw) -> dict[str, Any]:
    return {name: from_raw(raw) for name, raw in message.tensors.items()}


def _drop_unset(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
