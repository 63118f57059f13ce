"""Describes the attention layers of a model in a folder, and proves each description by running it.

The model has its real sizes and random numbers, so that no weight hides a part of the attention.
Every layer is compared twice: with these numbers, and with its own from the files.
"""

from __future__ import annotations

import contextlib
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
from qkv.attention.layers.layout_catalogue import Layout
from qkv.attention.layers.unread_tensors import find_unread
from qkv.errors import InvalidContent
from qkv.jobs.loaded.layer_mark import digest_of
from qkv.models.describe.attention_run import AttentionRun, run_attention
from qkv.models.describe.drawn_model import draw, read_config
from qkv.models.describe.layer_fields import find_nearest
from qkv.models.describe.layer_proof import SIZES, TOLERANCE, LayerProof
from qkv.models.describe.located_layers import LocatedLayer, locate, unread_part
from qkv.models.describe.model_run import run_model
from qkv.models.describe.nearest_description import in_words, nearest_of
from qkv.models.describe.rotary_angles import Unfit
from qkv.models.describe.windows import Windows, leaves_of
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

    @property
    def toml(self) -> str:
        """The text of qkv.toml: a table for each kind of layer."""
        parts = ["# Written by `qkv describe`. A changed line loses its mark: it is not proven.\n"]
        for number, kind in enumerate(self.kinds, 1):
            lines = (f"{name} = {_toml_of(value)}\n" for name, value in kind.table.items())
            parts.append(f"\n[kinds.{number}]\n{''.join(lines)}")
        for place, missing in self.refused.items():
            parts.append(f"\n# {place} has no description: it has {missing}\n")
        return "".join(parts)


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
        self._layers, self._refused = locate(self._model, checkpoint)
        self._paths = [layer.path for layer in self._layers]
        self._nearest: dict[tuple[object, ...], tuple[str, list[str]]] = {}
        self._received = {0: run_model(self._model, self._paths, _LENGTH)}
        self._tables = [b for b in self._model.buffers() if b.dim() == 1 and b.is_floating_point()]
        self._has_axes = any(getattr(part, _AXES, None) for part in self._model.modules())

    def describe(self) -> Described:
        """Returns the kinds of layers, and what is missing for the others."""
        kinds: dict[str, Kind] = {}
        windows = Windows(self._config, self._model, self._received[0], _LENGTH)
        for layer in self._layers:
            try:
                kind = self._described(layer, windows)
            except Unfit as unfit:
                self._refused[layer.place] = self._refusal(layer, unfit)
                continue
            key = json.dumps([kind.fields, kind.length, sorted(kind.shapes.items())])
            found = kinds.setdefault(key, kind)
            found.blocks.append(layer.place)
            found.error = max(found.error, kind.error)
        return Described(list(kinds.values()), self._refused)

    def _described(self, layer: LocatedLayer, windows: Windows) -> Kind:
        """Returns the kind of a layer, which has no blocks yet, and the error of this layer.

        Raises:
            Unfit: it has a part that no description holds.
        """
        module = self._model.get_submodule(layer.path)
        run = self._run(layer, module, 0)
        if run is None:
            raise Unfit("a module that was not called on random inputs")
        problem = Unfit(unread_part([name for name, _ in module.named_parameters()]))
        for layout, unread in self._layouts(layer).items():
            try:
                fields, length, error = self._with_random_numbers(layer, layout, unread, run)
                fields |= windows.of(layer.path)
                with layer.own_numbers(module, self._checkpoint):
                    own = LayerProof(layer, layout, run).error(fields)
            except Unfit as unfit:
                has_both = unread and not unfit.nearest
                problem = Unfit(f"{unread_part(unread)} and {unfit}") if has_both else unfit
                continue
            if not own <= TOLERANCE:
                part = f"a part that makes the error {own:.1e} with its own numbers"
                raise Unfit(part, in_words(fields, error))
            if not windows.is_crossed:
                length = min(length, len(run.positions))
            return Kind(fields, length, layer.found.shapes, error=max(error, own))
        raise problem

    def _refusal(self, layer: LocatedLayer, unfit: Unfit) -> str:
        """Returns what a layer has that no description holds, and the nearest description."""
        if unfit.nearest:
            return f"{unfit} ({unfit.nearest})"
        run = self._run(layer, self._model.get_submodule(layer.path), 0)
        key = str(unfit), *layer.found.shapes.items()
        # a search takes seconds: one for all layers of a kind
        if key not in self._nearest or run is None or run.captured is not None:
            heads = getattr(self._config.get_text_config(), "num_attention_heads", None)
            self._nearest[key] = nearest_of(layer, run, heads)
        nearest, missing = self._nearest[key]
        return f"{' and '.join([str(unfit), *missing])} ({nearest})"

    def _run(self, layer: LocatedLayer, module: nn.Module, length: int) -> AttentionRun | None:
        """Returns a run of a layer; None: the model does not run so.

        Args:
            layer: that runs.
            module: its module.
            length: whose positions double; 0: of the first run.
        """
        if length not in self._received:
            positions = doubling(length)
            self._received[length] = run_model(self._model, self._paths, len(positions), positions)
        arguments = self._received[length].get(layer.path)
        return None if arguments is None else run_attention(module, arguments, layer.projections)

    def _layouts(self, layer: LocatedLayer) -> dict[Layout, list[str]]:
        """Returns the layouts that names and shapes fit, and the tensors that each does not read.

        Those that read every tensor are alone, if there are some.
        """
        prefix = layer.found.prefix
        below = {
            name.removeprefix(prefix): self._checkpoint.shape(name)
            for name in self._checkpoint.names
            if name.startswith(prefix)
        }
        layouts = [layout_catalogue.known()[name] for name in layer.found.layouts]
        unread = {layout: find_unread(layout, below) for layout in layouts}
        return {layout: names for layout, names in unread.items() if not names} or unread

    def _with_random_numbers(
        self, layer: LocatedLayer, layout: Layout, unread: Sequence[str], run: AttentionRun
    ) -> tuple[dict[str, Any], int, float]:
        """Returns the fields that hold for the most tokens, how many these are, and the error.

        Raises:
            Unfit: there are none; it names what is missing, and the nearest ones with their error.
        """
        proof = LayerProof(layer, layout, run)

        fields, missing = find_nearest(proof.layer, run, run, self._tables)
        if unread:
            missing = [unread_part(unread), *missing]
        if fields["positions"] == "rotary" and self._has_axes:
            missing.append("positions of several axes, which only tokens of a text share")
        length = len(run.positions)
        for longer in [] if missing else self._lengths():
            with contextlib.suppress(Unfit):  # such as a temperature that begins at some position
                turned = self._run(layer, run.module, longer)
                if turned is None or len(turned.positions) != turned.x_BLM.shape[1]:
                    continue  # the model does not take positions, such as a tower of images
                far, unfit = find_nearest(proof.layer, run, turned, self._tables)
                if not unfit and (error := proof.error(far)) <= TOLERANCE:
                    fields, length = far, longer
                    break
        else:
            error = proof.error(fields)
        if missing or not error <= TOLERANCE:
            parts = " and ".join(missing) or "a part that only the output shows"
            raise Unfit(parts, in_words(fields, error))
        if not (of_sizes := proof.error(fields, SIZES)) <= TOLERANCE:
            part = f"a part that makes the error {of_sizes:.1e} with inputs of other sizes"
            raise Unfit(part, in_words(fields, error))
        return fields, length, max(error, of_sizes)

    def _lengths(self) -> list[int]:
        """Returns lengths at which positions are measured, the longest first."""
        found = {
            value
            for path, value in leaves_of(self._config.to_dict())
            if type(value) is int
            and _LENGTHS.fullmatch(path[-1])
            and _LENGTH < value <= _MAX_LENGTH
        }
        return sorted(found, reverse=True)[:_MAX_TRIES]


def doubling(length: int) -> list[int]:
    """Returns 0, 1, 2, 4 and so on, and the last position of a length."""
    powers = [1 << n for n in range(length.bit_length()) if 1 << n < length - 1]
    return [0, *powers, length - 1]


def _toml_of(value: Any) -> str:
    """Returns a value as TOML, which spells strings and numbers as JSON does."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml_of(each)}" for name, each in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_toml_of, value))}]"
    return json.dumps(value)
