"""Tensors in files: .safetensors, .npz and .json, as messages."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Final
from zipfile import BadZipFile

import numpy as np

from qkv.errors import InvalidContent
from qkv.message import Message
from qkv.tensors import RawTensor
from qkv.wire import json, safetensors

__all__ = ["SUFFIXES", "read", "write"]

SUFFIXES: Final = (".safetensors", ".npz", ".json")

_LAYER: Final = "layer."


def read(path: Path, group: str) -> Message:
    """Reads a file. Tensors of a layer are named `layer.<name>`, in JSON under /layer/tensors;
    .json and .safetensors may hold parameters too, as a request does.

    Raises:
        QkvError: it is not what its suffix says.
        OSError: it cannot be read.
    """
    match path.suffix:
        case ".safetensors":
            return safetensors.decode(path.read_bytes(), group)
        case ".json":
            return json.decode(path.read_bytes(), group)
        case ".npz":
            return _read_npz(path)
    raise _unknown(path)


def write(path: Path, message: Message, group: str) -> None:
    """Writes a file. An .npz keeps the tensors alone, bfloat16 as float32.

    Raises:
        InvalidContent: its suffix is unknown.
        OSError: it cannot be written.
    """
    match path.suffix:
        case ".safetensors":
            chunks = safetensors.encode(message, group)
        case ".json":
            chunks = json.encode(message, group)
        case ".npz":
            chunks = [_npz({name: tensor.numpy() for name, tensor in message.tensors.items()})]
        case _:
            raise _unknown(path)
    with path.open("wb") as file:
        file.writelines(chunks)


def check_suffix(path: Path) -> None:
    """Raises InvalidContent where `write` would."""
    if path.suffix not in SUFFIXES:
        raise _unknown(path)


def _read_npz(path: Path) -> Message:
    try:
        with np.load(path, allow_pickle=False) as archive:
            tensors = {name: RawTensor.from_numpy(archive[name]) for name in archive.files}
    except (ValueError, EOFError, TypeError, AttributeError, BadZipFile, zlib.error) as error:
        raise InvalidContent(f"{path} is no .npz file of plain arrays: {error}") from None
    layer = {n.removeprefix(_LAYER): t for n, t in tensors.items() if n.startswith(_LAYER)}
    return Message({}, {n: t for n, t in tensors.items() if not n.startswith(_LAYER)}, layer)


def _npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    room = BytesIO()
    plain = {
        n: a.astype(np.float32) if a.dtype.name == "bfloat16" else a for n, a in arrays.items()
    }
    np.savez(room, allow_pickle=False, **plain)
    return room.getvalue()


def _unknown(path: Path) -> InvalidContent:
    return InvalidContent(f"{path} has none of the suffixes {', '.join(SUFFIXES)}")
