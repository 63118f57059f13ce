"""Finds the attention layers of a checkpoint by names and shapes, and checks all but numbers.

The layers of a stack of blocks are served together or not at all, because a later block may need
what the first one has. A described layer was compared with the real module, so that it needs no
other. Another stack of the same checkpoint may be served without them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.input_norm import NORM_BIAS, NORM_WEIGHT
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_reader import read_layer
from qkv.attention.layers.layer_weights import Array, hollow
from qkv.attention.layers.layout_catalogue import FoundLayer, Shapes
from qkv.attention.layers.unread_tensors import find_beside, find_unread
from qkv.errors import InvalidContent, QkvError
from qkv.jobs.loaded.layer_settings import LayerSettings, MissingLines, ModelFiles
from qkv.jobs.loaded.model_parts import stack_of
from qkv.tensors import DTYPES, FLOATING
from qkv.wire.checkpoint.checkpoint import Checkpoint

_NORMS: Final = ("input_layernorm", "ln_1", "layernorm_before", "layer_norm1", "ln_attn")
"""Modules that are in front of the attention in every model that has one of that name."""
_MAX_LAYERS: Final = 4096
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{0,256}")  # in paths, and in labels of metrics
_OTHER_KINDS: Final = {  # names of modules of attention that no layout reads
    "kv_a_proj|kv_b_proj|kv_down": "latent attention",
    "relative_attention_bias|rel_pos|relative_position": "relative positions",
    "Wqkv": "fused in an order that no layout has",
}


class LayerPart(NamedTuple):
    """A layer of a checkpoint that is not read yet.

    Attributes:
        name: in the checkpoint.
        settings: what is known of it.
        layer: the same layer without numbers.
        norm: the tensors of the norm in front of it, by the name of the weight; none: there is no
            such norm.
    """

    name: str
    settings: LayerSettings
    layer: Layer
    norm: Mapping[str, str]


@dataclass
class _Stack:
    """The layers of the blocks below one path."""

    parts: list[LayerPart] = field(default_factory=list)
    missing: MissingLines | None = None
    problem: str | None = None

    def reason(self, path: str) -> str | None:
        """Returns the reason why the layers are not served; None: they are."""
        if self.problem is None and self.missing is not None:
            return f"{path}: {self.missing.text(path)}".removeprefix(": ")
        return self.problem


def find_parts(
    checkpoint: Checkpoint, files: ModelFiles
) -> tuple[Sequence[LayerPart], Mapping[str, str]]:
    """Returns the layers, and the reasons why others are not served by the path of their stack.

    Raises:
        InvalidContent: no layer can be served, or a line of the operator's file belongs to none.
    """
    finder = _Finder(checkpoint, files)
    stacks = finder.stacks()
    files.check_all_used()
    reasons = {path: stack.reason(path) for path, stack in stacks.items()}
    unserved = {path: reason for path, reason in reasons.items() if reason is not None}
    served = [
        part
        for path, stack in stacks.items()
        for part in stack.parts
        if path not in unserved or part.settings.mark is not None
    ]
    if not served:
        raise InvalidContent(" | ".join(unserved.values()))
    return served, unserved


class _Finder:
    """Finds the layers of one checkpoint.

    Args:
        checkpoint: whose headers were read.
        files: beside it.
    """

    def __init__(self, checkpoint: Checkpoint, files: ModelFiles) -> None:
        self._checkpoint, self._files = checkpoint, files
        self._shapes = {n: checkpoint.shape(n) for n in checkpoint.names}

    def stacks(self) -> dict[str, _Stack]:
        """Returns the stacks of blocks by path.

        Raises:
            InvalidContent: there is no layer, there are too many, or one has a wrong name.
        """
        found_layers = layout_catalogue.find_layers(self._shapes)
        if not found_layers or len(found_layers) > _MAX_LAYERS:
            raise InvalidContent(
                f"{self._checkpoint.path} has {len(found_layers)} attention layers: got "
                f"{_describe(self._shapes)}, expected 1 to {_MAX_LAYERS} layers in the layouts "
                f"{', '.join(layout_catalogue.known())}"
            )
        places = places_of(found.prefix for found in found_layers)
        below = _below([found.prefix for found in found_layers], self._shapes)
        stacks: dict[str, _Stack] = {}
        for found in found_layers:
            path, place = found.prefix.rstrip("."), places[found.prefix]
            if not _NAME.fullmatch(place):
                raise InvalidContent(
                    f"a layer has a wrong name: got {place!r:.300}, expected at most 256 letters, "
                    "digits and ._-"
                )
            stack = stacks.setdefault(stack_of(path), _Stack())
            try:
                stack.parts.append(self._part(found, place, below[found.prefix]))
            except MissingLines as error:
                stack.missing = error if stack.missing is None else stack.missing | error
            except QkvError as error:
                stack.problem = stack.problem or f"{path}: {error.detail}"
        self._check_beside(stacks, below)
        return stacks

    def _check_beside(self, stacks: Mapping[str, _Stack], below: Mapping[str, Shapes]) -> None:
        """Sets the problem of stacks beside which lies what their attention may read."""
        inside = {prefix + name for prefix, names in below.items() for name in names}
        around = {path: f"{path.rpartition('.')[0]}.".lstrip(".") for path in stacks}
        for name in find_beside(name for name in self._shapes if name not in inside):
            nearest = max((a for a in around.values() if name.startswith(a)), default=None, key=len)
            for path, stack in stacks.items():
                if around[path] == nearest and stack.problem is None:
                    stack.problem = f"{path}: {_unread(name)}"

    def _part(self, found: FoundLayer, place: str, below: Shapes) -> LayerPart:
        """Returns a layer.

        Args:
            found: the layer.
            place: its name.
            below: the shapes of all tensors of its module, by name without the prefix.

        Raises:
            MissingLines: something is not known.
            InvalidContent: something is wrong.
        """
        for name in found.shapes:
            self._check_dtype(found.prefix + name)
        layouts = {name: layout_catalogue.known()[name] for name in found.layouts}
        unread = {name: find_unread(layout, below) for name, layout in layouts.items()}
        fitting = {name: layout for name, layout in layouts.items() if not unread[name]}
        missing: MissingLines | None = None
        try:
            settings = self._files.settings_of(
                place, found.prefix.rstrip("."), fitting or layouts, found.shapes
            )
        except MissingLines as error:
            missing = error
        if not fitting:
            raise InvalidContent(_unread(found.prefix + next(iter(unread.values()))[0]))
        if missing is not None:
            raise missing
        layer = self._without_numbers(found.prefix, settings, below)
        norm = self._norm(_block(found.prefix), settings)
        weights = {**layer.weights}
        for weight, name in norm.items():
            weights[weight] = self._hollow_norm(name, len(layer.weights["query.weight"]))
        return LayerPart(place, settings, replace(layer, weights=weights), norm)

    def _without_numbers(self, prefix: str, settings: LayerSettings, below: Shapes) -> Layer:
        """Returns a layer that holds no memory: its names and shapes are checked.

        The numbers are ones: a matrix of zeros counts as one that was never loaded.
        """
        layout = layout_catalogue.known()[settings.options.layout]
        if unread := find_unread(layout, below):
            raise InvalidContent(_unread(prefix + unread[0]))
        tensors = {}
        for name, shape in layout.select(below).items():
            dtype = DTYPES[self._checkpoint.dtype(prefix + name)]
            tensors[prefix + name] = np.broadcast_to(np.ones((), dtype), shape)
        options = settings.options.model_copy(update={"prefix": prefix})
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

    def _norm(self, block: str, settings: LayerSettings) -> dict[str, str]:
        """Returns the tensors of the norm in front of the attention; none: it is not known."""
        if settings.norm is None:
            return {}
        names = _NORMS if settings.norm_module is None else (settings.norm_module,)
        paths = [f"{block}.{name}".lstrip(".") for name in names]
        norm = next((path for path in paths if f"{path}.weight" in self._shapes), None)
        if norm is None and settings.norm_module is not None:
            raise InvalidContent(
                f"input_norm.module is wrong: got no tensor {paths[0]:.300}.weight, expected the "
                "name of a module in the block"
            )
        tensors = {NORM_WEIGHT: f"{norm}.weight", NORM_BIAS: f"{norm}.bias"}
        return {weight: name for weight, name in tensors.items() if name in self._shapes}

    def _hollow_norm(self, name: str, width: int) -> Array:
        """Returns a weight of a norm without numbers, whose dtype may differ from the layer's.

        Raises:
            InvalidContent: it does not fit embeddings of this width.
        """
        self._check_dtype(name)
        if (shape := self._shapes[name]) != (width,):
            raise InvalidContent(
                f"{name:.300} has the wrong shape: got {list(shape)}, expected {[width]}"
            )
        return hollow(DTYPES[self._checkpoint.dtype(name)], shape)


def _unread(name: str) -> str:
    return (
        f"{name:.300} is not supported: no layout reads it, and it may change the output of the "
        "attention"
    )


def _describe(shapes: Shapes) -> str:
    """Returns the tensors of the first module of attention, or the first tensors."""
    matches = (re.match(r".*att(?!.*norm)[^.]*\.", name, re.IGNORECASE) for name in shapes)
    match = next(filter(None, matches), None)
    names = list(shapes)[:4]
    if match is not None:
        names = [name for name in shapes if name.startswith(match[0])][:8]
    listed = ", ".join(f"{name!r:.300}" for name in names) or "no tensor"
    kinds = [k for pattern, k in _OTHER_KINDS.items() if re.search(pattern, listed)]
    return f"{listed} ({', '.join(kinds)})" if kinds else listed


def places_of(prefixes: Iterable[str]) -> dict[str, str]:
    """Returns the name of each layer: the path of its block, or its own if a block has several."""
    known = list(prefixes)
    blocks = Counter(map(_block, known))
    return {
        prefix: _block(prefix) if blocks[_block(prefix)] == 1 else prefix.rstrip(".")
        for prefix in known
    }


def _block(prefix: str) -> str:
    """Returns the path of a block: the prefix of its attention up to the last number."""
    parts = prefix.rstrip(".").split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[-1] + 1] if numbers else parts)


def _below(prefixes: Sequence[str], shapes: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the shapes of the names that begin with each prefix, and with no longer one."""
    below: dict[str, dict[str, tuple[int, ...]]] = {prefix: {} for prefix in prefixes}
    for name, shape in shapes.items():
        prefix = name
        while prefix and prefix not in below:
            prefix = prefix[: prefix.rfind(".", 0, -1) + 1]
        if prefix in below:
            below[prefix][name.removeprefix(prefix)] = shape
    return below
