"""Arguments and result of `qkv.reference`: arrays to a message, and the message to a `Run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qkv.client.request_builders import build_inputs_message
from qkv.client.results import Run
from qkv.wire.message import Message


def build_reference(arguments: Mapping[str, Any]) -> tuple[Message, Callable[[Message], Run]]:
    """Returns the message with inputs and parameters, and the function that parses the result.

    Raises:
        InvalidContent: no argument is an array, or a parameter is not finite.
    """
    message, from_raw = build_inputs_message(None, arguments, {})

    def parse(reply: Message) -> Run:
        return Run(
            variant=reply.fields["variant"],
            outputs={name: from_raw(raw) for name, raw in reply.tensors.items()},
            timing=reply.fields["timing"],
            weights_are=reply.fields.get("weights_are"),
        )

    return message, parse
