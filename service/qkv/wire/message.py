"""What any wire format carries: named tensors, and fields that are plain JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from qkv.tensors import RawTensor

__all__ = ["Message"]


@dataclass(frozen=True, slots=True)
class Message:
    """A request or an answer, whatever bytes it came in.

    Attributes:
        fields: all that is not a tensor.
        tensors: the inputs, outputs or weights, by name.
        layer: the tensors of a layer that stands inline in a request, by name.
        encoding: in JSON, how tensors are written, "lists" or "base64": as the message says, or
            else as its first tensor came.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, RawTensor] = field(default_factory=dict)
    layer: dict[str, RawTensor] = field(default_factory=dict)
    encoding: str | None = None
