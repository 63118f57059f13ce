"""Loads the attention layers of checkpoints into memory that the processes of a service share.

`load_checkpoints` runs once, before the service forks its workers. A forked process reads the same
pages. Nothing but safetensors, JSON and TOML is read, and no code of a model runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from qkv.attention import catalogue
from qkv.attention.layers.layer import Layer, LoadedProperties
from qkv.attention.layers.layer_checks import check_numbers
from qkv.errors import InvalidContent, QkvError
from qkv.jobs.loaded.layer_parts import LayerPart, find_parts
from qkv.jobs.loaded.layer_settings import ModelFiles
from qkv.jobs.loaded.loaded_layers import LoadedCheckpoint, LoadedLayers
from qkv.jobs.loaded.weight_reader import WeightMemory, read_weights, size_in_memory
from qkv.wire.checkpoint.checkpoint import Checkpoint
from qkv.wire.checkpoint.torch_files import COMMAND

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
        whole = path.absolute()  # as messages spell it; a path such as "." is in other words too
        try:
            checkpoint = _read_checkpoint(name, whole, max_bytes - held_bytes)
        except Exception as error:  # whatever a file does, the other checkpoints are served
            problem = _problem(error)
            _log.error("checkpoint %s is not served: %s", name, _in_one_line(problem))
            if is_strict:
                raise InvalidContent(f"checkpoint {name}: {_in_one_line(problem)}") from None
            checkpoint = LoadedCheckpoint(name, {}, _for_clients(problem, whole))
        for problem in checkpoint.unserved.values():
            _log.warning("layers of checkpoint %s are not served: %s", name, problem)
        loaded.append(checkpoint)
    return LoadedLayers(loaded)


def _problem(error: Exception) -> str:
    if isinstance(error, QkvError):
        return error.detail
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"it cannot be read: {type(error).__name__}: {error}"


def _for_clients(problem: str, path: Path) -> str:
    """Returns a problem that clients may see: without the folders of the files.

    Args:
        problem: with paths as they are, before their white space or other characters are replaced.
        path: of the checkpoint.
    """
    for spelled, shown in ((f"{path}/", ""), (f"{path.parent}/", ""), (str(path), path.name)):
        problem = problem.replace(spelled, shown)
    return _in_one_line(problem.partition(COMMAND)[0])


def _in_one_line(problem: str) -> str:
    """Returns a problem without control characters of a file."""
    words = " ".join(problem.split())
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
        size = sum(size_in_memory(part.layer.weights) for part in parts)
        if size > max_bytes:
            raise InvalidContent(
                f"the layers are too large: got {size} bytes, expected at most {max_bytes} of "
                "QKV_MAX_CHECKPOINT_BYTES that are left"
            )
        memory = WeightMemory(size)
        layers = {}
        for part in parts:
            whole = f"{name}.{part.name}".rstrip(".")
            layers[whole] = _read(whole, part, checkpoint, memory)
        checkpoint.check_unchanged()
    finally:
        checkpoint.close()
    reasons = {part: _for_clients(reason, path) for part, reason in unserved.items()}
    return LoadedCheckpoint(name, layers, unserved=reasons)


def _read(name: str, part: LayerPart, checkpoint: Checkpoint, memory: WeightMemory) -> Layer:
    """Returns a layer with its numbers.

    Raises:
        InvalidContent: a matrix is all zeros.
    """
    weights = read_weights(part.layer, checkpoint, memory)
    check_numbers(part.layer, weights)
    for weight, tensor in part.norm.items():
        weights[weight] = memory.copy(checkpoint.read(tensor).numpy())
    settings = part.settings
    mark = settings.mark
    loaded = LoadedProperties(
        name,
        settings.parameters,
        settings.norm if part.norm else None,
        settings.ignored,
        None if mark is None else mark.model_dump(exclude={"digest"}),
        None if mark is None or settings.is_longer else mark.length,
    )
    return replace(part.layer, tensors={}, weights=weights, ignored=(), loaded=loaded)
