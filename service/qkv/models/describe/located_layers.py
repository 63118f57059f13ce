"""Finds the modules of a model of transformers that have the layers of its files."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings

from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.layer_weights import Array
from qkv.attention.layers.layout_catalogue import FoundLayer
from qkv.errors import InvalidContent
from qkv.jobs.loaded.layer_parts import places_of
from qkv.models.describe.rotary_angles import Unfit
from qkv.wire.checkpoint.checkpoint import Checkpoint


@dataclass
class LocatedLayer:
    """A layer of the files, and its module in the model.

    Attributes:
        found: the layer.
        place: its name in requests.
        path: of its module.
        names: of the layer's tensors inside the module, by their names in the files.
        files: the names in the files of all tensors of the module, by their names inside it.
    """

    found: FoundLayer
    place: str
    path: str
    names: Mapping[str, str]
    files: Mapping[str, str]

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


def locate(
    model: PreTrainedModel, checkpoint: Checkpoint
) -> tuple[list[LocatedLayer], dict[str, str]]:
    """Returns the layers of the files whose modules are in a model.

    Returns:
        The layers, and what is missing for the others, by name.

    Raises:
        InvalidContent: the files have no attention layer.
    """
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names}
    found_layers = layout_catalogue.find_layers(shapes)
    if not found_layers:
        raise InvalidContent(f"{checkpoint.path} has no attention layer in a known layout")
    places = places_of(found.prefix for found in found_layers)
    in_model = _renamed(model, checkpoint)
    known = dict(model.named_parameters(remove_duplicate=False))
    layers: dict[str, LocatedLayer] = {}
    missing = {}
    for found in found_layers:
        names = {found.prefix + name: shape for name, shape in found.shapes.items()}
        inside = {name: in_model.get(name, "") for name in names}
        path, place = _parent(list(inside.values())), places[found.prefix]
        if any(new not in known or known[new].shape != names[n] for n, new in inside.items()):
            missing[place] = "tensors of other names in transformers"
        elif path in layers:
            missing[place] = f"the same module as {layers[path].place}"
        else:
            below = f"{path}."
            files = {
                new.removeprefix(below): name
                for name, new in in_model.items()
                if new.startswith(below)
            }
            relative = {name: new.removeprefix(below) for name, new in inside.items()}
            layers[path] = LocatedLayer(found, place, path, relative, files)
    return list(layers.values()), missing


def _renamed(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, str]:
    """Returns the names in the model of the tensors of the files."""
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    base = f"{model.base_model_prefix}."
    found = {}
    for name in checkpoint.names:
        new = apply_renamings(name, renamings)
        for spelled in (new, new.removeprefix(base), base + new):
            if spelled in known:
                found[name] = spelled
                break
    return found


def _parent(names: Sequence[str]) -> str:
    """Returns the path of the module that has the modules of all these tensors."""
    # a tensor is that of a module below, or a parameter of its own
    ends = {name: 2 if name.endswith((".weight", ".bias")) else 1 for name in names}
    every = [name.split(".")[:-end] for name, end in ends.items()]
    same = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*every, strict=False))
    return ".".join(words[0] for words in same)


class OwnNumbers:
    """Gives a module the numbers of the files inside the block, in float64.

    Args:
        checkpoint: the files.
        layer: of the files.
        module: that of the layer.
    """

    def __init__(self, checkpoint: Checkpoint, layer: LocatedLayer, module: nn.Module) -> None:
        self._checkpoint, self._names, self._module = checkpoint, layer.files, module
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
