"""Reads and writes files of tensors (.safetensors, .npz and .json) as messages.

The path `-` is standard input, whose first bytes show its format, or standard output, as JSON.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, Final
from zipfile import ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy_format

from qkv.client.layer_tensors import below, is_needed
from qkv.errors import InvalidContent, QkvError
from qkv.tensors import DTYPES, RawTensor, unsupported_dtype
from qkv.wire import Chunk, json, safetensors
from qkv.wire.checkpoint.checkpoint import Checkpoint
from qkv.wire.checkpoint.torch_files import refuse_torch_file
from qkv.wire.message import Message
from qkv.wire.safetensors import LAYER

STATE: Final = "state."
"""The beginning of the names of a state's tensors."""
STANDARD: Final = Path("-")
"""Standard input or output in place of a file."""
SUFFIXES: Final = (".safetensors", ".npz", ".json")
_ZIP_HEADS: Final = (b"PK\x03\x04", b"PK\x05\x06")
"""The first bytes of an archive, and of one without members (APPNOTE.TXT 6.3.10, 4.3)."""
_MAX_UNPACKED: Final = 1 << 30
"""The most bytes of compressed arrays in one .npz file: zeros take a thousandth of their size."""


def read(path: Path, group: str, prefix: str | None = None) -> Message:
    """Reads a file: inputs and optionally a layer, or only weights.

    Beside inputs, tensors of a layer are named `layer.<name>`; in JSON they are in `layer.tensors`.
    A .json or .safetensors file may have the fields of a request too.

    Args:
        path: of the file.
        group: "inputs" or "tensors".
        prefix: of the layer's names; None: that in the file, if it has one.

    Raises:
        QkvError: the content does not match the suffix, or no tensor has the prefix.
        OSError: the file cannot be read.
    """
    refuse_torch_file(path)
    if path.suffix not in SUFFIXES and path != STANDARD:
        raise _unknown_suffix(path)
    try:
        match path.suffix:
            case ".safetensors":
                message = _read_checkpoint(path, group, prefix)
            case ".json":
                message = json.decode(path.read_bytes(), group)
            case ".npz":
                message = _decode_npz(path.read_bytes(), group, prefix)
            case _:
                message = _decode(sys.stdin.buffer.read(), group, prefix)
    except QkvError as error:
        if str(path) not in error.detail:
            error.detail = f"{path}: {error.detail}"
        raise
    if group == "inputs":
        message.layer = needed(message.layer, _prefix_of(message.fields, prefix), "/layer")
    return message


def _decode(content: bytes, group: str, prefix: str | None) -> Message:
    """Decodes the content of a file without a name."""
    if content.startswith(_ZIP_HEADS):
        return _decode_npz(content, group, prefix)
    if content[:64].lstrip()[:1] == b"{":
        return json.decode(content, group)
    return safetensors.decode(content, group)


def read_request(path: Path, prefix: str | None = None, *, has_gradient: bool = False) -> Message:
    """Reads inputs and optionally a layer. The inputs may be a case that `qkv oracle` wrote.

    Args:
        path, prefix: as for `read`.
        has_gradient: True if the request takes the gradient of the output, which a case has.

    Raises:
        QkvError, OSError: as `read`.
    """
    message = read(path, "inputs", prefix)
    if message.fields.pop("case", None) is not None and not has_gradient:
        message.tensors.pop("grad_output", None)
    return message


def needed(
    tensors: Mapping[str, RawTensor], prefix: object, pointer: str = ""
) -> dict[str, RawTensor]:
    """Returns the floating tensors below a prefix, and those that have no dtype.

    Raises:
        InvalidContent: no tensor has the prefix, or a weight is not floating.
    """
    return {
        name: tensors[name]
        for name in below(tensors, prefix, pointer)
        if tensors[name].is_untyped or is_needed(name, tensors[name].dtype, pointer)
    }


def _prefix_of(fields: Mapping[str, Any], prefix: str | None) -> object:
    """Returns the prefix of a flag, else that in the fields of a request."""
    layer = fields.get("layer")
    return layer.get("prefix") if prefix is None and isinstance(layer, dict) else prefix


def _read_checkpoint(path: Path, group: str, prefix: str | None) -> Message:
    """Reads inputs, and of the layer only the tensors that a run needs."""
    checkpoint = Checkpoint(path)
    fields = checkpoint.fields
    encoding = json.pop_encoding(fields)
    layer = [n for n in checkpoint.names if group == "inputs" and n.startswith(LAYER)]
    tensors = {n: checkpoint.read(n) for n in checkpoint.names if n not in layer}
    if layer:
        fields.setdefault("layer", {})
    names = below((n.removeprefix(LAYER) for n in layer), _prefix_of(fields, prefix), "/layer")
    weights = {
        n: checkpoint.read(LAYER + n)
        for n in names
        if is_needed(n, checkpoint.dtype(LAYER + n), "/layer")
    }
    return Message(fields, tensors, weights, encoding)


