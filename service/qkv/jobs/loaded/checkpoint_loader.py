"""Loads the attention layers of checkpoints into memory that the processes of a service share.

`load_checkpoints` runs once, before the service forks its workers. A forked process reads the same
pages. Nothing but safetensors, JSON and TOML is read, and no code of a model runs.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from qkv.attention import catalogue
from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.input_norm import NORM_BIAS, NORM_WEIGHT
from qkv.attention.layers.layer import Layer, LoadedProperties
from qkv.attention.layers.layer_checks import check_numbers
from qkv.attention.layers.layer_reader import read_layer
from qkv.attention.layers.layer_sizes import sizes_of
from qkv.attention.layers.layer_weights import Array, hollow
from qkv.attention.layers.layout_catalogue import FoundLayer
from qkv.errors import InvalidContent, QkvError
from qkv.jobs.loaded.layer_settings import LayerSettings, ModelFiles
from qkv.jobs.loaded.loaded_layers import LoadedCheckpoint, LoadedLayers
from qkv.jobs.loaded.weight_reader import WeightMemory, read_weights, size_in_memory
from qkv.tensors import DTYPES, FLOATING
from qkv.wire.checkpoint.checkpoint import Checkpoint
from qkv.wire.checkpoint.torch_files import COMMAND

__all__ = ["load_checkpoints"]

_log = logging.getLogger(__name__)

_NORMS: Final = ("input_layernorm", "ln_1", "layernorm_before", "layer_norm1", "ln_attn")
"""Modules that are in front of the attention in every model that has one of that name."""
_MAX_LAYERS: Final = 4096
_MAX_PROBLEM: Final = 1000  # characters
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{0,256}")  # in paths, and in labels of metrics


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
            layers = _Loader(name, whole).load(max_bytes - held_bytes)
            loaded.append(LoadedCheckpoint(name, layers))
        except Exception as error:  # whatever a file does, the other checkpoints are served
            problem = _problem(error)
            _log.error("checkpoint %s is not served: %s", name, _in_one_line(problem))
            if is_strict:
                raise InvalidContent(f"checkpoint {name}: {_in_one_line(problem)}") from None
            shown = _in_one_line(_without_folders(problem, whole))
            loaded.append(LoadedCheckpoint(name, {}, shown))
    return LoadedLayers(loaded)


def _problem(error: Exception) -> str:
    if isinstance(error, QkvError):
        return error.detail
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"it cannot be read: {type(error).__name__}: {error}"


def _without_folders(problem: str, path: Path) -> str:
    """Returns a problem that clients may see: without the folders of the files.

    Args:
        problem: with paths as they are, before their white space or other characters are replaced.
        path: of the checkpoint.
    """
    for spelled, shown in ((f"{path}/", ""), (f"{path.parent}/", ""), (str(path), path.name)):
        problem = problem.replace(spelled, shown)
    return problem.partition(COMMAND)[0]


def _in_one_line(problem: str) -> str:
    """Returns a problem without control characters of a file."""
    words = " ".join(problem.split())
    return "".join(c if c.isprintable() else "?" for c in words)[:_MAX_PROBLEM]


class _Part(NamedTuple):
    """A layer of a checkpoint that is not read yet.

    Attributes:
        name: in requests.
        settings: what is known of it.
        layer: the same layer without numbers.
        norm: the name of the module of the norm in front of it; None: there is none.
    """

    name: str
    settings: LayerSettings
    layer: Layer
    norm: str | None


class _Loader:
    """Loads one checkpoint.

    Args:
        name: of the checkpoint.
        path: of the file or the folder.

    Raises:
        QkvError, OSError: a file cannot be read, or is wrong.
    """

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._checkpoint = name, Checkpoint(path)
        self._files = ModelFiles(path)
        self._shapes = {n: self._checkpoint.shape(n) for n in self._checkpoint.names}

    def load(self, max_bytes: int) -> dict[str, Layer]:
        """Returns the layers by name.

        Args:
            max_bytes: what their weights may take; checked before any is read.

        Raises:
            QkvError, OSError: as above, or the layers are too large.
        """
        try:
            parts = self._parts()
            size = sum(size_in_memory(part.layer.weights) for part in parts)
            if size > max_bytes:
                raise InvalidContent(
                    f"the layers are too large: got {size} bytes, expected at most {max_bytes} of "
                    "QKV_MAX_CHECKPOINT_BYTES that are left"
                )
            memory = WeightMemory(size)
            layers = {part.name: self._read(part, memory) for part in parts}
            self._checkpoint.check_unchanged()
        finally:
            self._checkpoint.close()
        return layers

    def _parts(self) -> list[_Part]:
        found_layers = layout_catalogue.find_layers(self._shapes)
        if not found_layers or len(found_layers) > _MAX_LAYERS:
            names = ", ".join(map(repr, list(self._shapes)[:4])) or "no tensor"
            raise InvalidContent(
                f"{self._checkpoint.path} has {len(found_layers)} attention layers: got {names}, "
                f"expected 1 to {_MAX_LAYERS} layers"
            )
        blocks = Counter(_block(found.prefix) for found in found_layers)
        tensors = _names_below([found.prefix for found in found_layers], self._shapes)
        parts = [self._part(found, blocks, tensors[found.prefix]) for found in found_layers]
        self._files.check_all_used()
        return parts

    def _part(self, found: FoundLayer, blocks: Counter[str], names: Sequence[str]) -> _Part:
        path, block = found.prefix.rstrip("."), _block(found.prefix)
        place = block if blocks[block] == 1 else path
        if not _NAME.fullmatch(place):
            raise InvalidContent(
                f"a layer has a wrong name: got {place!r:.300}, expected at most 256 letters, "
                "digits and ._-"
            )
        try:
            known = layout_catalogue.known()
            layouts = {name: known[name] for name in found.layouts}
            width = sizes_of(layouts[found.layouts[0]], found.shapes).hidden_width
            settings = self._files.settings_of(place, path, layouts, width)
            layer = self._without_numbers(found, settings, names)
            norm = self._norm(block, settings)
            if norm is not None:
                norm_weights = self._norm_weights(norm, len(layer.weights["query.weight"]))
                layer = replace(layer, weights={**layer.weights, **norm_weights})
        except QkvError as error:
            error.detail = f"{path}: {error.detail}"
            raise
        return _Part(f"{self._name}.{place}".rstrip("."), settings, layer, norm)

    def _without_numbers(
        self, found: FoundLayer, settings: LayerSettings, names: Sequence[str]
    ) -> Layer:
        """Returns a layer that holds no memory: its names and shapes are checked.

        The numbers are ones: a matrix of zeros counts as one that was never loaded.

        Args:
            found: the layer.
            settings: of the layer.
            names: of all tensors below its prefix, as a request would send them: some that no
                layout reads change the scores.
        """
        for name in found.shapes:
            self._check_dtype(found.prefix + name)
        tensors = {}
        for name in names:
            dtype = DTYPES.get(self._checkpoint.dtype(name), np.bool_)
            tensors[name] = np.broadcast_to(np.ones((), dtype), self._shapes[name])
        options = settings.options.model_copy(update={"prefix": found.prefix})
        layer = read_layer(options, tensors)
        dtypes = {array.dtype.name for array in layer.weights.values()}
        if len(dtypes) > 1 or not dtypes <= set(FLOATING):
            raise InvalidContent(
                f"the tensors have several dtypes: got {', '.join(sorted(dtypes))}, expected one"
            )
        return layer

    def _check_dtype(self, name: str) -> None:
        """Raises an error if the dtype of a tensor is not that of a layer's weights."""
        if (dtype := self._checkpoint.dtype(name)) not in FLOATING:
            raise InvalidContent(
                f"{name:.300} has an unknown dtype: got {dtype}, expected {', '.join(FLOATING)}"
            )

    def _norm(self, block: str, settings: LayerSettings) -> str | None:
        """Returns the module of the norm in front of the attention; None: it is not known."""
        if settings.norm is None:
            return None
        names = _NORMS if settings.norm_module is None else (settings.norm_module,)
        paths = [f"{block}.{name}".lstrip(".") for name in names]
        norm = next((path for path in paths if f"{path}.weight" in self._shapes), None)
        if norm is None and settings.norm_module is not None:
            raise InvalidContent(
                f"input_norm.module is wrong: got no tensor {paths[0]:.300}.weight, expected the "
                "name of a module in the block"
            )
        return norm

    def _norm_weights(self, norm: str, width: int) -> dict[str, Array]:
        """Returns the weights of a norm without numbers, whose dtype may differ from the layer's.

        Raises:
            InvalidContent: they do not fit embeddings of this width.
        """
        weights = {}
        for weight, name in self._norm_tensors(norm).items():
            self._check_dtype(name)
            if (shape := self._shapes[name]) != (width,):
                raise InvalidContent(
                    f"{name:.300} has the wrong shape: got {list(shape)}, expected {[width]}"
                )
            weights[weight] = hollow(DTYPES[self._checkpoint.dtype(name)], shape)
        return weights

    def _norm_tensors(self, norm: str) -> dict[str, str]:
        """Returns the names of the tensors of a norm by those of the weights."""
        names = {NORM_WEIGHT: f"{norm}.weight", NORM_BIAS: f"{norm}.bias"}
        return {weight: name for weight, name in names.items() if name in self._shapes}

    def _read(self, part: _Part, memory: WeightMemory) -> Layer:
        """Returns a layer with its numbers.

        Raises:
            InvalidContent: a matrix is all zeros.
        """
        weights = read_weights(part.layer, self._checkpoint, memory)
        check_numbers(part.layer, weights)
        if part.norm is not None:
            for weight, name in self._norm_tensors(part.norm).items():
                weights[weight] = memory.copy(self._checkpoint.read(name).numpy())
        norm = None if part.norm is None else part.settings.norm
        return replace(
            part.layer,
            tensors={},
            weights=weights,
            ignored=(),
            loaded=LoadedProperties(part.name, part.settings.parameters, norm),
        )


def _block(prefix: str) -> str:
    """Returns the path of a block: the prefix of its attention up to the last number."""
    parts = prefix.rstrip(".").split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[-1] + 1] if numbers else parts)


def _names_below(prefixes: Iterable[str], names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the names that begin with each prefix, and with no longer one."""
    below: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    for name in names:
        prefix = name
        while prefix and prefix not in below:
            prefix = prefix[: prefix.rfind(".", 0, -1) + 1]
        if prefix in below:
            below[prefix].append(name)
    return below
