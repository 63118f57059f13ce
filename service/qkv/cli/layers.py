"""The command `qkv layers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from qkv.cli import tensor_files
from qkv.cli.errors import one_line_errors
from qkv.cli.options import API_KEY, URL
from qkv.cli.output import echo
from qkv.cli.service import line_width, send
from qkv.client.request_builders import build_layers
from qkv.client.tables import Table
from qkv.errors import InvalidContent
from qkv.wire import json
from qkv.wire.checkpoint.checkpoint import Checkpoint, is_checkpoint

_LOADED_HEAD: Final = ("layer", "layout", "dtype", "width", "heads", "kv_heads", "parameters")
_HEAD: Final = ("layer", "layout", "hidden", "query", "key", "output", "biases", "norms")


@click.command(short_help="Lists the attention layers of a model's file, or of a service.")
@click.argument("source", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@URL
@API_KEY
def layers(source: Path | None, as_json: bool, url: str, api_key: str | None) -> None:
    """Lists the attention layers in the file SOURCE, with the layout and the sizes of each.

    Without SOURCE, it lists those that a service has loaded: requests may name them.

    Only the headers of files are read. Needs pip install '.[server]'. SOURCE is a .safetensors
    file, the model.safetensors.index.json of a model in several files, or a folder with one of
    them.

    The widths of query and key are those of all heads side by side. Output is the width of the
    output projection's result, if there is one. Norms are QK-norms.

    \b
    qkv layers model.safetensors
    qkv layers --url http://127.0.0.1:8000
    """
    with one_line_errors():
        if source is None:
            loaded = send(url, api_key, build_layers())
            if as_json:
                echo(json.dump(loaded["layers"]))
            else:
                echo(_loaded_table(url, loaded).text(line_width()))
            return
        shapes = _shapes(source)
        from qkv.local import layers as find_layers

        entries = find_layers(shapes)
        if not entries and not as_json:
            names = ", ".join(map(repr, list(shapes)[:4])) or "no tensor"
            more = f" and {len(shapes) - 4} more" if len(shapes) > 4 else ""
            raise InvalidContent(f"{source} has no attention layer: got {names}{more}")
    echo(json.dump(entries) if as_json else _table(source, entries).text(line_width()))


def _shapes(source: Path) -> dict[str, tuple[int, ...]]:
    if is_checkpoint(source):
        checkpoint = Checkpoint(source)
        return {name: checkpoint.shape(name) for name in checkpoint.names}
    message = tensor_files.read(source, "tensors")
    return {name: tensor.shape for name, tensor in message.tensors.items()}


def _table(source: Path, entries: Sequence[Mapping[str, Any]]) -> Table:
    count = "1 attention layer" if len(entries) == 1 else f"{len(entries)} attention layers"
    notes = [f"{layer['prefix']}: {layer['problem']}" for layer in entries if layer["problem"]]
    notes += [f"{layer['prefix']} has attention sinks." for layer in entries if layer["sinks"]]
    if any(len(layer["layouts"]) > 1 for layer in entries):
        notes.append("Several layouts fit the same names and shapes: name the right one.")
    return Table(_HEAD, [(f"{count} in {source.name}", list(map(_row, entries)))], notes)


def _loaded_table(url: str, loaded: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    layers = loaded["layers"]
    rows = [
        [
            layer["name"],
            layer["layout"],
            layer["dtype"],
            *(str(layer[name]) for name in ("width", "heads", "kv_heads")),
            " ".join(f"{n}={json.dump(v).decode()}" for n, v in layer["parameters"].items()) or "–",
        ]
        for layer in layers
    ]
    notes = [
        f"{checkpoint['name']} is not served: {checkpoint['problem']}"
        for checkpoint in loaded["checkpoints"]
        if checkpoint["problem"]
    ]
    notes += [
        f"Not served of {checkpoint['name']}: {layers['problem']}"
        for checkpoint in loaded["checkpoints"]
        for layers in checkpoint["unserved"]
    ]
    return Table(_LOADED_HEAD, [(f"{len(layers)} loaded layers of {url}", rows)], notes)


def _row(layer: Mapping[str, Any]) -> list[str]:
    widths = [layer[f"{name}_width"] for name in ("hidden", "query", "key", "output")]
    biases = layer["biases"]
    all_of_them = 3 + (layer["output_width"] is not None)
    return [
        layer["prefix"] or "(no prefix)",
        " or ".join(layer["layouts"]),
        *("–" if width is None else str(width) for width in widths),
        "all" if len(biases) == all_of_them else " ".join(biases) or "–",
        "yes" if layer["norms"] else "–",
    ]
