"""`qkv convert`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from qkv.cli import tensor_files
from qkv.cli.errors import one_line_errors
from qkv.cli.options import API_KEY, LOCAL, SOURCE, TARGET, URL, override
from qkv.cli.service import report, send
from qkv.client.request_builders import build_message

__all__ = ["convert"]


@click.command(short_help="Take a layer's weights from one layout to another.")
@SOURCE
@TARGET
@click.option(
    "--from", "layout", metavar="NAME", required=True, help="The layout SOURCE is in: v1 or v2."
)
@click.option("--to", "wanted", metavar="NAME", required=True, help="The layout to write.")
@click.option("--heads", type=int, help="Query heads, where a layout needs them.")
@click.option(
    "--bias",
    type=click.Choice(["refuse", "augment"]),
    help="What to do with a bias that the layout has no place for: refuse it, or take the exact "
    "form with a column of ones.  [default: refuse]",
)
@URL
@API_KEY
@LOCAL
def convert(
    source: Path,
    target: Path,
    layout: str,
    wanted: str,
    heads: int | None,
    bias: str | None,
    url: str,
    api_key: str | None,
    local: bool,
) -> None:
    """Take the layer's weights in the file SOURCE from one layout to another.

    Not a bit is lost, and both are run on the same input to check it. Files are .safetensors, .npz
    or .json.

    \b
    qkv convert in.safetensors --from v2 --to v1 -o out.safetensors
    """
    with one_line_errors():
        tensor_files.check_target(target)
        message = tensor_files.read(source, "tensors")
        message.fields.pop("check", None)  # that of the conversion which wrote this file
        override(message.fields, heads=heads, bias=bias, **{"from": layout, "to": wanted})
        if local:
            from qkv.engine.local import convert_message

            answer = convert_message(message)
        else:
            answer = send(url, api_key, build_message("/v1/convert", message, "tensors", "tensors"))
        # lists keep no dtype, and are float32 when they are read again
        exact = all(tensor.dtype == "float32" for tensor in answer.tensors.values())
        encoding = "lists" if exact and message.encoding == "lists" else "base64"
        tensor_files.write(target, replace(answer, encoding=encoding), "tensors")
    report(answer, target)
    check = answer.fields["check"]
    click.echo(
        f"both layers on the same input differ by {check['largest_absolute_difference']:.3g} "
        f"at most, where the largest output is {check['largest_absolute_output']:.3g}"
    )
