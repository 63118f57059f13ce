"""Compares the layers of a served model with the modules of the real one."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from census.real_model import BATCH, Call, record, tensors_in
from census.served_model import ServedModel
from census.small_configs import LENGTH
from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.layer import Layer
from qkv.errors import QkvError

TOLERANCE: Final = 1e-3
"""The largest error of a right layer, relative to the largest number of its module."""
_CROSS: Final = (
    "key_value_states", "encoder_hidden_states", "encoder_outputs", "key", "key_states", "cross_x",
)  # fmt: skip
_LENGTHS: Final = (LENGTH, 5, 17)  # of tokens, and of the patches of small images
_ROLES: Final = ("query", "key", "value")


class Verdict(NamedTuple):
    """Result of the comparison of a layer.

    Attributes:
        layer: its name.
        kind: "right", "wrong", or "not run".
        error: relative; None: it is not known.
        detail: of a layer that is not right.
    """

    layer: str
    kind: str
    error: float | None = None
    detail: str = ""


class Place(NamedTuple):
    """The place of a layer in the model.

    Attributes:
        attention: the path of its module.
        roles: the paths of the modules of query, key, value.
        output: the path of the output projection; None: there is none.
        block: the path of its block.
    """

    attention: str
    roles: tuple[str, ...]
    output: str | None
    block: str

    @property
    def paths(self) -> set[str]:
        """The paths of all modules that a comparison needs."""
        return {path for path in (self.attention, *self.roles, self.output, self.block) if path}


class TensorNames:
    """The names in a model of the tensors of its file, found by their numbers.

    Args:
        model: that was saved.
        folder: where.
    """

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        names = {_digest(t): name for name, t in reversed(model.state_dict().items())}
        self.of_file: dict[str, str] = {}
        self.tensors: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    tensor = file.get_tensor(name)
                    self.tensors[name] = tensor
                    if (found := names.get(_digest(tensor))) is not None:
                        self.of_file[name] = found

    def place(self, sent: Iterable[str], output: Any) -> Place | None:
        """Returns the place of a layer in the model; None: it is not found.

        Args:
            sent: the names of its tensors in the file.
            output: the weight of its output projection; None: there is none.
        """
        matrices = [n for n in sent if n in self.of_file and self.tensors[n].dim() == 2]
        if not matrices:
            return None
        out = next((n for n in matrices if _is_same(self.tensors[n], output)), None)
        modules = {n: self.of_file[n].rpartition(".")[0] for n in matrices}
        # a matrix is the weight of a module below the attention, or a parameter of its own
        holders = [
            module.rpartition(".")[0] if self.of_file[name].endswith(".weight") else module
            for name, module in modules.items()
        ]
        attention = _parent(holders)
        block = re.match(r"(.*\.[0-9]+)(\.|$)", attention)
        return Place(
            attention,
            tuple(module for name, module in modules.items() if name != out),
            None if out is None else modules[out],
            block[1] if block else attention,
        )


def _digest(tensor: Tensor) -> bytes:
    numbers = tensor.detach().cpu().contiguous()
    return hashlib.sha1(repr(numbers.shape).encode() + numbers.numpy().tobytes()).digest()


def places_of(names: TensorNames, layers: Mapping[str, Layer]) -> dict[str, Place]:
    """Returns the place of each layer by its name; those that are not found are left out."""
    places = {}
    for name, layer in layers.items():
        place = names.place(layer.names.values(), layer.weights.get("output.weight"))
        if place is not None:
            places[name] = place
    return places


def places_of_found(names: TensorNames) -> dict[str, Place]:
    """Returns the place of each layer that the names in the file show, by its path there."""
    shapes = {name: tuple(tensor.shape) for name, tensor in names.tensors.items()}
    places = {}
    for found in layout_catalogue.find_layers(shapes):
        place = names.place([found.prefix + name for name in found.shapes], None)
        if place is not None:
            places[found.prefix.rstrip(".")] = place
    return places


def _parent(paths: Sequence[str]) -> str:
    """Returns the longest path that all of these begin with."""
    every = [path.split(".") for path in paths]
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*every, strict=False))
    return ".".join(parts[0] for parts in same)


def _is_same(tensor: Tensor, weight: Any) -> bool:
    if weight is None:
        return False
    found = torch.from_numpy(weight.copy())
    return any(t.shape == found.shape and bool((t == found).all()) for t in (tensor, tensor.T))


def record_places(model: PreTrainedModel, places: Mapping[str, Place]) -> dict[str, Call]:
    """Returns the first calls of the modules of these places, by path."""
    known = {path for path, _ in model.named_modules()}
    paths = set[str]().union(*(place.paths for place in places.values()))
    needed = {place.attention for place in places.values()}
    return record(model, paths & known, needed & known)


def compare(model: PreTrainedModel, served: ServedModel, names: TensorNames) -> Iterator[Verdict]:
    """Yields the verdict on each layer that is served."""
    layers = {name: served.layers[name] for name in served.layers.names}
    places = places_of(names, layers)
    calls = record_places(model, places)
    for name, layer in layers.items():
        if name not in places:
            yield Verdict(name, "not run", detail="its module is not found")
            continue
        comparison = _Comparison(model, served, name, places[name], calls)
        yield comparison.verdict()
        if layer.loaded is not None and layer.loaded.norm is not None:
            yield from comparison.with_norm()


class _Comparison:
    """The comparison of one layer."""

    def __init__(
        self,
        model: PreTrainedModel,
        served: ServedModel,
        name: str,
        place: Place,
        calls: Mapping[str, Call],
    ) -> None:
        self._served, self._name, self._place, self._calls = served, name, place, calls
        self._model = model
        call = calls.get(place.attention)
        self._call = call if call is not None and call.output is not None else None

    def verdict(self) -> Verdict:
        """Returns the verdict on the layer with the inputs of its module."""
        if self._call is None:
            return Verdict(self._name, "not run", detail="its module was not called")
        best = self._judge(self._inputs(), self._expected())
        if best.kind == "wrong" and (inputs := self._inputs_of_roles()) is not None:
            other = self._judge(inputs, self._expected())
            best = other if other.kind == "right" else best
        if best.kind == "wrong" and (whole := self._without_mask()) is not None:
            other = self._judge(self._inputs(), whole)
            best = other if other.kind == "right" else best
        return best

    def _without_mask(self) -> list[Tensor] | None:
        """Returns the output without a mask that a request would send; None: there is none.

        Such a mask hides other keys than the later ones.
        """
        assert self._call is not None
        arguments = self._call.arguments
        mask = arguments.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() < 3 or mask.shape[-1] < 2:
            return None
        if is_hidden(mask)[..., 0, 1:].all():
            return None
        with contextlib.suppress(Exception), torch.no_grad():
            module = self._model.get_submodule(self._place.attention)
            return [next(tensors_in(module(**{**arguments, "attention_mask": None})))]
        return None

    def with_norm(self) -> Iterator[Verdict]:
        """Yields a verdict on the layer with what enters its block, unless that is right."""
        block = self._calls.get(self._place.block)
        if self._call is None or block is None or block.x is None:
            return
        found = self._judge({"x": with_three_axes(block.x)}, self._expected(), input="residual")
        if found.kind != "right":
            yield found._replace(layer=f"{self._name} (residual)")

    def _judge(
        self, inputs: Mapping[str, Tensor], expected: list[Tensor], **fields: Any
    ) -> Verdict:
        try:
            found = self._served.output(self._name, inputs, **fields)
        except QkvError as error:
            return Verdict(self._name, "wrong", detail=f"the request is refused: {error.detail}")
        errors = [e for each in expected if (e := _error(found, each)) is not None]
        if not errors:
            shapes = ", ".join(str(list(each.shape)) for each in expected)
            detail = f"got shape {list(found.shape)}, expected {shapes}"
            return Verdict(self._name, "wrong", detail=detail)
        least = min(errors)
        if math.isnan(least):
            return Verdict(self._name, "not run", detail="the model's numbers are not finite")
        return Verdict(self._name, "right" if least < TOLERANCE else "wrong", least)

    def _inputs(self) -> dict[str, Tensor]:
        assert self._call is not None
        x = self._call.x
        assert x is not None
        arguments = self._call.arguments
        other = keys_of(self._call)
        if other is None:
            return {"x": with_three_axes(x)}
        value = arguments.get("value", arguments.get("value_states", other))
        value = value if isinstance(value, Tensor) else other
        key = with_three_axes(other)
        query = with_three_axes(x)
        if len(query) == 1:  # learned queries are the same for all items
            query = query.expand(len(key), -1, -1)
        return {"query": query, "key": key, "value": with_three_axes(value)}

    def _inputs_of_roles(self) -> dict[str, Tensor] | None:
        """Returns what the three projections receive, if they are three and it differs."""
        calls = [self._calls.get(path) for path in self._place.roles]
        xs = [call.x for call in calls if call is not None and call.x is not None]
        if len(xs) != len(_ROLES) or all(x.equal(xs[0]) for x in xs[1:]):
            return None
        return {role: with_three_axes(x) for role, x in zip(_ROLES, xs, strict=True)}

    def _expected(self) -> list[Tensor]:
        """Returns the output of the attention: that of its module, without a norm behind it."""
        assert self._call is not None
        whole = self._call.output
        assert whole is not None
        projected = self._calls.get(self._place.output or "")
        if projected is None or projected.output is None:
            return [whole]
        inner = projected.output
        return [inner] if self._is_only_normed(inner, whole) else [whole]

    def _is_only_normed(self, inner: Tensor, whole: Tensor) -> bool:
        """Returns True if the module only adds its input, and norms the sum if at all."""
        assert self._call is not None
        module = self._model.get_submodule(self._place.attention)
        norms = [part for part in module.modules() if "Norm" in type(part).__name__]
        inputs = [t for t in self._call.arguments.values() if isinstance(t, Tensor)]
        with torch.no_grad():
            for x in (x for x in inputs if x.shape[1:] == inner.shape[1:] == whole.shape[1:]):
                for norm in (lambda after: after, *norms):
                    with contextlib.suppress(RuntimeError, TypeError):  # a norm of other inputs
                        if torch.allclose(norm(x + inner), whole, atol=1e-4):
                            return True
        return False


def keys_of(call: Call) -> Tensor | None:
    """Returns what the keys of a module are made of; None: its queries' embeddings."""
    found = (t for n in _CROSS if isinstance(t := call.arguments.get(n), Tensor))
    other = next(found, None)
    return None if other is None or call.x is None or other.equal(call.x) else other


def is_hidden(mask: Tensor) -> Tensor:
    """Returns True for the keys that a mask hides."""
    return ~mask if mask.dtype == torch.bool else mask < -1


def with_three_axes(x: Tensor) -> Tensor:
    """Returns embeddings with the axes (B, L, M). Some modules have (L, B, M)."""
    if x.dim() == 2:
        return x[None]
    if x.dim() == 3 and x.shape[1] == BATCH and x.shape[0] in _LENGTHS:
        return x.transpose(0, 1)
    return x.flatten(1, -2) if x.dim() > 3 else x


def _error(found: Tensor, expected: Tensor) -> float | None:
    """Returns the largest error, relative to the largest number; None: the shapes differ."""
    expected = with_three_axes(expected.float())
    if found.shape != expected.shape:
        return None
    return float((found - expected).abs().max() / expected.abs().max())
