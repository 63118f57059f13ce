"""Reads and writes files of tensors (.safetensors, .npz and .json) as messages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np

from qkv.errors import InvalidContent, QkvError
from qkv.tensors import RawTensor
from qkv.wire import Chunk, json, safetensors
from qkv.wire.message import Message

__all__ = ["SUFFIXES", "check_target", "read", "replace_file", "write"]

SUFFIXES: Final = (".safetensors", ".npz", ".json")

_LAYER_PREFIX: Final = "layer."


def read(path: Path, group: str) -> Message:
    """Reads a file.

    Tensors of a layer are named `layer.<name>`; in JSON they are in `layer.tensors`. A .json or
    .safetensors file may have the fields of a request too.

    Raises:
        QkvError: the content does not match the suffix.
        OSError: the file cannot be read.
    """
    if path.suffix not in SUFFIXES:
        raise _unknown_suffix(path)
    content = path.read_bytes()
    try:
        match path.suffix:
            case ".safetensors":
                # a writable buffer: torch warns about a read-only one
                return safetensors.decode(memoryview(bytearray(content)), group)
            case ".json":
                return json.decode(content, group)
        return _decode_npz(content)
    except QkvError as error:
        error.detail = f"{path}: {error.detail}"
        raise


def write(path: Path, message: Message, group: str) -> None:
    """Writes a file, whole or not at all.

    An .npz file has the tensors only, and bfloat16 as float32, which holds the numbers exactly.

    Raises:
        InvalidContent: the suffix is unknown.
        OSError: the file cannot be written.
    """
    match path.suffix:
        case ".safetensors":
            chunks = safetensors.encode(message, group)
        case ".json":
            chunks = json.encode(message, group)
        case ".npz":
            chunks = [
                _encode_npz({name: tensor.numpy() for name, tensor in message.tensors.items()})
            ]
        case _:
            raise _unknown_suffix(path)
    replace_file(path, chunks)


def replace_file(path: Path, chunks: Iterable[Chunk]) -> None:
    """Writes all bytes or none, in place of an existing file.

    Raises:
        OSError: the file cannot be written.
    """
    path = path.resolve()  # writes to the target of a link
    # in the same directory: a rename is atomic only within one file system
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.writelines(chunks)
        part.replace(path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def check_target(path: Path, suffixes: Sequence[str] = SUFFIXES) -> None:
    """Raises before a run the errors that `write` would raise after it."""
    if path.suffix not in suffixes:
        raise _unknown_suffix(path, suffixes)
    if path.is_dir():
        raise InvalidContent(f"{path} is a directory")
    if not path.parent.is_dir():
        raise InvalidContent(f"{path} is in a directory that does not exist: {path.parent}")


def _decode_npz(content: bytes) -> Message:
    try:
        with np.load(BytesIO(content), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # numpy, zipfile and zlib have a dozen for damaged files
        raise InvalidContent(f"not an .npz file of plain arrays: {error}") from None
    tensors = {}
    for name, array in arrays.items():
        try:
            tensors[name] = RawTensor.from_numpy(array)
        except QkvError as error:
            error.detail = f"{name}: {error.detail}"
            raise
    layer = {n: t for n, t in tensors.items() if n.startswith(_LAYER_PREFIX)}
    inputs = {n: t for n, t in tensors.items() if n not in layer}
    return Message({}, inputs, {n.removeprefix(_LAYER_PREFIX): t for n, t in layer.items()})


def _encode_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    buffer = BytesIO()
    arrays = {
        n: a.astype(np.float32) if a.dtype.name == "bfloat16" else a for n, a in arrays.items()
    }
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def _unknown_suffix(path: Path, suffixes: Sequence[str] = SUFFIXES) -> InvalidContent:
    hint = ""
    if path.suffix == ".npy" and ".npz" in suffixes:
        hint = "; an .npy file has one array without a name: use numpy.savez to write an .npz file"
    return InvalidContent(f"{path} has none of the suffixes {', '.join(suffixes)}{hint}")
