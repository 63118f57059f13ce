"""Describes the attention layers of a model in a folder, and proves each description by running it.

The model has its real sizes and random numbers, so that no weight hides a part of the attention.
Every layer is compared twice: with these numbers, and with its own from the files.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch import nn
from transformers import PretrainedConfig

from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_options import LayerOptions
from qkv.attention.layers.layer_reader import read_layer
from qkv.attention.layers.layer_weights import Array
from qkv.attention.layers.layout_catalogue import Layout
from qkv.attention.layers.unread_tensors import find_unread
from qkv.errors import InvalidContent, QkvError
from qkv.jobs.loaded.layer_mark import digest_of
from qkv.models.describe.drawn_model import draw, read_config
from qkv.models.describe.layer_fields import Run, find_fields
from qkv.models.describe.layer_proof import SIZES, TOLERANCE, error_of
from qkv.models.describe.layer_record import LayerRecord, record
from qkv.models.describe.located_layers import LocatedLayer, OwnNumbers, locate
from qkv.models.describe.rotary_angles import Unfit
from qkv.models.describe.window_runs import Windows, integers_in
from qkv.version import __version__
from qkv.wire.checkpoint.checkpoint import Checkpoint, read_document
from qkv.wire.plain_json import load_names

_LENGTH: Final = 64  # tokens of a run
_MAX_CONFIG: Final = 16 << 20  # bytes
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


class _Model:
    """A model that is described.

    Args:
        checkpoint: its files.
        config: its configuration.
    """

    def __init__(self, checkpoint: Checkpoint, config: PretrainedConfig) -> None:
        self._checkpoint, self._config = checkpoint, config
        self._model = draw(config)
        self._has_axes = any(getattr(part, _AXES, None) for part in self._model.modules())
        self._layers, self._refused = locate(self._model, checkpoint)
        self._names = {layer.path: layer.holders for layer in self._layers}
        self._near = record(self._model, self._names, _LENGTH)
        self._far: dict[int, Mapping[str, LayerRecord]] = {}

    def describe(self) -> Described:
        """Returns the kinds of layers, and what is missing for the others."""
        kinds: dict[str, Kind] = {}
        windows = Windows(self._config, self._names, self._near, _LENGTH)
        for layer in self._layers:
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

    def _described(self, layer: LocatedLayer, windows: Windows) -> tuple[Kind, float]:
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

    def _layouts(self, layer: LocatedLayer) -> Sequence[Layout]:
        """Returns the layouts that names and shapes fit, and that read every tensor.

        Raises:
            Unfit: no layout reads a tensor.
        """
        prefix = layer.found.prefix
        below = {
            name.removeprefix(prefix): self._checkpoint.shape(name)
            for name in self._checkpoint.names
            if name.startswith(prefix)
        }
        layouts = [layout_catalogue.known()[name] for name in layer.found.layouts]
        unread = {layout.name: find_unread(layout, below) for layout in layouts}
        fitting = [layout for layout in layouts if not unread[layout.name]]
        if not fitting:
            raise Unfit(f"{next(iter(unread.values()))[0]}, which no layout reads")
        return fitting

    def _proved(
        self,
        layer: LocatedLayer,
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
                f"a part that makes the error {error:.1e} of the nearest description, "
                f"{_short(fields)}"
            )
        raise problem

    def _lengths(self) -> list[int]:
        """Returns lengths at which positions are measured, the longest first; 0: of the run."""
        found = {
            value
            for _, name, value in integers_in(self._config.to_dict())
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
        layer: LocatedLayer,
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
        with OwnNumbers(self._checkpoint, layer, module):
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


def _short(fields: Mapping[str, Any]) -> str:
    """Returns fields without long lists of numbers."""
    text = json.dumps(fields)
    return re.sub(r"\[(-?[\d.e-]+, ){6}[^]]*\]", "[...]", text)
