"""The tensors of a request, held against the signature of a variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import pydantic

from qkv.attention.catalogue import Input, Output, Variant
from qkv.attention.layers import layouts
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.projections import ROLES
from qkv.errors import InvalidContent, NotFound, pointer_to
from qkv.jobs.axis_sizes import Bound, bind, dropped_letters
from qkv.jobs.fields import Fields, InlineLayer, invalid_field
from qkv.tensors import FLOATING, RawTensor
from qkv.wire.casting import typed
from qkv.wire.message import Message

__all__ = ["Inputs"]


class Inputs(NamedTuple):
    """Tensors that fit a variant.

    Attributes:
        tensors: the variant's inputs, or the embeddings of its layer; shapes as they came.
        layer: what projects them, or None.
        dtype: that all of them share.
        shapes: of each of them with every axis: the signature's, or (B, length, M).
        bound: the sizes of the variant's letters.
    """

    tensors: Mapping[str, RawTensor]
    layer: Layer | None
    dtype: str
    shapes: Mapping[str, tuple[int, ...]]
    bound: Bound

    @classmethod
    def of(
        cls, variant: Variant, parameters: pydantic.BaseModel, fields: Fields, message: Message
    ) -> Inputs:
        """Checks a message's tensors.

        Raises:
            NotFound: no such layer.
            InvalidContent: a tensor, dtype, shape or value is wrong.
            TooLarge: what the variant makes of its own would be.
        """
        layer = _layer(fields, message)
        tensors = _tensors(variant, fields, message, layer)
        dtype = _one_dtype(variant, tensors, layer)
        shapes, bound = _shapes(variant, tensors, layer)
        bound.sizes.update(variant.complete(bound.sizes, parameters))
        _check_key_lengths(tensors, bound)
        return cls(tensors, layer, dtype, shapes, bound)

    @property
    def nbytes(self) -> int:
        """Bytes of all that came."""
        total = sum(t.nbytes for t in self.tensors.values())
        if self.layer is not None:
            total += sum(t.nbytes for t in self.layer.tensors.values())
        return total

    def answer_shape(self, output: Output) -> tuple[int, ...]:
        """The shape an output goes back in; a layer's heads lie side by side in its output."""
        if output.name == "output" and self.layer is not None and self.layer.heads is not None:
            shape = self.merged_shape(output)
            return shape[1:] if "B" in self.bound.dropped else shape
        return self.bound.answer_shape(output)

    def merged_shape(self, output: Output) -> tuple[int, ...]:
        """The shape of an output (B, H, L, E) whose heads lie side by side: (B, L, H * E)."""
        batch, heads, rows, width = (self.bound.sizes[letter] for letter in output.letters)
        return batch, rows, heads * width

    def embedding_shape(self, role: str) -> tuple[int, ...]:
        """The shape (B, length, M) of what a layer projects to a role."""
        return self.shapes["x" if "x" in self.shapes else role]


def _layer(fields: Fields, message: Message) -> Layer | None:
    if fields.layer is None:
        return None
    if isinstance(fields.layer, str):
        raise NotFound(f"no saved layer {fields.layer!r:.60}", pointer="/layer")
    try:
        inline = InlineLayer.model_validate(fields.layer)
    except pydantic.ValidationError as error:
        known = [*InlineLayer.model_fields, "tensors"]
        raise invalid_field(error, known, "layer") from None
    layout = layouts.find(inline.layout, "/layer/layout")
    tensors = {
        name: typed(raw, name, FLOATING, fields.dtype, pointer_to("layer", "tensors", name)).numpy()
        for name, raw in message.layer.items()
    }
    return Layer(layout.read(tensors, "/layer/tensors"), inline.heads, layout)


