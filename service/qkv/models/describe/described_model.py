"""Describes the attention layers of a model in a folder, and proves each description by running it.

The model has its real sizes and random numbers, so that no weight hides a part of the attention.
Every layer is compared twice: with these numbers, and with its own from the files.
"""

from __future__ import annotations

import copy
import importlib.metadata
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings

from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_options import LayerOptions
from qkv.attention.layers.layer_reader import read_layer
from qkv.attention.layers.layer_weights import Array
from qkv.attention.layers.layout_catalogue import FoundLayer, Layout
from qkv.attention.layers.unread_tensors import find_unread
from qkv.errors import InvalidContent, QkvError
from qkv.jobs.loaded.config_fields import HARMLESS
from qkv.jobs.loaded.layer_mark import digest_of
from qkv.jobs.loaded.layer_parts import places_of
from qkv.models.describe.drawn_model import draw, read_config
from qkv.models.describe.layer_fields import Run, find_fields, window_of
from qkv.models.describe.layer_proof import SIZES, TOLERANCE, error_of
from qkv.models.describe.layer_record import LayerRecord, record
from qkv.models.describe.rotary_angles import Unfit
from qkv.version import __version__
from qkv.wire.checkpoint.checkpoint import Checkpoint, read_document
from qkv.wire.plain_json import load_names

__all__ = ["Described", "Kind", "describe"]

_LENGTH: Final = 64  # tokens of a run
_MAX_CONFIG: Final = 16 << 20  # bytes
_SMALL: Final = (8, 16)  # windows that a run crosses
_WINDOWS: Final = re.compile(r".*(window|chunk|local|block|span|segment|sparse|stride|bucket).*")
_SPARSE: Final = re.compile(r".*(sparse|index_(topk|block|head|n_head)|top_?k_block).*")
_LENGTHS: Final = re.compile(r".*(position|length|context|ctx|max_seq).*")
_MAX_LENGTH: Final = 1 << 24
_MAX_TRIES: Final = 4
_AXES: Final = "mrope_section"  # of modules that split channels between the axes of an image


@dataclass
class Kind:
    """Layers with the same description.

    Attributes:
        fields: of qkv.toml.
        length: the longest sequence for which they hold.
        blocks: the names of the layers.
        error: the largest one of all, with random numbers and with their own.
        shapes: of the tensors of each, by name without the prefix.
    """

    fields: dict[str, Any]
    length: int
    shapes: Mapping[str, tuple[int, ...]]
    blocks: list[str] = field(default_factory=list)
    error: float = 0.0

    @property
    def table(self) -> dict[str, Any]:
        """The table of qkv.toml: blocks, fields and mark."""
        mark: dict[str, Any] = {
            "error": float(f"{self.error:.2g}"),
            "length": self.length,
            "versions": {
                "qkv": __version__,
                **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
            },
        }
        mark["digest"] = digest_of(self.fields, mark, self.shapes)
        return {"blocks": self.blocks, **self.fields, "mark": mark}


@dataclass
class Described:
    """The result for a model.

    Attributes:
        kinds: of layers that are described.
        refused: what is missing, by the name of each other layer.
    """

    kinds: list[Kind]
    refused: dict[str, str]


def describe(folder: Path) -> Described:
    """Describes the attention layers of a model.

    Args:
        folder: with `config.json` and the tensors, as `save_pretrained` writes it.

    Raises:
        QkvError: there is no such model, or transformers cannot build it.
        OSError: a file cannot be read.
    """
    document = load_names(read_document(folder / "config.json", _MAX_CONFIG))
    if not isinstance(document, dict):
        raise InvalidContent(f"{folder / 'config.json'}: expected an object")
    checkpoint = Checkpoint(folder)
    try:
        return _Model(checkpoint, read_config(document)).describe()
    finally:
        checkpoint.close()


@dataclass
class _Located:
    """A layer of the files, and its module in the model.

    Attributes:
        found: the layer.
        place: its name in requests.
        path: of its module.
        names: of the tensors inside the module, by their names in the files.
    """

    found: FoundLayer
    place: str
    path: str
    names: Mapping[str, str]

    @property
    def holders(self) -> set[str]:
        """The names of the modules inside it that have tensors of the layer."""
        return {name.rpartition(".")[0] for name in self.names.values()} - {""}

    def tensors(self, module: nn.Module) -> dict[str, Array]:
        """Returns the tensors of the layer as the module has them now, by their whole names."""
        # parameters that overlap must not be the same memory for who looks for their names
        return {
            name: module.get_parameter(inside).detach().numpy().copy()
            for name, inside in self.names.items()
        }


