"""Options that several commands share, and functions that put them into a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from qkv.cli.own_variants import add_variants_if_set
from qkv.client.environment import DEFAULT_URL
from qkv.errors import InvalidContent, MalformedRequest, QkvError, format_value
from qkv.wire import json

_PYTHON_WORDS: Final = {"True": True, "False": False, "None": None}
_LAYER_FIELDS: Final = ("name", "layout", "prefix", "heads", "kv_heads", "rope", "alibi")

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
    help="One of the service's keys.  Other users see it in a list of processes, so better set the "
    "variable.",
)
LOCAL: Final = click.option(
    "--local",
    is_flag=True,
    callback=add_variants_if_set,
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


def _parse_sizes(
    context: click.Context, option: click.Parameter, text: str | None
) -> dict[str, int] | None:
    if text is None:
        return None
    sizes = {}
    for part in text.split(","):
        letter, equals, size = part.strip().partition("=")
        if not letter or not equals or not size.isascii() or not size.isdecimal():
            raise click.BadParameter(f"got {text!r}, expected letters and numbers as in L=64,S=128")
        sizes[letter] = int(size)
    return sizes


SIZES: Final = click.option(
    "--sizes",
    callback=_parse_sizes,
    metavar="LETTER=N,...",
    help="Sizes of axes, such as L=64,S=128,D=64.  [default: the family's]",
)
REPEATS: Final = click.option(
    "--repeats", type=int, metavar="N", help="Timed runs of each variant.  [default: the service's]"
)
HEADS: Final = click.option("--heads", type=int, help="The number of query heads of the layer.")
KV_HEADS: Final = click.option(
    "--kv-heads", type=int, help="The number of key heads.  [default: as the weights show]"
)
PREFIX: Final = click.option(
    "--prefix",
    metavar="NAME",
    help="The layer's names up to those of its layout, such as model.layers.0.self_attn.  "
    "[default: the only layer]",
)


def _parse_object(
    context: click.Context, option: click.Parameter, text: str | None
) -> dict[str, Any] | None:
    try:
        value = None if text is None else json.load(text)
    except QkvError:
        value = text
    if value is None or isinstance(value, dict):
        return value
    raise click.BadParameter(f"got {text!r}, expected a JSON object.")


ROPE: Final = click.option(
    "--rope",
    callback=_parse_object,
    metavar="JSON",
    help='The rotary embedding, such as \'{"base": 500000, "order": "half"}\'.',
)

_Command = TypeVar("_Command", bound=Callable[..., Any])


def layer_options(command: _Command) -> _Command:
    """Decorates a command with the options of a layer; `layer_flags` has their values."""
    layout = click.option(
        "--layout",
        metavar="NAME",
        help="The layout of the layer's weights, such as v2 or llama; auto finds it.",
    )
    alibi = click.option(
        "--alibi",
        type=click.Choice(["plain", "scaled"]),
        help="Add ALiBi's biases to the scores; scaled: before these are scaled, as Falcon does.",
    )
    name = click.option(
        "--layer",
        "name",
        metavar="NAME",
        help="A layer that the service has loaded, such as minilm.encoder.layer.3.",
    )
    options = (alibi, ROPE, KV_HEADS, HEADS, PREFIX, layout, name)
    for option in options:  # the last is the first in --help
        command = option(command)
    return command


def layer_flags(options: dict[str, Any]) -> dict[str, Any]:
    """Removes the values of `layer_options` from a command's options.

    Returns:
        Those that are set, as members of the field `layer`.
    """
    flags = {name: options.pop(name) for name in _LAYER_FIELDS}
    if flags["alibi"] == "plain":
        flags["alibi"] = True
    return drop_unset(**flags)


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


def parse_parameters(texts: Iterable[str]) -> dict[str, Any]:
    """Returns the values of the words NAME=VALUE by name.

    Raises:
        InvalidContent, click.ClickException: as for one word, or a name is given twice.
    """
    values: dict[str, Any] = {}
    for name, value in map(_parse_parameter, texts):
        if name in values:
            raise click.ClickException(
                f"-p {name} is given twice: got {format_value(values[name])} and "
                f"{format_value(value)}, expected one value"
            )
        values[name] = value
    return values


def _parse_parameter(text: str) -> tuple[str, Any]:
    """Returns the name and the value of NAME=VALUE. A value that is not JSON is a string.

    True, False and None are those of JSON, for users of Python.

    Raises:
        InvalidContent: a number is too large.
        click.ClickException: there is no name or no "=".
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.ClickException(f"-p is wrong: got {text!r}, expected NAME=VALUE")
    if value in _PYTHON_WORDS:
        return name, _PYTHON_WORDS[value]
    try:
        return name, json.load(value)
    except MalformedRequest:
        return name, value  # such as query_offset=end
