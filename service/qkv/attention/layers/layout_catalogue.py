"""The layouts by name: the files of `layouts/`, with defaults for the parts that they leave out.

`find` and `recognize` are the entry points; `find_layers` finds the layers of a whole model.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar

from torch import Tensor

from qkv.attention.layers import layouts
from qkv.attention.layers.forward_parts import Attend, Embeddings, Inputs, linear_of
from qkv.attention.layers.layer_weights import BIASES, OUTPUT, Weights, linear_tensors, named
from qkv.attention.layers.sent_tensors import Heads, SentTensors, Spellings
from qkv.errors import InvalidContent, format_value

AUTO = "auto"
"""The name that stands for the layout that the names and shapes show."""

RotaryOrder = Literal["half", "interleaved"]
Shapes = Mapping[str, tuple[int, ...]]
_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Layout:
    """A weight layout: a file of `layouts/`.

    Attributes:
        name: of the file.
        modules: names of the modules that it reads. Their other tensors are errors.
        query_names: names of the tensor with the query's weights; one is in every layer.
        spellings: other names of its modules.
        holds: what it has a place for, beside the three matrices.
        is_grouped: True if there may be fewer key heads than query heads.
        rotary_order: order of the channels that a rotary embedding turns together; None: the
            layout has no rule.
        alibi: True if the layout's models may add ALiBi's biases to the scores; "scaled" if they
            add them before the scores are scaled.
        needs_heads: True if it keeps the tensors of a head together, so that other numbers of heads
            would be other weights.
        parent: the name of the module that contains the layer in the layout's models, where it
            tells the layout from others. It belongs to the first of `query_names`.
        behind: the module that takes the output, by the name of the output projection: a norm of
            the block, which cannot change the layer.
    """

    name: str
    module: ModuleType
    modules: tuple[str, ...]
    query_names: tuple[str, ...]
    spellings: Spellings
    holds: frozenset[str]
    is_grouped: bool
    rotary_order: RotaryOrder | None
    alibi: bool | Literal["scaled"]
    needs_heads: bool
    parent: str | None
    behind: Mapping[str, str]

    @classmethod
    def from_module(cls, name: str, module: ModuleType) -> Layout:
        """Returns the layout of an imported file."""
        return cls(
            name,
            module,
            module.MODULES,
            module.QUERY,
            getattr(module, "SPELLINGS", {}),
            getattr(module, "HOLDS", BIASES | OUTPUT),
            getattr(module, "IS_GROUPED", True),
            getattr(module, "ROTARY_ORDER", None),
            getattr(module, "ALIBI", False),
            getattr(module, "NEEDS_HEADS", False),
            getattr(module, "PARENT", None),
            getattr(module, "BEHIND", {}),
        )

    @property
    def summary(self) -> str:
        """The first sentence of the file."""
        return (self.module.__doc__ or "").strip().splitlines()[0]

    def select(self, tensors: Mapping[str, _T], prefix: str = "") -> dict[str, _T]:
        """Returns those of the tensors, or shapes, whose names the layout may read."""
        stems = _modules(self)
        names = {f"{prefix}{stem}{kind}" for stem in stems for kind in ("", ".weight", ".bias")}
        return {name: tensor for name, tensor in tensors.items() if name in names}

    def read(self, sent: SentTensors) -> Weights:
        """Reads the layout's tensors.

        Raises:
            InvalidContent: a tensor is missing or does not fit.
        """
        if hasattr(self.module, "read"):
            weights: Weights = self.module.read(sent)
            return weights
        query, key, value = self.modules[:3]
        return named(
            query=sent.pair(query),
            key=sent.pair(key),
            value=sent.pair(value),
            output=sent.optional_pair(self.module.OUTPUT),
        )

    def write(self, weights: Weights, heads: Heads) -> Weights:
        """Returns the layout's tensors.

        Raises:
            InvalidContent: the layout cannot hold the weights.
        """
        if hasattr(self.module, "write"):
            tensors: Weights = self.module.write(weights, heads)
            return tensors
        query, key, value = self.modules[:3]
        return linear_tensors(weights, query=query, key=key, value=value, output=self.module.OUTPUT)

    def forward(
        self, tensors: Mapping[str, Tensor], embeddings: Embeddings, heads: Heads, attend: Attend
    ) -> Tensor:
        """Runs the block from the layout's tensors as its source does, for checks."""
        module = self.module
        inputs: Inputs = module.project(tensors, embeddings, heads)
        extras: dict[str, Any] = {
            name: tensors.get(own) for name, own in getattr(module, "EXTRAS", {}).items()
        }
        attended = attend(*inputs, **extras)
        if hasattr(module, "project_output"):
            output: Tensor = module.project_output(attended, tensors)
            return output
        has_output = f"{module.OUTPUT}.weight" in tensors
        return linear_of(tensors, module.OUTPUT, attended) if has_output else attended

    def recognizes(self, shapes: Shapes, parent: str = "") -> bool:
        """Returns True if tensors of these shapes may be a layer in this layout.

        Args:
            shapes: by name, without the prefix of the layer.
            parent: the last part of that prefix; "" if it is unknown.
        """
        query = next((name for name in self.query_names if name in shapes), None)
        if query is None or len(shapes[query]) != 2:
            return False
        is_first = query == self.query_names[0]
        if self.parent is not None and is_first and parent and parent != self.parent:
            return False
        hook = getattr(self.module, "recognizes", None)
        return hook is None or bool(hook(shapes))


