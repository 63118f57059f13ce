"""Loads the attention layers of checkpoints into memory that the processes of a service share.

`load_checkpoints` runs once, before the service forks its workers. A forked process reads the same
pages. Nothing but safetensors, JSON and TOML is read, and no code of a model runs.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from qkv.attention import catalogue
from qkv.attention.layers.layer import Layer, LoadedProperties
from qkv.attention.layers.layer_checks import check_numbers
from qkv.attention.layers.layer_weights import Array, Weights
from qkv.errors import InvalidContent, QkvError
from qkv.jobs.buffer_layout import ALIGNMENT
from qkv.jobs.loaded.layer_parts import LayerPart, find_parts
from qkv.jobs.loaded.layer_settings import ModelFiles
from qkv.jobs.loaded.loaded_layers import LoadedCheckpoint, LoadedLayers
from qkv.wire.checkpoint.checkpoint import Checkpoint

__all__ = ["load_checkpoints"]

_log = logging.getLogger(__name__)

_MAX_PROBLEM: Final = 4000  # characters


def load_checkpoints(
    paths: Mapping[str, Path], max_bytes: int, *, is_strict: bool = False
) -> LoadedLayers:
    """Loads the layers of checkpoints.

    A checkpoint that cannot be loaded has a problem in the result; the others are loaded.

    Args:
        paths: by name: a safetensors file, an index of several, or a folder with one of them.
        max_bytes: what the weights of all layers may take.
        is_strict: raise the first problem.

    Raises:
        ValueError: a name is that of a variant.
        QkvError: a checkpoint cannot be loaded, and `is_strict`.
    """
    for name in paths:
        if name in catalogue.variants():
            raise ValueError(f"the checkpoint {name} has the name of a variant: name it otherwise")
    loaded: list[LoadedCheckpoint] = []
    for name, path in paths.items():
        held_bytes = sum(checkpoint.bytes for checkpoint in loaded)
        try:
            checkpoint = _read_checkpoint(name, path, max_bytes - held_bytes)
        except Exception as error:  # whatever a file does, the other checkpoints are served
            problem = _one_line(_problem(error))
            _log.error("checkpoint %s is not served: %s", name, problem)
            if is_strict:
                raise InvalidContent(f"checkpoint {name}: {problem}") from None
            checkpoint = LoadedCheckpoint(name, {}, _without_folder(problem, path))
        for problem in checkpoint.unserved.values():
            _log.warning("layers of checkpoint %s are not served: %s", name, problem)
        loaded.append(checkpoint)
    return LoadedLayers(loaded)


def _without_folder(problem: str, path: Path) -> str:
    """Returns a problem without the path of a checkpoint in the machine."""
    for folder in (path, path.parent):
        problem = problem.replace(f"{folder}/", "")
    return problem


def _problem(error: Exception) -> str:
    if isinstance(error, QkvError):
        return error.detail
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"it cannot be read: {type(error).__name__}: {error}"


def _one_line(text: str) -> str:
    """Returns a problem in one line, without control characters of a file."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in words)[:_MAX_PROBLEM]


def _read_checkpoint(name: str, path: Path, max_bytes: int) -> LoadedCheckpoint:
    """Loads one checkpoint.

    Args:
        name: of the checkpoint.
        path: of the file or the folder.
        max_bytes: what its weights may take; checked before any is read.

    Raises:
        QkvError, OSError: a file cannot be read, or is wrong, or the layers are too large.
    """
    checkpoint, files = Checkpoint(path), ModelFiles(path)
    try:
        parts, unserved = find_parts(checkpoint, files)
        size = sum(_size(part.layer.weights) for part in parts)
        if size > max_bytes:
            raise InvalidContent(
                f"the layers are too large: got {size} bytes, expected at most {max_bytes} of "
                "QKV_MAX_CHECKPOINT_BYTES that are left"
            )
        memory = _Memory(size)
        layers = {}
        for part in parts:
            whole = f"{name}.{part.name}".rstrip(".")
            layers[whole] = _read(whole, part, checkpoint, memory)
        checkpoint.check_unchanged()
    finally:
        checkpoint.close()
    reasons = {p: _without_folder(_one_line(reason), path) for p, reason in unserved.items()}
    return LoadedCheckpoint(name, layers, unserved=reasons)


def _read(name: str, part: LayerPart, checkpoint: Checkpoint, memory: _Memory) -> Layer:
    """Returns a layer with its numbers.

    Raises:
        InvalidContent: a matrix is all zeros.
    """
    read = {tensor: checkpoint.read(tensor).numpy() for tensor in part.layer.tensors}
    layer = part.layer.with_numbers(read)
    check_numbers(layer)
    weights = dict(layer.weights)
    weights |= {weight: checkpoint.read(tensor).numpy() for weight, tensor in part.norm.items()}
    norm = part.settings.norm if part.norm else None
    return replace(
        layer,
        tensors={},
        weights={weight: memory.place(array) for weight, array in weights.items()},
        ignored=(),
        loaded=LoadedProperties(name, part.settings.parameters, norm, part.settings.ignored),
    )


class _Memory:
    """Anonymous memory, shared with the processes that are forked later.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self._buffer, self._end = mmap.mmap(-1, max(size, 1)), 0

    def place(self, array: Array) -> Array:
        """Returns a dense, aligned copy of an array."""
        flat = np.frombuffer(self._buffer, array.dtype, array.size, self._end)
        placed = flat.reshape(array.shape)
        np.copyto(placed, array)
        self._end += _aligned(array.nbytes)
        return placed


def _size(weights: Weights) -> int:
    return sum(_aligned(array.nbytes) for array in weights.values())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
