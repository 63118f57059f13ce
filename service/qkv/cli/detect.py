"""The command `qkv detect`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from qkv.cli import tensor_files
from qkv.cli.errors import one_line_errors
from qkv.cli.options import API_KEY, LOCAL, SOURCE, URL, drop_unset
from qkv.cli.output import echo
from qkv.cli.service import line_width, send
from qkv.cli.weights_file import read_weights
from qkv.client.detected import Detected, build_detect_message
from qkv.client.tables import Table
from qkv.errors import InvalidContent
from qkv.tensors import RawTensor
from qkv.wire import json
from qkv.wire.message import Message


@click.command(short_help="Finds layout, heads and rotary order of a layer by running it.")
@SOURCE
@click.option(
    "--check",
    "check_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    required=True,
    help="A file with the tensors x, hidden states, and y, the real module's output for them.",
)
@click.option(
    "--from",
    "layout",
    metavar="NAME",
    default="auto",
    show_default=True,
    help="The layout of SOURCE, if it is known.",
)
@click.option("--prefix", metavar="NAME", help="The part of the tensors' names before the layer's.")
@click.option("--heads", type=int, help="The number of query heads, if it is known.")
@click.option("--kv-heads", type=int, help="The number of key heads, if it is known.")
@click.option(
    "--rope",
    metavar="JSON",
    help='What is known of the rotary embedding, such as {"base": 500000}.',
)
@click.option("--scale", type=float, help="One more factor of the scores to try.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@URL
@API_KEY
@LOCAL
def detect(
    source: Path,
    check_file: Path,
    layout: str,
    prefix: str | None,
    heads: int | None,
    kv_heads: int | None,
    rope: str | None,
    scale: float | None,
    as_json: bool,
    url: str,
    api_key: str | None,
    local: bool,
) -> None:
    """Finds out how to run the layer in the file SOURCE.

    Layouts, numbers of heads, rotary embeddings and scales are tried on the hidden states x of
    the check. A table lists those whose output comes next to y, best first. Files are as for
    `qkv convert`: of a whole model, only the layer at --prefix is read.

    \b
    qkv detect model.safetensors --prefix model.layers.0.self_attn \\
        --check xy.safetensors
    """
    known = drop_unset(prefix=prefix, heads=heads, kv_heads=kv_heads, scale=scale)
    with one_line_errors():
        fields = {"from": layout} | known
        if rope is not None:
            fields["rope"] = json.load(rope)
        weights = read_weights(source, fields, local)
        fields |= drop_unset(prefix=weights.fields.get("prefix"))
        message = Message(fields, weights.tensors, check=_read_check(check_file))
        if local:
            from qkv.local import detect as detect_locally

            candidates = [Detected.parse(candidate) for candidate in detect_locally(message)]
        else:
            candidates = send(url, api_key, build_detect_message(message))
    if as_json:
        echo(json.dump({"detected": [candidate.as_json() for candidate in candidates]}))
    else:
        echo(_table(candidates).text(line_width()))


def _read_check(path: Path) -> dict[str, RawTensor]:
    """Returns x and y of a file.

    Raises:
        InvalidContent: one of them is missing, or there are others.
    """
    tensors = tensor_files.read(path, "tensors").tensors
    if tensors.keys() != {"x", "y"}:
        names = ", ".join(map(repr, list(tensors)[:8])) or "nothing"
        raise InvalidContent(f"{path} is no check: got {names}, expected the tensors x and y")
    return tensors


def _table(candidates: Sequence[Detected]) -> Table:
    rows = [
        [
            candidate.layout,
            str(candidate.heads),
            str(candidate.kv_heads),
            candidate.positions,
            f"{candidate.scale:.4g}",
            "yes" if candidate.causal else "no",
            f"{candidate.error:.2g}",
        ]
        for candidate in candidates
    ]
    header = ["layout", "heads", "kv_heads", "positions", "scale", "causal", "error"]
    return Table(header, [("candidates, best first", rows)])
