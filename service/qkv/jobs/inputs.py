"""Checks names, dtypes and shapes of a request's tensors against the signature of a variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import pydantic

from qkv.attention.layers.layer import SLOPES, Layer
from qkv.attention.layers.layer_checks import check_numbers
from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.signature import STATE, Input, Output
from qkv.attention.step import Step
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, pointer_to
from qkv.jobs import state
from qkv.jobs.axis_sizes import HEADS, AxisSizes, bind_axes, omitted_axes
from qkv.jobs.fields import JobFields
from qkv.jobs.layer_inputs import arrays_of, layer_of, parse_layer_options
from qkv.tensors import FLOATING, RawTensor, nbytes
from qkv.wire.casting import cast_untyped, dtype_of
from qkv.wire.message import Message


class Inputs(NamedTuple):
    """The tensors of a request that fits a variant, without their numbers.

    Attributes:
        specs: the input of the signature that each tensor is, by the tensor's name.
        dtypes: the dtype in which each tensor is computed.
        sent_shapes: the shape of each tensor in the request.
        shapes: the shape of each tensor with every axis: the signature's, or (B, length, M).
        axes: the sizes of the variant's letters.
        layer: the layer that projects embeddings, without its numbers unless it is loaded; None:
            there is none.
        dtype: the dtype that all of them share.
        cast_dtype: the dtype of tensors that the request has without one.
    """

    specs: Mapping[str, Input]
    dtypes: Mapping[str, str]
    sent_shapes: Mapping[str, tuple[int, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    axes: AxisSizes
    layer: Layer | None
    dtype: str
    cast_dtype: str

    @classmethod
    def from_message(
        cls,
        variant: Variant,
        parameters: pydantic.BaseModel,
        fields: JobFields,
        message: Message,
        loaded: Layer | None = None,
    ) -> Inputs:
        """Checks names, dtypes and shapes of a message's tensors.

        Args:
            variant, parameters: of the request.
            fields: of the request.
            message: the request.
            loaded: the loaded layer that it names, or None.

        Raises:
            InvalidContent: a tensor, dtype or shape is wrong.
            PayloadTooLarge: the random tensors of the variant would be too large.
        """
        options = parse_layer_options(fields) if loaded is None else None
        layer = loaded if options is None else layer_of(options, fields.dtype, message)
        cast_dtype: str = fields.dtype
        if loaded is not None and "dtype" not in fields.model_fields_set:
            cast_dtype = loaded.dtype
        specs = _select_specs(variant, message, layer)
        dtypes: dict[str, str] = {}
        for name, spec in specs.items():
            cast = state.cast_dtype(name, dtypes, cast_dtype)
            raw = message.tensors[name]
            dtypes[name] = dtype_of(raw, name, spec.dtypes, cast, _pointer(name))
        sent_shapes = {name: message.tensors[name].shape for name in specs}
        dtype = _common_dtype(variant, dtypes, layer)
        shapes, axes = _bind_shapes(variant, sent_shapes, layer)
        _check_length(parameters, layer, shapes)
        names = {*specs} if layer is None else layer.variant_inputs.union(specs)
        state.check_names(variant, parameters, names)
        axes.sizes.update(variant.infer_sizes(axes.sizes, parameters, names))
        _check_output_projection(variant, layer, axes)
        hollow = None if layer is None else layer.without_numbers()
        return cls(specs, dtypes, sent_shapes, shapes, axes, hollow, dtype, cast_dtype)

    def read_tensors(self, message: Message) -> dict[str, RawTensor]:
        """Returns the tensors of a message with these names, dtypes and shapes.

        Raises:
            InvalidContent: a number does not fit the dtype.
        """
        return {
            name: cast_untyped(
                message.tensors[name], name, spec.dtypes, self.dtypes[name], _pointer(name)
            )
            for name, spec in self.specs.items()
        }

    def read_layer(self, message: Message) -> Layer | None:
        """Returns the layer of a message with these names, dtypes and shapes.

        Raises:
            InvalidContent: a number does not fit the dtype, or a matrix is all zeros.
        """
        if self.layer is None or self.layer.loaded is not None:
            return self.layer
        layer = self.layer.with_numbers(
            arrays_of(message.layer, self.cast_dtype, "layer", "tensors")
        )
        check_numbers(layer, layer.weights)
        return layer

    def check_key_lengths(self, tensors: Mapping[str, RawTensor]) -> None:
        """Checks the only input whose numbers are positions.

        Raises:
            InvalidContent: a length is less than 0, or more than the number of keys.
        """
        if (lengths := tensors.get("key_lengths")) is None:
            return
        values, length = lengths.numpy(), self.axes.sizes["S"]
        if ((values < 0) | (values > length)).any():
            raise InvalidContent(
                f"key_lengths is out of range: got {', '.join(map(str, values[:8]))}"
                f"{', ...' if len(values) > 8 else ''}, expected 0 to S={length}",
                pointer="/inputs/key_lengths",
            )

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors, those that the layer gives to the variant included."""
        of_layer = frozenset() if self.layer is None else self.layer.variant_inputs
        return of_layer.union(self.specs)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the request, the layer's included."""
        total = sum(nbytes(self.dtypes[name], shape) for name, shape in self.sent_shapes.items())
        if self.layer is not None:
            total += sum(t.nbytes for t in self.layer.tensors.values())
        return total

    def output_shape(self, output: Output | Input | Step) -> tuple[int, ...]:
        """Returns the shape of an output in the response, where a layer's heads are merged."""
        if isinstance(output, Output) and output.name == "output" and self.layer is not None:
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
    expected: dict[str, Input] = dict(variant.tensors)
    roles = [r for r in ROLES if r in expected]
    if layer is not None and not roles:
        raise InvalidContent(
            f"{variant.name} takes no layer: it has no query, key and value", pointer="/layer"
        )
    for name in () if layer is None else sorted(layer.variant_inputs):
        assert layer is not None
        if name not in expected:
            field = "alibi" if name == SLOPES else name
            raise InvalidContent(
                f"{variant.name} takes no {field}, which the layer has",
                pointer="/layer/alibi" if name == SLOPES else layer.tensors_pointer,
            )
        if name in message.tensors:
            raise InvalidContent(
                f"{name} is not allowed: the layer has it", pointer=pointer_to("inputs", name)
            )
        del expected[name]
    if layer is not None and layer.options.input == "residual" and "x" not in message.tensors:
        raise InvalidContent(
            "x is missing: with the input residual of a layer, the norm is that of x",
            pointer="/inputs",
        )
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