def _tensors(
    variant: Variant, fields: Fields, message: Message, layer: Layer | None
) -> dict[str, RawTensor]:
    """The tensors that came, each known to the variant, with a dtype it accepts."""
    expected: dict[str, Input] = dict(variant.inputs)
    roles = [r for r in ROLES if r in expected]
    if layer is not None and not roles:
        raise InvalidContent(f"{variant.name} takes no layer", pointer="/layer")
    if layer is not None and "x" in message.tensors:
        expected["x"] = replace(expected[roles[0]], name="x")
        for role in roles:
            if role in message.tensors:
                raise InvalidContent(
                    f"x stands for {', '.join(roles)}; {role} came beside it",
                    pointer=pointer_to("inputs", role),
                )
            del expected[role]
    for name in message.tensors:
        if name not in expected:
            hint = " (x wants a layer beside it)" if name == "x" and layer is None else ""
            raise InvalidContent(
                f"{variant.name} has no input {name!r:.60}; it takes {', '.join(expected)}{hint}",
                pointer=pointer_to("inputs", name),
            )
    missing = [n for n, i in expected.items() if n not in message.tensors and not i.optional]
    if missing:
        raise InvalidContent(
            f"{variant.name} needs {', '.join(missing)}, which did not come", pointer="/inputs"
        )
    return {
        name: typed(
            message.tensors[name], name, spec.dtypes, fields.dtype, pointer_to("inputs", name)
        )
        for name, spec in expected.items()
        if name in message.tensors
    }


def _one_dtype(variant: Variant, inputs: Mapping[str, RawTensor], layer: Layer | None) -> str:
    """The dtype that all floating tensors but masks share."""
    dtypes = {
        name: t.dtype
        for name, t in inputs.items()
        if t.dtype in FLOATING and not (name in variant.inputs and variant.inputs[name].broadcasts)
    }
    if layer is not None:
        for p in layer.projections:
            dtypes[p.name] = p.weight.dtype.name
            if p.bias is not None:
                dtypes[f"{p.name}.bias"] = p.bias.dtype.name
    first, dtype = next(iter(dtypes.items()))
    for name, other in dtypes.items():
        if other != dtype:
            raise InvalidContent(
                f"{name} is {other} where {first} is {dtype}; all of one request have one dtype",
                pointer=pointer_to("inputs", name) if name in inputs else "/layer/tensors",
            )
    return dtype


def _shapes(
    variant: Variant, inputs: Mapping[str, RawTensor], layer: Layer | None
) -> tuple[dict[str, tuple[int, ...]], Bound]:
    """Every axis of every tensor, and the sizes of the variant's letters."""
    came = {name: t.shape for name, t in inputs.items()}
    if layer is None:
        first = next(iter(variant.inputs))
        dropped = dropped_letters(first, variant.inputs[first].letters, came[first])
        bound = bind(variant, came, dropped)
        return bound.shapes, bound
    roles = [r for r in ROLES if r in variant.inputs]
    embeddings = ["x"] if "x" in came else roles
    dropped = dropped_letters(embeddings[0], ("B", "L", "M"), came[embeddings[0]])
    lifted = {n: came[n] if not dropped else (1, *came[n]) for n in embeddings}
    for name, shape in lifted.items():
        if len(shape) != 3 or 0 in shape:
            raise InvalidContent(
                f"{name} has shape {list(came[name])}; as an embedding it must be "
                f"{'(L, M)' if dropped else '(B, L, M)'} with no empty axis",
                pointer=pointer_to("inputs", name),
            )
    sources = {r: "x" if "x" in came else r for r in roles}
    projected = layer.projected({r: lifted[s] for r, s in sources.items()}, sources)
    heads = dropped | {"H", "G"} if layer.heads is None else dropped
    shapes = {n: s for n, s in came.items() if n not in embeddings}
    for role, shape in projected.items():
        axes = zip(variant.inputs[role].letters, shape, strict=True)
        shapes[role] = tuple(size for letter, size in axes if letter not in heads)
    bound = bind(variant, {n: shapes[n] for n in variant.inputs if n in shapes}, heads)
    rest = {n: s for n, s in bound.shapes.items() if n not in roles}
    return rest | lifted, bound


def _check_key_lengths(inputs: Mapping[str, RawTensor], bound: Bound) -> None:
    if (lengths := inputs.get("key_lengths")) is None:
        return
    values = lengths.numpy()
    if ((values < 0) | (values > bound.sizes["S"])).any():
        raise InvalidContent(
            f"key_lengths must lie in 0 to S={bound.sizes['S']}; "
            f"{', '.join(map(str, values[:8]))}{', ...' if len(values) > 8 else ''} came",
            pointer="/inputs/key_lengths",
        )
