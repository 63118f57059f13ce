"""The command `qkv compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from qkv.cli import tensor_files
from qkv.cli.errors import one_line_errors
from qkv.cli.options import (
    API_KEY,
    LOCAL,
    PARAMETERS,
    REPEATS,
    SOURCE,
    URL,
    get_object,
    layer_flags,
    layer_options,
    override,
    override_object,
    parse_parameters,
    parse_variant,
)
from qkv.cli.output import echo
from qkv.cli.service import line_width, send
from qkv.client.comparison import Comparison
from qkv.client.request_builders import build_choice, build_choices, build_compare_message


@click.command(short_help="Compares variants on the tensors in a file.")
@click.argument("variants", nargs=-1, required=True, metavar="VARIANT...")
@SOURCE
@click.option(
    "--anchor",
    default="softmax",
    show_default=True,
    metavar="VARIANT",
    help="The baseline of the comparison.",
)
@PARAMETERS
@REPEATS
@click.option(
    "--rows",
    default="1024",
    show_default=True,
    metavar="N|all",
    help="How many rows of each head's weights are compared, evenly spread.",
)
@click.option("--per-head", is_flag=True, help="Also print the figures of each query head.")
@layer_options
@click.option("--json", "as_json", is_flag=True, help="Print the JSON of the service.")
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
    per_head: bool,
    as_json: bool,
    url: str,
    api_key: str | None,
    local: bool,
    **options: Any,
) -> None:
    """Runs each VARIANT on the tensors in the file SOURCE, and compares it with the baseline.

    A table has the distances of outputs and weights from the baseline's, and the costs. Notes
    explain figures that mean little. With --per-head a second table has a line for each query head
    of each variant. Files are as for `qkv attend`. Parameters are for all
    variants; a variant may be JSON with parameters of its own.

    \b
    qkv compare linear taylor in.safetensors -p causal=true
    qkv compare '{"variant": "taylor", "parameters": {"causal": true}}' in.npz
    """
    layer = layer_flags(options)
    with one_line_errors():
        message = tensor_files.read_request(source, layer.get("prefix"))
        fields = message.fields
        shared = get_object(fields, "parameters") | parse_parameters(parameters)
        fields.pop("parameters", None)
        override_object(fields, "layer", layer)
        override(
            fields,
            variants=build_choices([parse_variant(word) for word in variants], shared),
            anchor=build_choice(parse_variant(anchor), shared),
            repeats=repeats,
            per_head=per_head or None,
        )
        fields["rows"] = None if rows == "all" else _parse_rows(rows)
        if local:
            from qkv.local import compare as compare_locally

            comparison = Comparison.from_json(compare_locally(message))
        else:
            comparison = send(url, api_key, build_compare_message(message))
    if as_json:
        echo(comparison.to_json())
        return
    echo(comparison.table(line_width()))
    if comparison.anchor.heads is not None:
        echo(f"\n{comparison.heads_table(line_width())}")


def _parse_rows(rows: str) -> int:
    try:
        return int(rows)
    except ValueError:
        raise click.ClickException(
            f"--rows is wrong: got {rows!r}, expected a whole number, or all"
        ) from None