class _Model:
    """A model that is described.

    Args:
        checkpoint: its files.
        config: its configuration.
    """

    def __init__(self, checkpoint: Checkpoint, config: PretrainedConfig) -> None:
        self._checkpoint, self._config = checkpoint, config
        self._model = draw(config)
        self._shapes = {name: checkpoint.shape(name) for name in checkpoint.names}
        self._has_axes = any(getattr(part, _AXES, None) for part in self._model.modules())
        self._refused: dict[str, str] = {}
        self._in_model = self._renamed()
        self._layers = {layer.path: layer for layer in self._locate()}
        self._names = {path: layer.holders for path, layer in self._layers.items()}
        self._near = record(self._model, self._names, _LENGTH)
        self._far: dict[int, Mapping[str, LayerRecord]] = {}

    def describe(self) -> Described:
        """Returns the kinds of layers, and what is missing for the others."""
        kinds: dict[str, Kind] = {}
        windows = _Windows(self._config, self._names, self._near)
        for layer in self._layers.values():
            try:
                kind, error = self._described(layer, windows)
            except Unfit as unfit:
                self._refused[layer.place] = str(unfit)
                continue
            key = json.dumps([kind.fields, kind.length, sorted(kind.shapes.items())])
            found = kinds.setdefault(key, kind)
            found.blocks.append(layer.place)
            found.error = max(found.error, error)
        return Described(list(kinds.values()), self._refused)

    def _locate(self) -> Iterator[_Located]:
        """Yields the layers whose modules are in the model."""
        found_layers = layout_catalogue.find_layers(self._shapes)
        if not found_layers:
            raise InvalidContent(
                f"{self._checkpoint.path} has no attention layer in a known layout"
            )
        places = places_of(found.prefix for found in found_layers)
        known = dict(self._model.named_parameters(remove_duplicate=False))
        for found in found_layers:
            names = {found.prefix + name: shape for name, shape in found.shapes.items()}
            inside = {name: self._in_model.get(name, "") for name in names}
            place = places[found.prefix]
            if any(new not in known or known[new].shape != names[n] for n, new in inside.items()):
                self._refused[place] = "tensors of other names in transformers"
                continue
            path = _parent(list(inside.values()))
            relative = {name: new.removeprefix(f"{path}.") for name, new in inside.items()}
            yield _Located(found, place, path, relative)

    def _renamed(self) -> dict[str, str]:
        """Returns the names in the model of the tensors of the files."""
        mapping = get_model_conversion_mapping(self._model)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        known = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        base = f"{self._model.base_model_prefix}."
        found = {}
        for name in self._shapes:
            new = apply_renamings(name, renamings)
            for spelled in (new, new.removeprefix(base), base + new):
                if spelled in known:
                    found[name] = spelled
                    break
        return found

    def _described(self, layer: _Located, windows: _Windows) -> tuple[Kind, float]:
        """Returns the kind of a layer, which has no blocks yet, and the error of this layer.

        Raises:
            Unfit: it has a part that no description holds.
        """
        if layer.path not in self._near:
            raise Unfit("a module that was not called on random inputs")
        module, near = self._model.get_submodule(layer.path), self._near[layer.path]
        run = Run(near, range(run_length(near)))
        problem = Unfit("")
        for layout in self._layouts(layer):
            tensors = layer.tensors(module)
            try:
                whole = _read(layer.found.prefix, layout, run, tensors)
                fields, length = self._proved(layer, module, whole, run, tensors)
                fields |= windows.of(layer.path)
                if not windows.is_crossed:
                    length = min(length, run_length(near))
                error = self._error(layer, module, whole, run, tensors, fields)
            except Unfit as unfit:
                problem = unfit
                continue
            shapes = {name: tuple(shape) for name, shape in layer.found.shapes.items()}
            return Kind(fields, length, shapes), error
        raise problem

    def _layouts(self, layer: _Located) -> Sequence[Layout]:
        """Returns the layouts that names and shapes fit, and that read every tensor.

        Raises:
            Unfit: no layout reads a tensor.
        """
        prefix = layer.found.prefix
        below = {n.removeprefix(prefix): s for n, s in self._shapes.items() if n.startswith(prefix)}
        layouts = [layout_catalogue.known()[name] for name in layer.found.layouts]
        unread = {layout.name: find_unread(layout, below) for layout in layouts}
        fitting = [layout for layout in layouts if not unread[layout.name]]
        if not fitting:
            raise Unfit(f"{next(iter(unread.values()))[0]}, which no layout reads")
        return fitting

    def _proved(
        self,
        layer: _Located,
        module: nn.Module,
        whole: Layer,
        run: Run,
        tensors: Mapping[str, Array],
    ) -> tuple[dict[str, Any], int]:
        """Returns the fields that hold for the most tokens, and how many these are.

        Raises:
            Unfit: there are none; it names the error of the nearest description.
        """
        problem = Unfit("")
        tables = [b for b in self._model.buffers() if b.dim() == 1 and b.is_floating_point()]
        for length in self._lengths():
            far = self._far_records(length).get(layer.path) if length else None
            if length and (far is None or far.call is None):
                continue
            far_run = None if far is None else Run(far, doubling(length))
            try:
                fields = find_fields(whole, layer.names, module, run, far_run, tables)
            except Unfit as unfit:  # such as a temperature that begins at some position
                problem = unfit
                continue
            if fields["positions"] == "rotary" and self._has_axes:
                raise Unfit("positions of several axes, which only tokens of a text share")
            error = error_of(whole, fields, module, run.record, run.x, tensors)
            if error <= TOLERANCE:
                return fields, length or len(run.positions)
            problem = Unfit(
                f"a part that makes the error {error:.1e} of the nearest description, {_short(fields)}"
            )
        raise problem

    def _lengths(self) -> list[int]:
        """Returns lengths at which positions are measured, the longest first; 0: of the run."""
        found = {
            value
            for _, name, value in _integers(self._config.to_dict())
            if _LENGTHS.fullmatch(name) and _LENGTH < value <= _MAX_LENGTH
        }
        return [*sorted(found, reverse=True)[:_MAX_TRIES], 0]

    def _far_records(self, length: int) -> Mapping[str, LayerRecord]:
        if length not in self._far:
            positions = doubling(length)
            self._far[length] = record(self._model, self._names, len(positions), positions)
        return self._far[length]

    def _error(
        self,
        layer: _Located,
        module: nn.Module,
        whole: Layer,
        run: Run,
        tensors: Mapping[str, Array],
        fields: Mapping[str, Any],
    ) -> float:
        """Returns the largest error with inputs of several sizes, and with the layer's own numbers.

        Raises:
            Unfit: it is too large.
        """
        errors = {
            f"inputs of {size:g} times the size": error_of(
                whole, fields, module, run.record, run.x, tensors, size
            )
            for size in SIZES
        }
        files = {new.removeprefix(f"{layer.path}."): name for name, new in self._in_model.items()}
        with _own_numbers(self._checkpoint, files, module):
            own = layer.tensors(module)
            errors["its own numbers"] = error_of(whole, fields, module, run.record, run.x, own)
        for name, error in errors.items():
            if not error <= TOLERANCE:
                raise Unfit(f"a part that makes the error {error:.1e} with {name}")
        return max(errors.values())


