"""Calls to a qkv service as bytes, and what makes a result of the answer's bytes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote

import httpx
import numpy as np
import orjson

from qkv.client.arrays import Restore, is_array, restorer, to_raw
from qkv.client.comparison import Comparison
from qkv.client.event_parser import MEDIA_TYPE as EVENTS
from qkv.client.results import Converted, Gradients, Run
from qkv.errors import InvalidContent
from qkv.wire import Codec, json, safetensors
from qkv.wire.message import Message

__all__ = [
    "Call",
    "Choice",
    "Stream",
    "build_attend",
    "build_compare",
    "build_convert",
    "build_gradients",
    "build_message",
    "build_sweep",
    "build_variants",
    "choice",
    "choices",
    "compare_message",
    "gradients_path",
    "run_path",
]

_T = TypeVar("_T")

Choice: TypeAlias = str | Mapping[str, Any]
"""A variant by its name, or with parameters: {"variant": "taylor", "parameters": {...}}."""


class Call(NamedTuple, Generic[_T]):
    """A call as bytes, and what makes a result of the answer's bytes."""

    method: str
    path: str
    parse: Callable[[httpx.Response], _T]
    content: bytes = b""
    headers: Mapping[str, str] = {}


class Stream(NamedTuple):
    """A call as bytes, which is answered by events."""

    path: str
    content: bytes
    headers: Mapping[str, str]


def build_attend(
    variant: str,
    layer: Mapping[str, Any] | str | None,
    outputs: list[str] | None,
    weights: str | Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
) -> Call[Run]:
    """The call that runs a variant; the arguments are those of `Client.attend`."""
    message, restore = _asked(layer, arguments, _given(outputs=outputs, weights=weights))

    def parse(response: httpx.Response) -> Run:
        answer = safetensors.decode(response.content, "outputs")
        outputs = _restored(answer, restore)
        fields = answer.fields
        marks = fields["timing"], fields.get("weights_are")
        return Run(fields["variant"], outputs, *marks, weights or "full")

    return _post(run_path(variant), message, "inputs", parse)


def build_gradients(
    variant: str,
    grad_output: Any,
    layer: Mapping[str, Any] | str | None,
    arguments: Mapping[str, Any],
) -> Call[Gradients]:
    """The call that asks for gradients; the arguments are those of `Client.gradients`."""
    message, restore = _asked(layer, {**arguments, "grad_output": grad_output}, {})

    def parse(response: httpx.Response) -> Gradients:
        answer = safetensors.decode(response.content, "gradients")
        gradients = _restored(answer, restore)
        return Gradients(answer.fields["variant"], gradients, answer.fields["timing"])

    return _post(gradients_path(variant), message, "inputs", parse)


def _asked(
    layer: Mapping[str, Any] | str | None,
    arguments: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> tuple[Message, Restore]:
    """Inputs, parameters and layer as a message, and what makes arrays of the answer's tensors."""
    arrays = {name: value for name, value in arguments.items() if is_array(value)}
    if not arrays:
        raise InvalidContent(
            "none of the arguments is an array; wrap lists with numpy.asarray or torch.tensor"
        )
    parameters = _plain({n: v for n, v in arguments.items() if n not in arrays})
    fields = {**fields, "parameters": parameters}
    layer_tensors: dict[str, Any] = {}
    if isinstance(layer, Mapping):
        fields["layer"] = {k: v for k, v in layer.items() if k != "tensors"}
        layer_tensors = {n: to_raw(array) for n, array in layer.get("tensors", {}).items()}
    elif layer is not None:
        fields["layer"] = layer
    message = Message(fields, {n: to_raw(array) for n, array in arrays.items()}, layer_tensors)
    return message, restorer(next(iter(arrays.values())))


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are given, as JSON has them."""
    for name, value in parameters.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidContent(f"{name} is {value}; parameters are finite")
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in parameters.items()
        if value is not None
    }


def build_compare(
    variants: Sequence[Choice],
    anchor: Choice,
    repeats: int | None,
    rows: int | None,
    layer: Mapping[str, Any] | str | None,
    arguments: Mapping[str, Any],
) -> Call[Comparison]:
    """The call that compares variants; the arguments are those of `Client.compare`."""
    message, _ = _asked(layer, arguments, {"rows": rows, **_given(repeats=repeats)})
    parameters = message.fields.pop("parameters")
    message.fields["variants"] = choices(variants, parameters)
    message.fields["anchor"] = choice(anchor, parameters)
    return compare_message(message)


def compare_message(message: Message) -> Call[Comparison]:
    """The call that compares variants as a message says."""
    return _post(
        "/v1/compare",
        message,
        "inputs",
        lambda response: Comparison.of(response.json()),
        _codec_of(message),
        "application/json",
    )


def build_sweep(
    variants: Sequence[Choice],
    lengths: Iterable[int],
    fields: Mapping[str, Any],
    parameters: Mapping[str, Any],
) -> Stream:
    """The call that sweeps over lengths; the arguments are those of `Client.sweep`."""
    for name, value in parameters.items():
        if is_array(value):
            raise InvalidContent(f"{name} is an array; a sweep draws its own inputs")
    asked = {
        "variants": choices(variants, _plain(parameters)),
        "lengths": list(map(operator.index, lengths)),
        **_given(**fields),
    }
    headers = {"Content-Type": "application/json", "Accept": EVENTS}
    return Stream("/v1/sweep", orjson.dumps(asked, option=orjson.OPT_SERIALIZE_NUMPY), headers)


def choices(variants: Sequence[Choice], parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each as `choice` has it."""
    if isinstance(variants, str | Mapping):
        raise InvalidContent("variants are a list, also where there is but one")
    return [choice(variant, parameters) for variant in variants]


def choice(variant: Choice, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A variant as an object, with the parameters that all have; its own go before them."""
    if isinstance(variant, str):
        return {"variant": variant, "parameters": dict(parameters)}
    own = _plain(variant.get("parameters", {}))
    return {**variant, "parameters": {**parameters, **own}}


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
    """The call that posts a message and answers one, raw tensors both."""
    codec = _codec_of(message)
    return _post(path, message, group, lambda r: safetensors.decode(r.content, answered), codec)


def run_path(variant: str) -> str:
    """Where a variant runs; a name with a "?" or "/" in it asks for no other than itself."""
    return f"/v1/attention/{quote(variant, safe='', errors='replace')}"


def gradients_path(variant: str) -> str:
    """Where a variant's gradients are."""
    return f"/v1/gradients/{quote(variant, safe='', errors='replace')}"


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
    accept: str = safetensors.MEDIA_TYPE,
) -> Call[_T]:
    headers = {"Content-Type": codec.MEDIA_TYPE, "Accept": accept}
    return Call("POST", path, parse, b"".join(codec.encode(message, group)), headers)


def _codec_of(message: Message) -> Codec:
    """Numbers that were written without a dtype go as they are, in JSON: what they become depends
    on what they are for, which the service knows."""
    literal = any(t.literal for t in (*message.tensors.values(), *message.layer.values()))
    return json if literal else safetensors


def _restored(message: Message, restore: Restore) -> dict[str, Any]:
    return {name: restore(raw) for name, raw in message.tensors.items()}


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
