"""The content of a request or response in any wire format: named tensors and JSON fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from qkv.tensors import RawTensor


@dataclass(slots=True)
class Message:
    """A request or a response, independent of its wire format; not modified.

    Attributes:
        fields: all values that are not tensors, as JSON.
        tensors: the inputs, outputs or weights, by name.
        layer: the tensors of the layer in a request, by name.
        check: the tensors on which a request for a conversion checks candidates, by name.
        encoding: the encoding of tensors in JSON, "lists" or "base64". By default it is that of
            the first tensor of the request.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, RawTensor] = field(default_factory=dict)
    layer: dict[str, RawTensor] = field(default_factory=dict)
    encoding: str | None = None
    check: dict[str, RawTensor] = field(default_factory=dict)