def run_length(found: LayerRecord) -> int:
    """Returns the number of tokens of a run."""
    return 0 if found.call is None else found.call.query.shape[2]


def doubling(length: int) -> list[int]:
    """Returns 0, 1, 2, 4 and so on, and the last position of a length."""
    powers = [1 << n for n in range(length.bit_length()) if 1 << n < length - 1]
    return [0, *powers, length - 1]


def _parent(names: Sequence[str]) -> str:
    """Returns the path of the module that has the modules of all these tensors."""
    # a tensor is that of a module below, or a parameter of its own
    ends = {name: 2 if name.endswith((".weight", ".bias")) else 1 for name in names}
    every = [name.split(".")[:-end] for name, end in ends.items()]
    same = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*every, strict=False))
    return ".".join(words[0] for words in same)


def _read(prefix: str, layout: Layout, run: Run, tensors: Mapping[str, Array]) -> Layer:
    """Returns a layer with the numbers of heads of a call.

    Raises:
        Unfit: the tensors do not split into them.
    """
    problem = ""
    for kv_heads in (run.call.key.shape[1], None):
        options = LayerOptions(
            layout=layout.name, heads=run.call.query.shape[1], kv_heads=kv_heads, prefix=prefix
        )
        try:
            return read_layer(options, layout.select(tensors, prefix))
        except QkvError as error:
            problem = problem or error.detail
    raise Unfit(f"weights that qkv refuses: {problem}")


