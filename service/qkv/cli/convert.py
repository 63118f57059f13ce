"""The command `qkv convert`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from qkv.cli import tensor_files
from qkv.cli.errors import one_line_errors
from qkv.cli.options import (
    API_KEY,
    KV_HEADS,
    LOCAL,
    PREFIX,
    ROPE,
    SOURCE,
    TARGET,
    URL,
    drop_unset,
)
from qkv.cli.service import report, send
from qkv.cli.weights_file import read_weights
from qkv.client.request_builders import build_message


@click.command(short_help="Converts a layer's weights to another layout.")
@SOURCE
@TARGET
@click.option(
    "--from",
    "layout",
    metavar="NAME",
    help="The layout of SOURCE, such as v2 or llama.  [default: as names and shapes show]",
)
@click.option("--to", "target_layout", metavar="NAME", required=True, help="The layout to write.")
@PREFIX
@click.option(
    "--heads",
    type=int,
    help="The number of query heads, for layouts that keep the tensors of a head together.",
)
@KV_HEADS
@ROPE
@click.option(
    "--to-order",
    type=click.Choice(["half", "interleaved"]),
    help="The rotary order to write.  [default: that of the layout, else that of SOURCE]",
)
@click.option(
    "--grouped",
    type=click.Choice(["refuse", "repeat"]),
    help="If the layout has as many key heads as query heads: refuse fewer key heads, or repeat "
    "each for its query heads.  [default: refuse]",
)
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
    layout: str | None,
    target_layout: str,
    url: str,
    api_key: str | None,
    local: bool,
    **options: Any,
) -> None:
    """Converts a layer's weights in the file SOURCE to another layout.

    No bit is lost. Both layers run on the same input to check that. SOURCE may be a whole model:
    --prefix selects the layer, and `qkv layers` lists them. Only that layer is read and sent.

    Files are .safetensors, .npz or .json. SOURCE may also be the model.safetensors.index.json of a
    model in several files, or a folder.

    \b
    qkv convert in.safetensors --from v2 --to v1 -o out.safetensors
    qkv convert model.safetensors --prefix model.layers.0.self_attn --to v1 \\
        --heads 32 --grouped repeat -o out.safetensors
    """
    flags = drop_unset(**{"from": layout, "to": target_layout}, **options)
    with one_line_errors():
        tensor_files.check_target(target)
        message = read_weights(source, flags, local)
        if local:
            from qkv.local import convert_message

            response = convert_message(message)
        else:
            spec = build_message("/v1/convert", message, "tensors", "tensors")
            response = send(url, api_key, spec)
        # lists have no dtype: a reader takes them for float32
        exact = all(tensor.dtype == "float32" for tensor in response.tensors.values())
        encoding = "lists" if exact and message.encoding == "lists" else "base64"
        tensor_files.write(target, replace(response, encoding=encoding), "tensors")
    report(response, target, _describe(response.fields))


def _describe(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yields lines on the layouts, the names that were left out, and the check."""
    order = f", rotary order {fields['rotary_order']}" if fields["rotary_order"] else ""
    place = f" at {fields['prefix']}" if fields["prefix"] else ""
    yield f"from {fields['from']}{place} to {fields['to']}{order}"
    if ignored := fields["ignored"]:
        more = f" and {len(ignored) - 8} more" if len(ignored) > 8 else ""
        yield f"not part of the attention: {', '.join(ignored[:8])}{more}"
    # NaN and infinity are strings in JSON
    difference, largest = (
        float(fields["check"][f"largest_absolute_{name}"]) for name in ("difference", "output")
    )
    yield (
        f"on the same input both layers differ by {difference:.3g} at most; "
        f"the largest output is {largest:.3g}"
    )