class FoundLayer(NamedTuple):
    """A layer in the tensors of a model.

    Attributes:
        prefix: of the names of its tensors, with the last dot.
        layouts: the names of the layouts that fit its names and shapes.
        shapes: of its tensors, by name without the prefix.
    """

    prefix: str
    layouts: Sequence[str]
    shapes: Shapes


@cache
def known() -> Mapping[str, Layout]:
    """Returns every layout by name: the files in `layouts/`."""
    names = [m.name for m in pkgutil.iter_modules(layouts.__path__) if m.name[0] != "_"]
    modules = {name: importlib.import_module(f"{layouts.__name__}.{name}") for name in names}
    return {name: Layout.from_module(name, module) for name, module in sorted(modules.items())}


def find(name: object, pointer: str) -> Layout:
    """Returns the layout of that name.

    Raises:
        InvalidContent: the layout does not exist.
    """
    if isinstance(name, str) and name in known():
        return known()[name]
    raise InvalidContent(
        f"layout is unknown: got {format_value(name)}, expected {', '.join(known())} or {AUTO}",
        pointer=pointer,
    )


def recognize(shapes: Shapes, prefix: str, pointer: str) -> Layout:
    """Returns the layout that names and shapes show.

    Args:
        shapes: of all tensors of the request, by name.
        prefix: of the layer's names, with its last dot.
        pointer: JSON pointer to the field that is "auto".

    Raises:
        InvalidContent: no layout fits, or several do.
    """
    fitting = candidates(shapes, prefix)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise InvalidContent(
            f"layout is ambiguous: names and shapes fit {', '.join(c.name for c in fitting)}; "
            "name one of them",
            pointer=pointer,
        )
    names = [name for name in shapes if name.startswith(prefix)]
    listed = ", ".join(map(repr, names[:6])) or "no tensor"
    raise InvalidContent(
        f"layout is not recognized: got {listed}{', ...' if len(names) > 6 else ''}, expected the "
        f"names and shapes of {', '.join(known())}",
        pointer=pointer,
    )


def find_layers(shapes: Shapes, only: Layout | None = None) -> list[FoundLayer]:
    """Returns the attention layers in the tensors of a model, in their order.

    Args:
        shapes: of all tensors, by name.
        only: the layout of the layers, whatever the modules around them are called; None: any.
    """
    queries = {q: layout for layout in known().values() for q in layout.query_names}
    below: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in filter(lambda n: n.endswith(tuple(queries)), shapes):
        # of "attention.query.weight" and "query.weight", the one with more modules beside it
        fits = {
            (_count(shapes, name.removesuffix(query), layout), len(query), query)
            for query, layout in queries.items()
            if _ends(name, query)
        }
        if fits:
            below.setdefault(name.removesuffix(max(fits)[2]), {})
    for name, shape in shapes.items():
        # one pass over the names, and each is in one layer: there may be thousands of both
        ends = [end for m in _module_starts().finditer(name) if name[: (end := m.start())] in below]
        if ends:
            below[name[: ends[-1]]][name[ends[-1] :]] = shape
    layers = []
    for prefix, layer_shapes in below.items():
        if only is None:
            fitting = _fitting(layer_shapes, prefix)
        else:
            fitting = _fitting(layer_shapes, "", only)
        if fitting:
            modules = {m for layout in fitting for m in _modules(layout)}
            beginnings = tuple(f"{module}." for module in modules)
            parts = {
                name: shape
                for name, shape in layer_shapes.items()
                if name in modules or name.startswith(beginnings)
            }
            layers.append(FoundLayer(prefix, [layout.name for layout in fitting], parts))
    return layers


def candidates(shapes: Shapes, prefix: str) -> list[Layout]:
    """Returns the layouts that names and shapes of the tensors under a prefix fit."""
    return _fitting(_below(shapes, prefix), prefix)


def _fitting(shapes: Shapes, prefix: str, *only: Layout) -> list[Layout]:
    """Returns the layouts that tensors fit, whose names have no prefix any more."""
    parent = prefix.rstrip(".").rpartition(".")[2]
    shapes = {n: s for n, s in shapes.items() if 0 not in s}  # empty tensors are no weights
    return [layout for layout in only or known().values() if layout.recognizes(shapes, parent)]


def _below(shapes: Shapes, prefix: str) -> Shapes:
    return {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}


def _modules(layout: Layout) -> tuple[str, ...]:
    return (*layout.modules, *(s for others in layout.spellings.values() for s in others))


def _count(shapes: Shapes, prefix: str, layout: Layout) -> int:
    """Returns the number of a layout's modules below a prefix."""
    return sum(f"{prefix}{module}.weight" in shapes for module in _modules(layout))


@cache
def _module_starts() -> re.Pattern[str]:
    """Returns the pattern of the places in a name where the name of a module may begin."""
    modules = {re.escape(m) for layout in known().values() for m in _modules(layout)}
    return re.compile(rf"(?<![^.])(?={'|'.join(sorted(modules))})")


def _ends(name: str, query: str) -> bool:
    return name == query or name.endswith(f".{query}")