class _own_numbers:
    """Gives a module the numbers of the files inside the block, in float64.

    Args:
        checkpoint: the files.
        names: in the files, by the name inside the module.
        module: of a layer.
    """

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str], module: nn.Module) -> None:
        self._checkpoint, self._names, self._module = checkpoint, names, module
        self._drawn: dict[str, Tensor] = {}

    def __enter__(self) -> None:
        for name, _ in self._module.named_parameters():
            if name not in self._names:
                raise Unfit(f"{name}, which the files do not have")
        for name, parameter in self._module.named_parameters():
            numbers = self._checkpoint.read(self._names[name]).numpy().astype(np.float64)
            self._drawn[name] = parameter.data
            parameter.data = torch.from_numpy(numbers)

    def __exit__(self, *_: object) -> None:
        for name, parameter in self._module.named_parameters():
            parameter.data = self._drawn[name]


class _Windows:
    """The windows of layers, from runs of the same model with smaller ones.

    Args:
        config: of the model.
        names: as of `record`.
        near: the run with the real windows.

    Attributes:
        is_crossed: every field that may be a window was set to smaller numbers, and no other one
            says that queries choose their keys.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        names: Mapping[str, Collection[str]],
        near: Mapping[str, LayerRecord],
    ) -> None:
        document = config.to_dict()
        # which keys a query sees may depend on their numbers, once there are more than some
        self.is_crossed = not any(_SPARSE.fullmatch(name) for name in _names_in(document))
        self._near = near
        self._runs: list[tuple[int, list[dict[str, LayerRecord]]]] = []
        for path, name, value in _integers(document):
            if value < _LENGTH or not _WINDOWS.fullmatch(name) or HARMLESS.fullmatch(name):
                continue
            try:
                small = [
                    record(draw(read_config(_changed(document, path, size))), names, _LENGTH)
                    for size in _SMALL
                ]
            except InvalidContent:
                self.is_crossed = False
                continue
            self._runs.append((value, small))

    def of(self, path: str) -> dict[str, Any]:
        """Returns the field of a layer's window, if the run with the real ones does not show it.

        Raises:
            Unfit: it is no window.
        """
        found: dict[str, Any] = {}
        real = _reach(self._near, path)
        for value, (first, second) in self._runs:
            a, b = _reach(first, path), _reach(second, path)
            if a == b == real:
                continue
            reach = [_extended(*ends, value) for ends in zip(a, b, strict=True)]
            if None in reach or found:
                raise Unfit("a window of one side, or several windows")
            found = {"window": reach}
        return found


def _reach(records: Mapping[str, LayerRecord], path: str) -> tuple[int | None, int | None]:
    if path not in records or (call := records[path].call) is None:
        raise Unfit("no run with smaller windows")
    return window_of(call)


def _extended(first: int | None, second: int | None, value: int) -> int | None:
    """Returns the end of a window of this size, from those of two smaller ones.

    Raises:
        Unfit: it does not grow with the size.
    """
    if first == second:
        return first
    a, b = _SMALL
    if first is None or second is None or second - first not in (b - a, (b - a) // 2):
        raise Unfit("a window that does not grow with its field in config.json")
    return first + (value - a) * (second - first) // (b - a)


def _integers(value: Any, *path: str) -> Iterator[tuple[tuple[str, ...], str, int]]:
    """Yields path, name and value of each integer in a configuration."""
    for name, each in value.items():
        if isinstance(each, dict):
            yield from _integers(each, *path, name)
        elif type(each) is int:
            yield (*path, name), str(name), each


def _names_in(value: Any) -> Iterator[str]:
    """Yields the names of the fields of a configuration that say something."""
    for name, each in value.items():
        if isinstance(each, dict):
            yield from _names_in(each)
        if each:
            yield str(name)


def _changed(document: Mapping[str, Any], path: Sequence[str], value: int) -> dict[str, Any]:
    changed = copy.deepcopy(dict(document))
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return changed


def _short(fields: Mapping[str, Any]) -> str:
    """Returns fields without long lists of numbers."""
    text = json.dumps(fields)
    return re.sub(r"\[(-?[\d.e-]+, ){6}[^]]*\]", "[...]", text)
