"""Reads the weights of one layer from a file of tensors, or from the checkpoint of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from qkv.cli import tensor_files
from qkv.client.layer_tensors import MAX_TENSORS, below, check_count, is_needed
from qkv.errors import InvalidContent
from qkv.tensors import nbytes
from qkv.wire.checkpoint.checkpoint import Checkpoint, is_checkpoint
from qkv.wire.message import Message

_SMALL: Final = 1 << 24  # bytes; a smaller file is sent whole, and the service finds the layer


def read_weights(source: Path, flags: dict[str, Any], local: bool) -> Message:
    """Returns a request: the fields of the file and the flags, and the layer's tensors.

    Args:
        source: a file of tensors, or a checkpoint.
        flags: fields that override those of the file. Without a prefix, `prefix` becomes that of
            the only layer of a checkpoint, unless the checkpoint is small.
        local: True if the request runs in this process.

    Raises:
        QkvError: the file is wrong, or the layer is not clear.
        OSError: the file cannot be read.
    """
    if not is_checkpoint(source):
        message = tensor_files.read(source, "tensors", flags.get("prefix"))
        fields = _request_fields(message.fields) | flags
        fields.setdefault("from", "auto")
        tensors = tensor_files.needed(message.tensors, fields.get("prefix"))
        check_count(list(tensors), fields.get("prefix"))
        return replace(message, fields=fields, tensors=tensors)
    checkpoint = Checkpoint(source)
    fields = _request_fields(checkpoint.fields) | flags
    fields.pop("encoding", None)  # of tensors in JSON
    fields.setdefault("from", "auto")
    if fields.get("prefix") is None and (local or not _is_small(checkpoint)):
        fields["prefix"] = _find_prefix(checkpoint, fields["from"])
    names = below(checkpoint.names, fields.get("prefix"))
    needed = [name for name in names if is_needed(name, checkpoint.dtype(name))]
    check_count(needed, fields.get("prefix"))
    return Message(fields, {name: checkpoint.read(name) for name in needed})


def _request_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields for the request from those of a file, which may be those of a response.

    The layout and the rotary order that a conversion wrote are those of this one's source.
    """
    if "ignored" not in fields:
        return dict(fields)
    order = fields.get("rotary_order")
    return {"from": fields.get("to", "auto"), **({"rope": {"order": order}} if order else {})}


def _is_small(checkpoint: Checkpoint) -> bool:
    """Returns True if a request may have all tensors, so that this process needs no torch."""
    if len(checkpoint.names) > MAX_TENSORS:
        return False
    sizes = (nbytes("float64", checkpoint.shape(name)) for name in checkpoint.names)
    return sum(sizes) <= _SMALL


def _find_prefix(checkpoint: Checkpoint, layout: object) -> str:
    """Returns the prefix of the only layer, from the shapes of all tensors.

    Raises:
        InvalidContent: there are several layers, or none, or torch is missing.
    """
    try:
        from qkv.local import find_prefix
    except ModuleNotFoundError:
        raise InvalidContent(
            "prefix is missing: torch is needed to find the layers of a large file. Set --prefix, "
            "or run `pip install '.[server]'` in a clone of qkv"
        ) from None
    return find_prefix(layout, {name: checkpoint.shape(name) for name in checkpoint.names})
