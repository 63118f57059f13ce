"""Options that several commands share, and how they override the fields of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from qkv.errors import InvalidContent, QkvError, format_value
from qkv.wire import json

__all__ = [
    "API_KEY",
    "HEADS",
    "LAYOUT",
    "LOCAL",
    "PARAMETERS",
    "REPEATS",
    "SOURCE",
    "TARGET",
    "URL",
    "drop_unset",
    "get_object",
    "override",
    "override_object",
    "parse_parameter",
    "parse_variant",
]

SOURCE: Final = click.argument("source", type=click.Path(path_type=Path))
TARGET: Final = click.option(
    "-o",
    "--output",
    "target",
    type=click.Path(path_type=Path),
    metavar="FILE",
    required=True,
    help="Where the answer goes; its suffix says in which format.",
)
URL: Final = click.option(
    "--url",
    envvar="QKV_URL",
    default="http://127.0.0.1:8000",
    show_default=True,
    show_envvar=True,
    metavar="URL",
    help="The service to ask.",
)
API_KEY: Final = click.option(
    "--api-key",
    envvar="QKV_API_KEY",
    show_envvar=True,
    metavar="KEY",
    help="One of the service's keys.  Other users see it in a list of processes: better set it.",
)
LOCAL: Final = click.option(
    "--local", is_flag=True, help="Ask no service: run here, on the CPU.  Needs qkv[server]."
)
PARAMETERS: Final = click.option(
    "-p",
    "--parameter",
    "parameters",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter; its value is JSON, or a bare word.  Repeatable.",
)
REPEATS: Final = click.option(
    "--repeats", type=int, metavar="N", help="How often each is timed.  [default: the service's]"
)
LAYOUT: Final = click.option(
    "--layout", metavar="NAME", help="The layout of the file's layer: v1 or v2."
)
HEADS: Final = click.option("--heads", type=int, help="The heads of the file's layer.")


def drop_unset(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def override(fields: dict[str, Any], **flags: Any) -> None:
    """Sets fields from flags; flags override what a file says."""
    fields.update(drop_unset(**flags))


def override_object(fields: dict[str, Any], name: str, flags: dict[str, Any]) -> None:
    """The same in a field that is an object."""
    if flags:  # or what the file says is judged where it is used
        fields[name] = get_object(fields, name) | flags


def get_object(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """A field that must be an object; an empty one where it is absent.

    Raises:
        InvalidContent: it is something else.
    """
    there = fields.get(name, {})
    if not isinstance(there, dict):
        raise InvalidContent(
            f"{name} came as {format_value(there)}; it must be an object", pointer=f"/{name}"
        )
    return there


def parse_variant(word: str) -> str | dict[str, Any]:
    """A variant on the command line: its name, or JSON with parameters of its own.

    Raises:
        MalformedRequest: it begins as JSON does, and is none.
    """
    return dict(json.load(word)) if word.startswith("{") else word


def parse_parameter(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.ClickException(f"parameter {text!r} must be NAME=VALUE")
    try:
        return name, json.load(value)
    except QkvError:
        return name, value  # a bare word, such as query_offset=end
