"""A validated request: variant, parameters, raw tensors, what to return, and its batching key."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Final, Literal, NamedTuple

import pydantic

from qkv import catalogue
from qkv.binding import Bound, bind, dropped_letters
from qkv.catalogue import Input, Variant
from qkv.errors import InvalidContent, NotFound, TooLarge, pointer_to, shown
from qkv.layers import layouts
from qkv.layers.layer import Layer
from qkv.layers.projections import ROLES
from qkv.literals import typed
from qkv.message import Message
from qkv.tensors import FLOATING, RawTensor, nbytes

__all__ = ["InlineLayer", "Job", "Limits", "Run"]

_CONFIG: Final = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class InlineLayer(pydantic.BaseModel):
    """A layer that stands in the request, beside its tensors."""

    model_config = _CONFIG

    layout: Annotated[str, pydantic.Field(description="Weight layout: v1 or v2.")]
    heads: Annotated[
        Annotated[int, pydantic.Field(ge=1, le=65536)] | None,
        pydantic.Field(description="Query heads; null: one, and no head axis in the answer."),
    ] = None


class Run(pydantic.BaseModel):
    """The fields of a run, tensors apart."""

    model_config = _CONFIG

    parameters: dict[str, Any] = {}
    outputs: Annotated[
        list[str] | None,
        pydantic.Field(description="What to return; null: output, and weights where there are."),
    ] = None
    weights: Annotated[
        Literal["full", "none"], pydantic.Field(description='"none" leaves the weights out.')
    ] = "full"
    dtype: Annotated[
        Literal["float64", "float32", "float16", "bfloat16"],
        pydantic.Field(description="What numbers in lists become."),
    ] = "float32"
    layer: Annotated[
        str | dict[str, Any] | None,
        pydantic.Field(description="A layer that projects the inputs."),
    ] = None


class Limits(NamedTuple):
    """What a request may ask for.

    Attributes:
        answer: bytes of the largest answer, tensors only.
        request: bytes of inputs and answer together, the most that may ever wait.
        scores: most scores that a variant which computes them may compute.
    """

    answer: int
    request: int
    scores: int = 1 << 36


@dataclass(frozen=True, eq=False)
class Job:
    """A request that can run: nothing in it is left to be found wrong.

    Attributes:
        inputs: the variant's tensors, or the embeddings of its layer; shapes as they came.
        shapes: of each of them with every axis: the signature's, or (B, length, M).
        layer: what projects them, or None.
        outputs: what to return.
        bound: the sizes of the variant's letters.
    """

    variant: Variant
    parameters: pydantic.BaseModel
    dtype: str
    inputs: Mapping[str, RawTensor]
    shapes: Mapping[str, tuple[int, ...]]
    layer: Layer | None
    outputs: frozenset[str]
    bound: Bound

    @classmethod
    def of(cls, variant_name: str, message: Message, limits: Limits) -> Job:
        """Finds the variant and checks all that a request says against it.

        Raises:
            NotFound: no such variant or layer.
            InvalidContent: a field, parameter, tensor, dtype, shape or value is wrong.
            TooLarge: the answer, or the request and its answer, can never fit the limits.
        """
        variant = catalogue.find(variant_name)
        run = _fields(message)
        parameters = variant.parse(run.parameters)
        outputs = _outputs(variant, run)
        layer = _layer(run, message)
        inputs = _inputs(variant, run, message, layer)
        dtype = _one_dtype(variant, inputs, layer)
        shapes, bound = _shapes(variant, inputs, layer)
        _check_key_lengths(inputs, bound)
        job = cls(variant, parameters, dtype, inputs, shapes, layer, outputs, bound)
        job._check_size(limits)
        return job

    @cached_property
    def key(self) -> Hashable:
        """Jobs with equal keys may run stacked along B."""
        axes = tuple(
            # without B it belongs to the whole request: only the very same tensor is equal
            (name, t.dtype, self.shapes[name][1:]) if self._has_batch(name) else (name, id(t))
            for name, t in self.inputs.items()
        )
        return self.variant.name, self.parameters, axes, self.outputs, id(self.layer)

    @property
    def batch(self) -> int:
        """Its items, the size of B."""
        return self.bound.sizes.get("B", 1)

    @cached_property
    def bytes_in(self) -> int:
        """Bytes of all tensors that came."""
        total = sum(t.nbytes for t in self.inputs.values())
        if self.layer is not None:
            for p in self.layer.projections:
                total += p.weight.nbytes + (0 if p.bias is None else p.bias.nbytes)
        return total

    @cached_property
    def bytes_out(self) -> int:
        """Bytes of all tensors that the answer holds."""
        return sum(nbytes(self.dtype_of(n), self.answer_shape(n)) for n in self.outputs)

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of the matrix products, projections included."""
        total = self.variant.flops(self.bound.sizes)
        if self.layer is not None:
            for role, projection in zip(ROLES, self.layer.projections, strict=True):
                if (shape := self._embedding_shape(role)) is not None:
                    total += 2 * shape[0] * shape[1] * projection.weight.size
        return total

    def dtype_of(self, output: str) -> str:
        """The dtype an output goes back in."""
        if self.variant.outputs[output].exact:
            return "float64" if self.dtype == "float64" else "float32"
        return self.dtype

    def answer_shape(self, output: str) -> tuple[int, ...]:
        """The shape an output goes back in; a layer's heads lie side by side in its output."""
        if output == "output" and self.layer is not None and self.layer.heads is not None:
            batch, heads, rows, width = (
                self.bound.sizes[letter] for letter in self.variant.outputs[output].letters
            )
            shape = (batch, rows, heads * width)
            return shape[1:] if "B" in self.bound.dropped else shape
        return self.bound.answer_shape(self.variant.outputs[output])

    def _embedding_shape(self, role: str) -> tuple[int, ...] | None:
        if role not in self.variant.inputs:
            return None
        return self.shapes.get("x", self.shapes.get(role))

    def _has_batch(self, name: str) -> bool:
        return name not in self.variant.inputs or "B" in self.variant.inputs[name].letters

    @cached_property
    def pairs(self) -> int:
        """How many pairs of a query and a key are looked at, whether they are returned or not."""
        return self.variant.pairs(self.bound.sizes, self.parameters)

    def _check_size(self, limits: Limits) -> None:
        if self.pairs > limits.scores:
            raise TooLarge(
                f"{self.variant.name} would compute {self.pairs} scores, one for each pair of a "
                f"query and a key; at most {limits.scores} are computed",
                limit=limits.scores,
            )
        if self.bytes_out > limits.answer:
            hint = (
                ' ("weights": "none" leaves the weights out)' if "weights" in self.outputs else ""
            )
            raise TooLarge(
                f"the answer would hold {self.bytes_out} bytes of tensors; at most "
                f"{limits.answer} are answered{hint}",
                limit=limits.answer,
            )
        if self.bytes_in + self.bytes_out > limits.request:
            raise TooLarge(
                f"request and answer hold {self.bytes_in + self.bytes_out} bytes of tensors; at "
                f"most {limits.request} may wait",
                limit=limits.request,
            )


