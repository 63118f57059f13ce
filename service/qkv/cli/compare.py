"""`qkv compare`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from qkv.cli import tensor_files as files
from qkv.cli.errors import one_line_errors
from qkv.cli.options import (
    HEADS,
    KEY,
    LAYOUT,
    LOCAL,
    PARAMETERS,
    REPEATS,
    SOURCE,
    URL,
    given,
    named,
    object_in,
    override,
    override_inside,
    parameter,
)
from qkv.cli.service import room, send
from qkv.client.comparison import Comparison
from qkv.client.request_builders import choice, choices, compare_message
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
@KEY
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
        message = files.read(source, "inputs")
        fields = message.fields
        shared = object_in(fields, "parameters") | dict(map(parameter, parameters))
        fields.pop("parameters", None)
        override_inside(fields, "layer", given(layout=layout, heads=heads))
        override(
            fields,
            variants=choices([named(word) for word in variants], shared),
            anchor=choice(named(anchor), shared),
            repeats=repeats,
        )
        fields["rows"] = None if rows == "all" else _whole(rows)
        if local:
            from qkv.engine.local import compare as here

            comparison = Comparison.of(here(message))
        else:
            comparison = send(url, api_key, compare_message(message))
    click.echo(json.dump(asdict(comparison)) if as_json else comparison.table(room()))


def _whole(rows: str) -> int:
    try:
        return int(rows)
    except ValueError:
        raise click.ClickException(f"rows came as {rows!r}: a whole number, or all") from None
