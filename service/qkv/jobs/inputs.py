"""Checks the tensors of a request against the signature of a variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import pydantic

from qkv.attention.layers.layer import SLOPES, Layer
from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.signature import Input, Output
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, pointer_to
from qkv.jobs.axis_sizes import AxisSizes, bind_axes, omitted_axes
from qkv.jobs.fields import JobFields
from qkv.jobs.layer_inputs import layer_of, parse_layer_options
from qkv.tensors import FLOATING, RawTensor
from qkv.wire.casting import cast_untyped
from qkv.wire.message import Message

__all__ = ["Inputs"]


class Inputs(NamedTuple):
    """Tensors that fit a variant.

    Attributes:
        tensors: the variant's inputs, or the embeddings of its layer, in the request's shapes.
        layer: the layer that projects them, or None.
        dtype: the dtype that all of them share.
        shapes: the shape of each tensor with every axis: the signature's, or (B, length, M).
        axes: the sizes of the variant's letters.
        specs: the input of the signature that each tensor is.
        cast_dtype: the dtype of tensors that the request has without one.
    """

    tensors: Mapping[str, RawTensor]
    layer: Layer | None
    dtype: str
    shapes: Mapping[str, tuple[int, ...]]
    axes: AxisSizes
    specs: Mapping[str, Input]
    cast_dtype: str

    @classmethod
    def from_message(
        cls, variant: Variant, parameters: pydantic.BaseModel, fields: JobFields, message: Message
    ) -> Inputs:
        """Checks a message's tensors.

        Raises:
            InvalidContent: a tensor, dtype, shape or value is wrong.
            PayloadTooLarge: the random tensors of the variant would be too large.
        """
        options = parse_layer_options(fields)
        layer = None if options is None else layer_of(options, fields.dtype, message)
        specs = _select_specs(variant, message, layer)
        tensors = _read_tensors(specs, fields.dtype, message)
        dtype = _common_dtype(variant, tensors, layer)
        shapes, axes = _bind_shapes(variant, tensors, layer)
        axes.sizes.update(variant.infer_sizes(axes.sizes, parameters))
        _check_output_projection(variant, layer, axes)
        _check_key_lengths(tensors, axes)
        return cls(tensors, layer, dtype, shapes, axes, specs, fields.dtype)

    def with_numbers(self, message: Message, layer: Layer | None) -> Inputs:
        """Returns the inputs of a message with the same fields, names, dtypes and shapes.

        Args:
            message: the request.
            layer: its layer, as `layer_of` returns it.

        Raises:
            InvalidContent: a value is wrong.
        """
        return self.with_tensors(_read_tensors(self.specs, self.cast_dtype, message), layer)

    def with_tensors(self, tensors: Mapping[str, RawTensor], layer: Layer | None) -> Inputs:
        """Returns inputs with other tensors of the same names, dtypes and shapes.

        Args:
            tensors: as the attribute.
            layer: as the attribute.

        Raises:
            InvalidContent: a value is wrong.
        """
        if "key_lengths" in tensors:
            _check_key_lengths(tensors, self.axes)
        return Inputs(
            tensors, layer, self.dtype, self.shapes, self.axes, self.specs, self.cast_dtype
        )

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors, those that the layer gives to the variant included."""
        of_layer = frozenset() if self.layer is None else self.layer.variant_inputs
        return of_layer.union(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the request, the layer's included."""
        total = sum(t.nbytes for t in self.tensors.values())
        if self.layer is not None:
            total += sum(t.nbytes for t in self.layer.tensors.values())
        return total

    def output_shape(self, output: Output) -> tuple[int, ...]:
        """Returns the shape of an output in the response, where a layer's heads are merged."""
        if output.name == "output" and self.layer is not None:
            shape = self.block_shape(output)
            return shape[1:] if "B" in self.axes.omitted else shape
        return self.axes.output_shape(output)

    def block_shape(self, output: Output) -> tuple[int, ...]:
        """Returns the shape (B, L, X) of the output (B, H, L, E) of a layer.

        X is the width of the output projection, or that of all heads side by side.
        """
        batch, heads, rows, width = (self.axes.sizes[letter] for letter in output.letters)
        assert self.layer is not None
        return batch, rows, self.layer.output_width or heads * width

    def embedding_shape(self, role: str) -> tuple[int, ...]:
        """Returns the shape (B, length, M) of the embedding that a layer projects to a role."""
        return self.shapes["x" if "x" in self.shapes else role]


def _select_specs(variant: Variant, message: Message, layer: Layer | None) -> dict[str, Input]:
    """Returns the input of the signature that each tensor of the request is.

    Raises:
        InvalidContent: the variant does not take a tensor, or a required tensor is missing.
    """
    expected: dict[str, Input] = dict(variant.inputs)
    roles = [r for r in ROLES if r in expected]
    if layer is not None and not roles:
        raise InvalidContent(
            f"{variant.name} takes no layer: it has no query, key and value", pointer="/layer"
        )
    for name in () if layer is None else sorted(layer.variant_inputs):
        if name not in expected:
            field = "alibi" if name == SLOPES else name
            raise InvalidContent(
                f"{variant.name} takes no {field}, which the layer has",
                pointer="/layer/alibi" if name == SLOPES else "/layer/tensors",
            )
        if name in message.tensors:
            raise InvalidContent(
                f"{name} is not allowed: the layer has it", pointer=pointer_to("inputs", name)
            )
        del expected[name]
    if layer is not None and "x" in message.tensors:
        expected["x"] = replace(expected[roles[0]], name="x")
        for role in roles:
            if role in message.tensors:
                raise InvalidContent(
                    f"{role} is not allowed: x stands for {', '.join(roles)}",
                    pointer=pointer_to("inputs", role),
                )
            del expected[role]
    for name in message.tensors:
        if name not in expected:
            hint = " (x needs a layer)" if name == "x" and layer is None else ""
            if name == "mask" and "key_lengths" in expected:
                hint = "; to hide padding, give key_lengths"
            raise InvalidContent(
                f"{variant.name} has no input {name!r:.60}; it takes {', '.join(expected)}{hint}",
                pointer=pointer_to("inputs", name),
            )
    missing = [n for n, i in expected.items() if n not in message.tensors and not i.is_optional]
    if missing:
        raise InvalidContent(
            f"{variant.name} needs {', '.join(missing)}: missing from inputs", pointer="/inputs"
        )
    return {name: spec for name, spec in expected.items() if name in message.tensors}


def _read_tensors(specs: Mapping[str, Input], dtype: str, message: Message) -> dict[str, RawTensor]:
    """Returns the tensors of a request in dtypes that the variant accepts.

    Args:
        specs: the input of the signature that each tensor is.
        dtype: for tensors without a dtype.
        message: the request.

    Raises:
        InvalidContent: a dtype is wrong, or a value does not fit it.
    """
    tensors = {}
    for name, spec in specs.items():
        raw = message.tensors[name]
        if raw.is_untyped or raw.dtype not in spec.dtypes:
            raw = cast_untyped(raw, name, spec.dtypes, dtype, pointer_to("inputs", name))
        tensors[name] = raw
    return tensors


def _common_dtype(variant: Variant, inputs: Mapping[str, RawTensor], layer: Layer | None) -> str:
    """Returns the dtype that all floating tensors share.

    Masks are excepted, and numbers per head: slopes in bfloat16 would be too coarse.
    """
    dtypes = {
        name: t.dtype
        for name, t in inputs.items()
        if t.dtype in FLOATING and not (name in variant.inputs and _has_own_dtype(variant, name))
    }
    if layer is not None:
        dtypes.update((name, array.dtype.name) for name, array in layer.tensors.items())
    first, dtype = next(iter(dtypes.items()))
    for name, other in dtypes.items():
        if other != dtype:
            raise InvalidContent(
                f"{name} has the wrong dtype: got {other}, expected {dtype} as {first} has",
                pointer=pointer_to("inputs", name) if name in inputs else "/layer/tensors",
            )
    return dtype


def _has_own_dtype(variant: Variant, name: str) -> bool:
    spec = variant.inputs[name]
    return spec.broadcasts or spec.letters == ("H",)


def _bind_shapes(
    variant: Variant, inputs: Mapping[str, RawTensor], layer: Layer | None
) -> tuple[dict[str, tuple[int, ...]], AxisSizes]:
    """Returns the full shape of every tensor, and the sizes of the variant's letters."""
    sent_shapes = {name: t.shape for name, t in inputs.items()}
    if layer is None:
        first = next(iter(variant.inputs))
        omitted = omitted_axes(first, variant.inputs[first].letters, sent_shapes[first])
        axes = bind_axes(variant, sent_shapes, omitted)
        return axes.shapes, axes
    roles = [r for r in ROLES if r in variant.inputs]
    embeddings = ["x"] if "x" in sent_shapes else roles
    omitted = omitted_axes(embeddings[0], ("B", "L", "M"), sent_shapes[embeddings[0]])
    embedding_shapes = {
        n: sent_shapes[n] if not omitted else (1, *sent_shapes[n]) for n in embeddings
    }
    for name, shape in embedding_shapes.items():
        if len(shape) != 3 or 0 in shape:
            raise InvalidContent(
                f"{name} has the wrong shape: got {list(sent_shapes[name])}, expected an embedding "
                f"{'(L, M)' if omitted else '(B, L, M)'} without empty axes",
                pointer=pointer_to("inputs", name),
            )
    sources = {r: "x" if "x" in sent_shapes else r for r in roles}
    projected = layer.projected_shapes(
        {r: embedding_shapes[s] for r, s in sources.items()}, sources
    )
    heads = omitted if layer.has_heads else omitted | {"H", "G"}
    shapes = {n: s for n, s in sent_shapes.items() if n not in embeddings}
    for role, shape in projected.items():
        letters = zip(variant.inputs[role].letters, shape, strict=True)
        shapes[role] = tuple(size for letter, size in letters if letter not in heads)
    axes = bind_axes(variant, {n: shapes[n] for n in variant.inputs if n in shapes}, heads)
    rest = {n: s for n, s in axes.shapes.items() if n not in roles}
    return rest | embedding_shapes, axes


def _check_output_projection(variant: Variant, layer: Layer | None, axes: AxisSizes) -> None:
    """Checks that the variant's output has the heads that the output projection takes.

    Raises:
        InvalidContent: the output has the key heads, and they are fewer than the query heads.
    """
    if layer is None or layer.output_width is None:
        return
    _, heads, _, width = variant.outputs["output"].letters
    found, expected = axes.sizes[heads] * axes.sizes[width], len(layer.weights["output.weight"])
    if found != expected:
        raise InvalidContent(
            f"{variant.name} does not fit the output projection: its output has the "
            f"{axes.sizes[heads]} key heads, {found} channels, expected {expected}",
            pointer="/layer/tensors",
        )


def _check_key_lengths(inputs: Mapping[str, RawTensor], axes: AxisSizes) -> None:
    if (lengths := inputs.get("key_lengths")) is None:
        return
    values = lengths.numpy()
    if ((values < 0) | (values > axes.sizes["S"])).any():
        raise InvalidContent(
            f"key_lengths is out of range: got {', '.join(map(str, values[:8]))}"
            f"{', ...' if len(values) > 8 else ''}, expected 0 to S={axes.sizes['S']}",
            pointer="/inputs/key_lengths",
        )
