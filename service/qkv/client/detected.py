"""The detection of a layer: its request, and the candidates that the client returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from qkv.client.arrays import to_raw
from qkv.client.layer_tensors import select
from qkv.client.request_builders import RequestSpec, build_post, choose_codec, to_json_fields
from qkv.wire.layer_responses import DetectedLayer
from qkv.wire.message import Message


class Detected(DetectedLayer):
    """A way to run a layer, and how well it fits the output of the real module.

    Attributes:
        layout: of the tensors.
        heads, kv_heads: the numbers of query heads and key heads.
        rotary: the order of rotary channels, "half" or "interleaved"; None: there is no rotary
            embedding.
        scale: the factor of the scores.
        causal: True if no query attends to later keys.
        rope: the rotary embedding as the field of a layer: base, order, dims, scaling; or None.
        alibi: True if ALiBi's biases are added to the scores, "scaled" if before these are scaled.
        qk_norm: eps and offset of QK-norm; None: the layer has none.
        error: largest absolute difference to the module's output, divided by its largest size.
    """

    def as_json(self) -> dict[str, Any]:
        """Returns the members as JSON."""
        return self.model_dump()

    @property
    def layer(self) -> dict[str, Any]:
        """The argument `layer=` of `attend`, still without `tensors` and `prefix`."""
        layer: dict[str, Any] = {
            "layout": self.layout,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
        }
        if self.rope is not None:
            layer["rope"] = dict(self.rope)
        if self.alibi:
            layer["alibi"] = self.alibi
        if self.qk_norm is not None:
            layer["qk_norm"] = dict(self.qk_norm)
        return layer

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of `softmax`: scale and causal."""
        return {"scale": self.scale, "causal": self.causal}

    @property
    def positions(self) -> str:
        """Rotary embedding, ALiBi, or "none", in a few words."""
        if self.rope is None:
            return "alibi" if self.alibi else "none"
        dims = f", dims {self.rope['dims']}" if "dims" in self.rope else ""
        return f"{self.rotary}, base {self.rope['base']:g}{dims}"

    def __repr__(self) -> str:
        mask = "causal" if self.causal else "not causal"
        return (
            f"Detected({self.layout}, heads={self.heads}, kv_heads={self.kv_heads}, "
            f"positions: {self.positions}, scale={self.scale:.4g}, {mask}, error={self.error:.2g})"
        )


def build_detect(
    tensors: Mapping[str, Any], x: Any, y: Any, fields: Mapping[str, Any]
) -> RequestSpec[list[Detected]]:
    """Builds the request that detects a layer; the arguments are those of `Client.detect`."""
    message = Message(
        to_json_fields({name: value for name, value in fields.items() if value is not None}),
        select(tensors, fields.get("prefix")),
        check={"x": to_raw(x, "x"), "y": to_raw(y, "y")},
    )
    return build_detect_message(message)


def build_detect_message(message: Message) -> RequestSpec[list[Detected]]:
    """Builds the request that detects a layer from a message."""

    def parse(response: httpx.Response) -> list[Detected]:
        return [Detected.parse(candidate) for candidate in response.json()["detected"]]

    codec = choose_codec(message)
    return build_post("/v1/convert", message, "tensors", parse, codec, "application/json")
