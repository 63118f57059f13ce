"""The command `qkv convert`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from qkv.cli import tensor_files
from qkv.cli.errors import one_line_errors
from qkv.cli.options import (
    API_KEY,
    LOCAL,
    SOURCE,
    TARGET,
    URL,
    override,
    typed_flags,
    typed_tensors,
)
from qkv.cli.service import report, send
from qkv.client.request_builders import build_message

__all__ = ["convert"]


@click.command(short_help="Converts a layer's weights to another layout.")
@SOURCE
@TARGET
@click.option(
    "--from", "layout", metavar="NAME", required=True, help="The layout of SOURCE: v1 or v2."
)
@click.option("--to", "target_layout", metavar="NAME", required=True, help="The layout to write.")
@click.option("--heads", type=int, help="The number of query heads, for the check.")
@click.option(
    "--bias",
    type=click.Choice(["refuse", "augment"]),
    help="If the layout cannot hold a bias: refuse it, or augment the weight by it as one more "
    "row.  [default: refuse]",
)
@URL
@API_KEY
@LOCAL
def convert(
    source: Path,
    target: Path,
    layout: str,
    target_layout: str,
    heads: int | None,
    bias: str | None,
    url: str,
    api_key: str | None,
    local: bool,
) -> None:
    """Converts the layer's weights in the file SOURCE to another layout.

    No bit is lost. Both layers run on the same input to check that. Files are .safetensors, .npz
    or .json.

    \b
    qkv convert in.safetensors --from v2 --to v1 -o out.safetensors
    """
    typed = typed_tensors(source) | typed_flags(
        from_=layout, to=target_layout, heads=heads, bias=bias
    )
    with one_line_errors(typed):
        tensor_files.check_target(target)
        message = tensor_files.read(source, "tensors")
        message.fields.pop("check", None)  # of the conversion that wrote this file
        override(message.fields, heads=heads, bias=bias, **{"from": layout, "to": target_layout})
        if local:
            from qkv.engine.local import convert_message

            response = convert_message(message)
        else:
            spec = build_message("/v1/convert", message, "tensors", "tensors")
            response = send(url, api_key, spec)
        # lists have no dtype: a reader takes them for float32
        exact = all(tensor.dtype == "float32" for tensor in response.tensors.values())
        encoding = "lists" if exact and message.encoding == "lists" else "base64"
        tensor_files.write(target, replace(response, encoding=encoding), "tensors")
    report(response, target)
    check = response.fields["check"]
    click.echo(
        f"on the same input both layers differ by {check['largest_absolute_difference']:.3g} "
        f"at most; the largest output is {check['largest_absolute_output']:.3g}"
    )
