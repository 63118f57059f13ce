"""Builds the HTTP requests that detect a layer, and parses their responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from qkv.client.arrays import to_raw
from qkv.client.detected import Detected
from qkv.client.json_fields import to_json_fields
from qkv.client.layer_tensors import select
from qkv.client.request_builders import RequestSpec, build_post, choose_codec
from qkv.wire.message import Message


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