def _fields(message: Message) -> Run:
    try:
        return Run.model_validate(message.fields)
    except pydantic.ValidationError as error:
        raise invalid_field(error, ["inputs", *Run.model_fields, "encoding"]) from None


def invalid_field(
    error: pydantic.ValidationError, known: Sequence[str], *within: str
) -> InvalidContent:
    """The first fault of a body's fields, in a sentence.

    Args:
        error: from validating an object of the body.
        known: the names the object may have.
        within: where in the body the object stands.
    """
    fault = error.errors(include_url=False, include_context=False)[0]
    # a union's branches are in loc too, as words no field has
    path = [p for i, p in enumerate(fault["loc"]) if i == 0 or isinstance(p, int)]
    if fault["type"] in ("extra_forbidden", "missing"):  # the field itself comes last
        name = fault["loc"][-1]
        parents = [*within, *path[: len(fault["loc"]) - 1]]
        pointer, place = pointer_to(*parents, name), ".".join(map(str, parents))
        if fault["type"] == "missing":
            return InvalidContent(f"{place}{'.' * bool(place)}{name} is missing", pointer=pointer)
        listing = f"; known are {', '.join(known)}" if len(fault["loc"]) == 1 else ""
        of = f" of {place}" if place else ""
        return InvalidContent(f"unknown field {name!r}{of}{listing}", pointer=pointer)
    pointer, where = pointer_to(*within, *path), ".".join(map(str, (*within, *path)))
    detail = f"{where} came as {shown(fault['input'])}: {fault['msg']}"
    return InvalidContent(detail, pointer=pointer)


def _outputs(variant: Variant, run: Run) -> frozenset[str]:
    named = run.outputs
    if named is None:
        named = [n for n in ("output", "weights") if n in variant.outputs]
        return frozenset(named) - ({"weights"} if run.weights == "none" else set())
    for i, name in enumerate(named):
        if name not in variant.outputs:
            raise InvalidContent(
                f"{variant.name} has no output {name!r}; it has {', '.join(variant.outputs)}",
                pointer=pointer_to("outputs", i),
            )
        if name in named[:i]:
            raise InvalidContent(f"{name} is named twice", pointer=pointer_to("outputs", i))
    if not named:
        raise InvalidContent("outputs is empty; name at least one", pointer="/outputs")
    if run.weights == "none" and "weights" in named:
        raise InvalidContent('outputs names weights, and "weights" says "none"', pointer="/weights")
    return frozenset(named)


def _layer(run: Run, message: Message) -> Layer | None:
    if run.layer is None:
        return None
    if isinstance(run.layer, str):
        raise NotFound(f"no saved layer {run.layer!r:.60}", pointer="/layer")
    try:
        inline = InlineLayer.model_validate(run.layer)
    except pydantic.ValidationError as error:
        known = [*InlineLayer.model_fields, "tensors"]
        raise invalid_field(error, known, "layer") from None
    layout = layouts.find(inline.layout, "/layer/layout")
    tensors = {
        name: typed(raw, name, FLOATING, run.dtype, pointer_to("layer", "tensors", name)).numpy()
        for name, raw in message.layer.items()
    }
    return Layer(layout.read(tensors, "/layer/tensors"), inline.heads)


def _inputs(
    variant: Variant, run: Run, message: Message, layer: Layer | None
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
        name: typed(message.tensors[name], name, spec.dtypes, run.dtype, pointer_to("inputs", name))
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