def _common_dtype(variant: Variant, inputs: Mapping[str, str], layer: Layer | None) -> str:
    """Returns the dtype that all floating tensors share, except those with their own dtype."""
    specs = variant.tensors
    dtypes = {
        name: dtype
        for name, dtype in inputs.items()
        if dtype in FLOATING
        and not name.startswith(STATE)
        and not (name in specs and (specs[name].has_own_dtype or specs[name].may_be_wider))
    }
    if layer is not None:
        dtypes.update((name, array.dtype.name) for name, array in layer.tensors.items())
    if layer is not None and layer.loaded is not None:
        dtypes = {layer.loaded.name: layer.dtype, **dtypes}
    first, dtype = next(iter(dtypes.items()))
    for name, other in dtypes.items():
        if other != dtype:
            raise InvalidContent(
                f"{name} has the wrong dtype: got {other}, expected {dtype} as {first} has",
                pointer=pointer_to("inputs", name) if name in inputs else "/layer/tensors",
            )
    wider = [d for d in ("float32", "float64") if nbytes(d, ()) > nbytes(dtype, ())]
    for name, other in inputs.items():
        if name in specs and specs[name].may_be_wider and other not in (dtype, *wider):
            raise InvalidContent(
                f"{name} has the wrong dtype: got {other}, expected "
                f"{' or '.join([dtype, *wider])} beside {first} in {dtype}",
                pointer=pointer_to("inputs", name),
            )
        if (like := state.input_of_tail(name)) is not None:
            expected = inputs.get(like, dtype)
            if other != expected:
                raise InvalidContent(
                    f"{name} has the wrong dtype: got {other}, expected {expected} as {like} has",
                    pointer=pointer_to("inputs", name),
                )
    return dtype


def _bind_shapes(
    variant: Variant, sent_shapes: Mapping[str, tuple[int, ...]], layer: Layer | None
) -> tuple[dict[str, tuple[int, ...]], AxisSizes]:
    """Returns the full shape of every tensor, and the sizes of the variant's letters."""
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
    heads = omitted if layer.has_heads else omitted | HEADS
    shapes = {n: s for n, s in sent_shapes.items() if n not in embeddings}
    for role, shape in projected.items():
        letters = zip(variant.inputs[role].letters, shape, strict=True)
        shapes[role] = tuple(size for letter, size in letters if letter not in heads)
    axes = bind_axes(variant, {n: shapes[n] for n in variant.tensors if n in shapes}, heads)
    rest = {n: s for n, s in axes.shapes.items() if n not in roles}
    return rest | embedding_shapes, axes


def _check_length(
    parameters: pydantic.BaseModel, layer: Layer | None, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Checks that a request has no more tokens than a layer's description holds for.

    Raises:
        InvalidContent: it has.
    """
    if layer is None or layer.loaded is None or (most := layer.loaded.max_length) is None:
        return
    offset = getattr(parameters, "query_offset", 0)
    for name in ("x", *ROLES):
        first = offset if isinstance(offset, int) and name in ("x", "query") else 0
        if name in shapes and (length := shapes[name][1] + first) > most:
            raise InvalidContent(
                f"{name} is too long: got {length} tokens, expected at most {most}, for which the "
                f"description of {layer.loaded.name} holds (longer = true in qkv.toml allows more)",
                pointer=_pointer(name),
            )


def _check_output_projection(variant: Variant, layer: Layer | None, axes: AxisSizes) -> None:
    """Checks that the variant's output has the heads that the output projection takes.

    Raises:
        InvalidContent: the output has the key heads, and they are fewer than the query heads.
    """
    if layer is None or layer.output_width is None:
        return
    _, heads, _, width = variant.outputs["output"].letters
    channels, expected = axes.sizes[heads] * axes.sizes[width], len(layer.weights["output.weight"])
    if channels != expected:
        raise InvalidContent(
            f"{variant.name} does not fit the output projection: its output has the "
            f"{axes.sizes[heads]} key heads, {channels} channels, expected {expected}",
            pointer=layer.tensors_pointer,
        )


def _pointer(name: str) -> str:
    """Returns the JSON pointer to an input of a variant, whose name needs no escapes."""
    return f"/inputs/{name}"
