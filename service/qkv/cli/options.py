"""Options that several commands share, and functions that put them into a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import click

from qkv.client.environment import DEFAULT_URL
from qkv.errors import InvalidContent, QkvError, format_value, pointer_to
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
    "typed_flags",
    "typed_parameters",
    "typed_tensors",
    "typed_variants",
]

SOURCE: Final = click.argument("source", type=click.Path(path_type=Path))
TARGET: Final = click.option(
    "-o",
    "--output",
    "target",
    type=click.Path(path_type=Path),
    metavar="FILE",
    required=True,
    help="The file to write; its suffix chooses the format.",
)
URL: Final = click.option(
    "--url",
    envvar="QKV_URL",
    default=DEFAULT_URL,
    show_default=True,
    show_envvar=True,
    metavar="URL",
    help="The address of the service.",
)
API_KEY: Final = click.option(
    "--api-key",
    envvar="QKV_API_KEY",
    show_envvar=True,
    metavar="KEY",
    help="One of the service's keys.  Other users see it in a list of processes: better set the "
    "variable.",
)
LOCAL: Final = click.option(
    "--local",
    is_flag=True,
    help="Run here, on the CPU, without a service.  Needs pip install '.[server]'.",
)
PARAMETERS: Final = click.option(
    "-p",
    "--parameter",
    "parameters",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter; the value is JSON or a word.  Repeatable.",
)
REPEATS: Final = click.option(
    "--repeats", type=int, metavar="N", help="Timed runs of each.  [default: the service's]"
)
LAYOUT: Final = click.option(
    "--layout", metavar="NAME", help="The layout of the layer's weights: v1 or v2."
)
HEADS: Final = click.option("--heads", type=int, help="The number of query heads of the layer.")


def drop_unset(**values: Any) -> dict[str, Any]:
    """Returns the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def override(fields: dict[str, Any], **flags: Any) -> None:
    """Sets fields from flags. Flags override the fields of a file."""
    fields.update(drop_unset(**flags))


def override_object(fields: dict[str, Any], name: str, flags: dict[str, Any]) -> None:
    """Sets members of a field that is an object. Without flags it does not check the field.

    Raises:
        InvalidContent: the field is not an object.
    """
    if flags:
        fields[name] = get_object(fields, name) | flags


def get_object(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a field that must be an object; an empty object if it is absent.

    Raises:
        InvalidContent: the field is not an object.
    """
    value = fields.get(name, {})
    if not isinstance(value, dict):
        raise InvalidContent(
            f"{name} is not an object: got {format_value(value)}", pointer=f"/{name}"
        )
    return value


def parse_variant(word: str) -> str | dict[str, Any]:
    """Returns a variant of the command line: its name, or an object with parameters of its own.

    Raises:
        MalformedRequest: the word begins with "{" but is not JSON.
    """
    return dict(json.load(word)) if word.startswith("{") else word


def parse_parameter(text: str) -> tuple[str, Any]:
    """Returns the name and the value of NAME=VALUE. A value that is not JSON is a string.

    Raises:
        click.ClickException: there is no name or no "=".
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.ClickException(f"-p is wrong: got {text!r}, expected NAME=VALUE")
    try:
        return name, json.load(value)
    except QkvError:
        return name, value  # such as query_offset=end


# ---- the words of the command line by JSON pointer, for errors


def typed_flags(**flags: Any) -> dict[str, str]:
    """Returns the words of the flags that are set, for fields of the same names.

    `layer_heads` and `layer_layout` are the members of the field `layer`; a `_` at the end of a
    name is dropped.
    """
    return {
        f"/{name.rstrip('_').replace('layer_', 'layer/')}": f"--{name.rpartition('layer_')[2]}"
        for name, value in drop_unset(**flags).items()
    }


def typed_parameters(words: Iterable[str], within: str = "") -> dict[str, str]:
    """Returns the words of -p for the parameters of the request, or of a variant in it."""
    return {
        f"{within}/parameters{pointer_to(word.partition('=')[0])}": f"-p {word:.60}"
        for word in words
    }


def typed_variants(variants: Sequence[str], parameters: Iterable[str]) -> dict[str, str]:
    """Returns the words of the variants, and those of -p for each."""
    typed: dict[str, str] = {}
    for i, word in enumerate(variants):
        typed |= typed_parameters(parameters, f"/variants/{i}")
        typed[f"/variants/{i}"] = f"{word:.60}"
    return typed


def typed_tensors(source: Path) -> dict[str, str]:
    """Returns the names of tensors in a file. A JSON file has the pointers themselves."""
    if source.suffix == ".json":
        return {}
    named = {"/inputs": "{}", "/tensors": "{}", "/layer/tensors": "layer.{}"}
    return {pointer: f"{name} in {source.name}" for pointer, name in named.items()}
