"""`qkv compare`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from qkv.cli import tensor_files
from qkv.cli.errors import one_line_errors
from qkv.cli.options import (
    API_KEY,
    HEADS,
    LAYOUT,
    LOCAL,
    PARAMETERS,
    REPEATS,
    SOURCE,
    URL,
    drop_unset,
    get_object,
    override,
    override_object,
    parse_parameter,
    parse_variant,
)
from qkv.cli.service import line_width, send
from qkv.client.comparison import Comparison
from qkv.client.request_builders import build_choice, build_choices, build_compare_message
from qkv.wire import json

__all__ = ["compare"]


@click.command(short_help="Hold variants against one another on a file's tensors.")
@click.argument("variants", nargs=-1, required=True, metavar="VARIANT...")
@SOURCE
@click.option(
    "--anchor",
    default="softmax",
    show_default=True,
    metavar="VARIANT",
    help="What the others are held against.",
)
@PARAMETERS
@REPEATS
@click.option(
    "--rows",
    default="1024",
    show_default=True,
    metavar="N|all",
    help="Rows of each head whose weights are compared, at most, evenly spread.",
)
@LAYOUT
@HEADS
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as the service answers it.")
@URL
@API_KEY
@LOCAL
def compare(
    variants: tuple[str, ...],
    source: Path,
    anchor: str,
    parameters: tuple[str, ...],
    repeats: int | None,
    rows: str,
    layout: str | None,
    heads: int | None,
    as_json: bool,
    url: str,
    api_key: str | None,
    local: bool,
) -> None:
    """Run each VARIANT on the tensors in the file SOURCE, and hold it against the anchor.

    A table says how far outputs and weights lie from the anchor's, what each costs, and where the
    figures say nothing. Files are as for `qkv attend`; parameters go to every variant, and one may
    be JSON with parameters of its own.

    \b
    qkv compare linear taylor in.safetensors -p causal=true
    qkv compare '{"variant": "taylor", "parameters": {"causal": true}}' in.npz
    """
    with one_line_errors():
        message = tensor_files.read(source, "inputs")
        fields = message.fields
        shared = get_object(fields, "parameters") | dict(map(parse_parameter, parameters))
        fields.pop("parameters", None)
        override_object(fields, "layer", drop_unset(layout=layout, heads=heads))
        override(
            fields,
            variants=build_choices([parse_variant(word) for word in variants], shared),
            anchor=build_choice(parse_variant(anchor), shared),
            repeats=repeats,
        )
        fields["rows"] = None if rows == "all" else _parse_rows(rows)
        if local:
            from qkv.engine.local import compare as compare_locally

            comparison = Comparison.from_json(compare_locally(message))
        else:
            comparison = send(url, api_key, build_compare_message(message))
    click.echo(json.dump(asdict(comparison)) if as_json else comparison.table(line_width()))


def _parse_rows(rows: str) -> int:
    try:
        return int(rows)
    except ValueError:
        raise click.ClickException(f"rows came as {rows!r}: a whole number, or all") from None
