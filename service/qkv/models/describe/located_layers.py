"""Finds the modules of a model of transformers that have the layers of its files."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn
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

_PARTS: Final = {  # of an attention, by words in the names of tensors
    "gate|g_proj": "a gate",
    "conv": "a convolution",
    "relative|rel_|bias_table|distance|bias_[uv]": "relative positions",
    "kv_[ab]_|latent": "latent attention",
    "temp|scale|lambda": "a temperature",
    "norm|_ln": "a norm",
}


@dataclass
class LocatedLayer:
    """A layer of the files, and its module in the model.

    Attributes:
        found: the layer; in no layout, if no known one reads it.
        place: its name in requests.
        path: of its module.
        names: of the layer's tensors inside the module, by their names in the files.
        files: the names in the files of all tensors of the model, by their names there.
    """

    found: FoundLayer
    place: str
    path: str
    names: Mapping[str, str]
    files: Mapping[str, str]

    @property
    def projections(self) -> set[str]:
        """The names of the modules inside it that have matrices of the layer."""
        holders = {name.rpartition(".")[0] for name in self.names.values()} - {""}
        return {name for name in holders if "norm" not in name}

    def tensors(self, module: nn.Module) -> dict[str, Array]:
        """Returns the tensors of the layer as the module has them now, by their whole names."""
        # a layer looks for its names by memory, so that rows that overlap are copied
        return {
            name: module.get_parameter(inside).detach().contiguous().numpy()
            for name, inside in self.names.items()
        }

    @contextlib.contextmanager
    def own_numbers(self, module: nn.Module, checkpoint: Checkpoint) -> Iterator[None]:
        """Gives a module the numbers of the files inside the block, in float64.

        Raises:
            Unfit: the files do not have all of them.
        """
        drawn = {}
        try:
            for name, parameter in module.named_parameters():
                if f"{self.path}.{name}" not in self.files:
                    raise Unfit(f"{name}, which the files do not have")
                numbers = checkpoint.read(self.files[f"{self.path}.{name}"]).numpy()
                drawn[parameter] = parameter.data
                parameter.data = torch.from_numpy(numbers.astype(np.float64))
            yield
        finally:
            for parameter, data in drawn.items():
                parameter.data = data


def locate(
    model: PreTrainedModel, checkpoint: Checkpoint
) -> tuple[list[LocatedLayer], dict[str, str]]:
    """Returns the layers of the files whose modules are in a model.

    Returns:
        The layers, and what is missing for the others, by name.

    Raises:
        InvalidContent: neither the files nor the model have attention.
    """
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names}
    found_layers = layout_catalogue.find_layers(shapes)
    places = places_of(found.prefix for found in found_layers)
    in_model = _renamed(model, checkpoint)
    files = {new: name for name, new in in_model.items()}
    known = dict(model.named_parameters(remove_duplicate=False))
    layers: dict[str, LocatedLayer] = {}
    missing = {}
    for found in found_layers:
        names = {found.prefix + name: shape for name, shape in found.shapes.items()}
        inside = {name: in_model.get(name, "") for name in names}
        path, place = _parent(list(inside.values())), places[found.prefix]
        if any(new not in known or known[new].shape != names[n] for n, new in inside.items()):
            missing[place] = f"tensors of other names in transformers ({not_compared(found)})"
        elif path in layers:
            missing[place] = f"the module of {layers[path].place} ({not_compared(found)})"
        else:
            relative = {name: new.removeprefix(f"{path}.") for name, new in inside.items()}
            layers[path] = LocatedLayer(found, place, path, relative, files)
    layers |= {layer.path: layer for layer in _in_no_layout(model, layers, files)}
    if not layers and not missing:
        raise InvalidContent(f"{checkpoint.path} has no attention layer")
    return list(layers.values()), missing


def not_compared(found: FoundLayer) -> str:
    """Returns the nearest description of a layer whose module does not run."""
    layouts = " or ".join(found.layouts)
    return f"the nearest is the layout {layouts}, not compared" if layouts else "none is near"


def _in_no_layout(
    model: nn.Module, paths: Collection[str], files: Mapping[str, str]
) -> Iterator[LocatedLayer]:
    """Yields the modules of attention whose tensors no layout reads."""
    known = [f"{path}." for path in paths]
    for path, module in model.named_modules():
        is_known = any(f"{path}.".startswith(each) or each.startswith(f"{path}.") for each in known)
        if is_known or "attention" not in type(module).__name__.lower():
            continue
        if len(list(module.parameters())) > 1:
            known.append(f"{path}.")  # its parts are not named again
            yield LocatedLayer(FoundLayer(f"{path}.", [], {}), path, path, {}, files)


def unread_part(names: Sequence[str]) -> str:
    """Returns the part of an attention that tensors belong to which no layout reads."""
    for words, part in _PARTS.items():
        for name in names:
            if re.search(words, name):
                return f"{part} that no layout reads, {name}"
    return f"a tensor that no layout reads, {names[0]}"


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