def write(path: Path, message: Message, group: str) -> None:
    """Writes a file, whole or not at all; JSON on standard output.

    An .npz file has the tensors only, and bfloat16 as float32, which holds the numbers exactly.

    Raises:
        InvalidContent: the suffix is unknown.
        OSError: the file cannot be written.
    """
    if path == STANDARD:
        sys.stdout.buffer.writelines(json.encode(message, group))
        return
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


def read_state(path: Path) -> dict[str, RawTensor]:
    """Returns the tensors of a state, whose names begin with `state.`, in a file.

    Raises:
        InvalidContent: the file has no such tensor.
        QkvError, OSError: as `read`.
    """
    tensors = {n: x for n, x in read(path, "inputs").tensors.items() if n.startswith(STATE)}
    if not tensors:
        raise InvalidContent(
            f"{path} has no state: expected tensors whose names begin with {STATE}"
        )
    return tensors


def write_state(path: Path, response: Message, group: str) -> Message:
    """Writes the tensors of the state in a response to a file; returns the response without them.

    Raises:
        OSError: the file cannot be written.
    """
    state = {n: x for n, x in response.tensors.items() if n.startswith(STATE)}
    rest = {n: x for n, x in response.tensors.items() if n not in state}
    replace_file(path, safetensors.encode(Message({}, state), group))
    return replace(response, tensors=rest)


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
    if path == STANDARD and ".json" in suffixes:
        return
    if path.suffix not in suffixes:
        raise _unknown_suffix(path, suffixes)
    if path.is_dir():
        raise InvalidContent(f"{path} is a directory")
    if not path.parent.is_dir():
        raise InvalidContent(f"{path} is in a directory that does not exist: {path.parent}")


def _decode_npz(content: bytes, group: str, prefix: str | None = None) -> Message:
    """Decodes the arrays that the headers in the archive show to be needed, and no others."""
    if not content.startswith(_ZIP_HEADS):  # numpy would read a pickle or an .npy file
        raise InvalidContent(
            f"not an .npz file: got {content[:20]!r}, expected an archive that numpy.savez wrote"
        )
    try:
        with np.load(BytesIO(content), allow_pickle=False) as archive:
            members = {i.filename.removesuffix(".npy"): i for i in archive.zip.infolist()}
            dtypes = {n: _dtype_of_member(archive.zip, info) for n, info in members.items()}
            chosen = _chosen_members(dtypes, group, prefix)
            if odd := [n for n in chosen if dtypes[n] not in DTYPES]:
                raise unsupported_dtype(odd[0], dtypes[odd[0]])
            unpacked = sum(members[n].file_size for n in chosen if members[n].compress_type)
            if unpacked <= _MAX_UNPACKED:
                arrays = {name: archive[name] for name in chosen}
    except QkvError:
        raise
    except Exception as error:  # numpy, zipfile and zlib have a dozen for damaged files
        raise InvalidContent(f"not an .npz file of plain arrays: {error}") from None
    if unpacked > _MAX_UNPACKED:
        raise InvalidContent(
            f"compressed arrays are too large: got {unpacked:,} bytes, expected at most "
            f"{_MAX_UNPACKED:,}; numpy.savez writes arrays without compression"
        )
    tensors, layer = {}, {}
    for name, array in arrays.items():
        tensor = RawTensor.from_numpy(array, name)
        if group == "inputs" and name.startswith(LAYER):
            layer[name.removeprefix(LAYER)] = tensor
        else:
            tensors[name] = tensor
    return Message({}, tensors, layer)


def _dtype_of_member(archive: ZipFile, info: ZipInfo) -> str:
    """Returns the dtype in the header of an array.

    Raises:
        ValueError: the member is no array, or is smaller than its header says.
    """
    with archive.open(info) as file:
        version = npy_format.read_magic(file)
        read_header = {
            (1, 0): npy_format.read_array_header_1_0,
            (2, 0): npy_format.read_array_header_2_0,
        }.get(version)
        if read_header is None:
            raise ValueError(f"{info.filename} has version {version} of the format .npy")
        shape, _, dtype = read_header(file)
        if math.prod(shape) * dtype.itemsize > info.file_size:  # numpy would allocate it
            raise ValueError(f"{info.filename} is smaller than its shape {shape}")
    return dtype.name


def _chosen_members(dtypes: Mapping[str, str], group: str, prefix: str | None) -> list[str]:
    """Returns the names of the arrays that a request needs: all inputs, and floating weights."""
    start = LAYER if group == "inputs" else ""
    weights = [n for n in dtypes if group == "tensors" or n.startswith(LAYER)]
    below_prefix = below((n.removeprefix(start) for n in weights), prefix, "/layer" * bool(start))
    needed_weights = {start + n for n in below_prefix if is_needed(start + n, dtypes[start + n])}
    return [n for n in dtypes if n in needed_weights or n not in weights]


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
