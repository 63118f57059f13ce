"""Small checkpoints with a qkv.toml whose layers have a mark, as `qkv describe` writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from qkv.attention.layers import layout_catalogue
from qkv.jobs.loaded.layer_mark import digest_of
from qkv.wire.checkpoint.checkpoint import Checkpoint
from support.small_checkpoints import BERT, bert_tensors, write

BLOCKS: Final = ["encoder.layer.0", "encoder.layer.1"]
FIELDS: Final[dict[str, Any]] = {
    "layout": "bert", "heads": 4, "kv_heads": 4, "causal": False, "positions": "none",
}  # fmt: skip
PROOF: Final = {"error": 2.5e-07, "length": 6, "versions": {"qkv": "0.1.0", "torch": "2.13.0"}}


def to_toml(fields: Mapping[str, Any]) -> str:
    """Returns fields as TOML."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in fields.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{n} = {_value(v)}" for n, v in value.items()) + "}"
    return json.dumps(value)


def kind_of(folder: Path, fields: dict[str, Any] = FIELDS) -> str:
    """Returns the table of a kind with its mark, for the checkpoint in a folder."""
    checkpoint = Checkpoint(folder)
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names}
    (first, *_) = layout_catalogue.find_layers(shapes)
    checkpoint.close()
    mark = {**PROOF, "digest": digest_of(fields, PROOF, first.shapes)}
    return "[kinds.1]\n" + to_toml({"blocks": BLOCKS, **fields, "mark": mark})


def described_bert(folder: Path, *more: str, config: dict[str, Any] | None = None) -> Path:
    """Writes a described BERT; returns its folder.

    Args:
        folder: to write into.
        *more: lines of qkv.toml in front of the table of the kind.
        config: in place of that of BERT.
    """
    write(folder, bert_tensors(), BERT if config is None else config)
    text = "\n".join((*more, kind_of(folder)))
    (folder / "qkv.toml").write_text(text)
    return folder
