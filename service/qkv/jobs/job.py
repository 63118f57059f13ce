"""A validated request: variant, parameters, tensors, outputs, batch key, sizes and limits."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, NamedTuple, Self

import pydantic

from qkv.attention import catalogue
from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, PayloadTooLarge, format_value, pointer_to
from qkv.jobs import weight_forms
from qkv.jobs.fields import JobFields, parse_fields
from qkv.jobs.inputs import Inputs
from qkv.jobs.layer_inputs import parse_layer_options
from qkv.jobs.weight_forms import FULL, NONE, WeightForm
from qkv.tensors import RawTensor, nbytes
from qkv.wire.message import Message

__all__ = ["SMALL_BYTES", "Job", "Limits", "RunFields", "parse_parameters"]

_SMALL_FLOPS: Final = 1 << 26  # half a millisecond of one thread, roughly
SMALL_BYTES: Final = 1 << 21
"""A small job has fewer bytes of tensors, inputs and outputs together."""
_SMALL_SCORES: Final = 1 << 20


class RunFields(JobFields):
    """The fields of a run."""

    outputs: Annotated[
        list[str] | None,
        pydantic.Field(
            description="The names of the outputs to return. By default output, and weights if the "
            "variant has them."
        ),
    ] = None
    weights: Annotated[
        Any, pydantic.Field(description="The form in which the weights are returned.")
    ] = "full"


class Limits(NamedTuple):
    """The limits of a job.

    Attributes:
        response_bytes: bytes of the tensors in the response.
        job_bytes: bytes of the tensors in request and response together.
        score_count: scores that a variant may compute, one per pair of a query and a key.
    """

    response_bytes: int
    job_bytes: int
    score_count: int = 1 << 34


class _BatchKey:
    """A batch key that computes its hash once: the queue looks it up several times."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: tuple[Hashable, ...]) -> None:
        self._parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:  # the usual case: jobs of one plan
            return True
        return isinstance(other, _BatchKey) and self._parts == other._parts


@dataclass(frozen=True, eq=False)
class Job:
    """A validated request that can run.

    Attributes:
        inputs: the tensors and the layer.
        outputs: names of the outputs to return.
        form: the form of the weights, if they are returned.
        is_inference: a client requested this run of the variant; the statistics count it.
    """

    is_inference: ClassVar[bool] = True

    variant: Variant
    parameters: pydantic.BaseModel
    inputs: Inputs
    outputs: frozenset[str]
    form: WeightForm = FULL

    @classmethod
    def from_message(cls, variant_name: str, message: Message, limits: Limits) -> Job:
        """Finds the variant and checks the request against it.

        Raises:
            NotFound: the variant does not exist.
            InvalidContent: a field, parameter, tensor, dtype, shape or value is wrong.
            PayloadTooLarge: the job exceeds the limits.
        """
        variant = catalogue.find(variant_name)
        fields = parse_fields(message, RunFields)
        parameters, form = parse_parameters(variant, fields), weight_forms.parse(fields.weights)
        outputs = _select_outputs(variant, fields, form)
        inputs = Inputs.from_message(variant, parameters, fields, message)
        if form.is_summary:
            weight_forms.check(form, variant.name, variant.outputs["weights"], inputs.axes.sizes)
        job = cls(variant, parameters, inputs, outputs, form if "weights" in outputs else FULL)
        job._check_size(limits)
        return job

    @cached_property
    def batch_key(self) -> Hashable:
        """Jobs with equal keys may be stacked along B and run as one batch."""
        axes = tuple(
            # an input without B is shared by the request: only the same object is equal
            (name, t.dtype, self.inputs.shapes[name][1:]) if self.has_batch(name) else (name, id(t))
            for name, t in self.inputs.tensors.items()
        )
        returned = self.outputs, self.form
        return _BatchKey(
            (self.variant.name, self.parameters, axes, *returned, id(self.inputs.layer))
        )

    @cached_property
    def has_lasting_key(self) -> bool:
        """True if the batch key does not depend on the identity of a tensor, layer or job."""
        return (
            type(self).batch_key is Job.batch_key  # else a subclass has its own
            and self.inputs.layer is None
            and all(map(self.has_batch, self.inputs.tensors))
        )

    @property
    def plan_id(self) -> object | None:
        """The same object for all jobs of one plan; None: the job has no plan."""
        return self.__dict__.get("_plan_id")

    @cached_property
    def kind(self) -> Hashable:
        """Variant, parameters and outputs; names, dtypes and shapes of the tensors, without B."""
        shapes = self.inputs.shapes
        axes = tuple(
            (name, t.dtype, shapes[name][1 if self.has_batch(name) else 0 :])
            for name, t in self.inputs.tensors.items()
        )
        layer = self.inputs.layer
        weights = () if layer is None else tuple((n, t.shape) for n, t in layer.tensors.items())
        options = None if layer is None else layer.options.model_dump_json()
        returned = self.outputs, self.form
        return type(self), self.variant.name, self.parameters, axes, *returned, weights, options

    @property
    def batch_size(self) -> int:
        """The size of B."""
        return self.inputs.axes.sizes.get("B", 1)

    @cached_property
    def bytes_in(self) -> int:
        """Bytes of all tensors in the request."""
        return self.inputs.nbytes

    @cached_property
    def bytes_out(self) -> int:
        """Bytes of all tensors in the response."""
        return sum(nbytes(dtype, shape) for dtype, shape in self.output_specs.values())

    @cached_property
    def bytes(self) -> int:
        """Bytes of all tensors, in request and response."""
        return self.bytes_in + self.bytes_out

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of the matrix products, projections included."""
        sizes, layer = self.inputs.axes.sizes, self.inputs.layer
        total = self.variant.flops(sizes)
        if layer is not None:
            for role in self.roles:
                batch, length, _ = self.inputs.embedding_shape(role)
                total += 2 * batch * length * layer.weights[f"{role}.weight"].size
            if layer.output_width is not None:
                size = layer.weights["output.weight"].size
                total += 2 * self.batch_size * sizes.get("L", 1) * size
        if self.form.kind == "pool":  # pooling runs the variant on values as wide as the bins
            return total + self.variant.flops(sizes | {"E": min(self.form.size, sizes.get("S", 1))})
        return total + 2 * self._form_score_count * sizes.get("D", 1)

    @property
    def roles(self) -> tuple[str, ...]:
        """The inputs that a layer projects."""
        return tuple(role for role in ROLES if role in self.variant.inputs)

    def dtype_of(self, output: str) -> str:
        """Returns the dtype of an output in the response."""
        if self.variant.outputs[output].is_exact:
            return "float64" if self.inputs.dtype == "float64" else "float32"
        return self.inputs.dtype

    def output_shape(self, output: str) -> tuple[int, ...]:
        """Returns the shape of an output in the response."""
        return self.inputs.output_shape(self.variant.outputs[output])

    @cached_property
    def is_small(self) -> bool:
        """True if the job takes about as long as handing it to another thread.

        The bounds also keep the slow path, which visits each pair of a query and a key, below
        50 ms.
        """
        pairs = math.prod(self.inputs.axes.sizes.get(letter, 1) for letter in "BHLS")
        return (
            self.flops < _SMALL_FLOPS
            and self.bytes < SMALL_BYTES
            and max(self.score_count, pairs) < _SMALL_SCORES
        )

    def with_tensors(self, tensors: Mapping[str, RawTensor]) -> Self:
        """Returns the same job with other tensors of the same names, dtypes and shapes."""
        return self.with_inputs(self.inputs._replace(tensors=tensors))

    def with_inputs(self, inputs: Inputs) -> Self:
        """Returns the same job with other inputs of the same names, dtypes and shapes.

        Keeps the cached properties, which depend on these alone.
        """
        job = object.__new__(type(self))
        job.__dict__.update(self.__dict__, inputs=inputs)
        if not self.has_lasting_key:
            job.__dict__.pop("batch_key", None)
        return job

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """The parameters by name, as the variant's functions take them."""
        return {n: getattr(self.parameters, n) for n in type(self.parameters).model_fields}

    @cached_property
    def tensor_arguments(self) -> Sequence[tuple[str, str]]:
        """The name of each tensor of the variant, and of its argument in the variant's functions.

        A layer's embeddings are not among them: it projects them to the roles.
        """
        inputs, names = self.variant.inputs, set(self.inputs.tensors)
        if (layer := self.inputs.layer) is not None:
            names |= layer.variant_inputs.union(self.roles)
        return [(name, spec.argument) for name, spec in inputs.items() if name in names]

    @cached_property
    def attend_outputs(self) -> Sequence[str]:
        """The outputs that `attend` computes, in the order of the response."""
        others = {"weights"} if self.form.is_summary else set()
        return [name for name in self.variant.outputs if name in self.outputs - others]

    @cached_property
    def output_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """The dtype and shape of each output in the response."""
        specs = {n: (self.dtype_of(n), self.output_shape(n)) for n in self.outputs}
        if self.form.is_summary:
            dtype, _ = specs.pop("weights")
            weights, axes = self.variant.outputs["weights"], self.inputs.axes
            sizes = weight_forms.form_sizes(self.form, weights, axes.sizes)
            for name, spec in weight_forms.form_tensors(self.form.kind, weights).items():
                shape = tuple(sizes[x] for x in spec.letters if x not in axes.omitted)
                specs[name] = "int64" if spec.is_integer else dtype, shape
        return specs

    @property
    def uses_sdpa(self) -> bool:
        """True if torch's SDPA kernel alone runs, without a layer."""
        inputs = self.inputs
        return inputs.layer is None and self.variant.uses_sdpa(
            inputs.axes.sizes, self.parameters, self.outputs, inputs.tensors
        )

    @cached_property
    def annotations(self) -> dict[str, Any]:
        """Fields of the response: `weights_are` with weights, and `layer` with a layer."""
        if "weights" not in self.outputs:
            return self._layer_annotation
        return {"weights_are": self.weights_are, **self._layer_annotation}

    @property
    def _layer_annotation(self) -> dict[str, Any]:
        layer = self.inputs.layer
        return {} if layer is None else {"layer": layer.description}

    @property
    def weights_are(self) -> str:
        """The kind of the weights: stochastic, signed or unnormalised."""
        return self.variant.weights_are(self.parameters, self.inputs.names)

    def has_batch(self, name: str) -> bool:
        """Returns True if an input has one item for each item of the batch."""
        return name not in self.variant.inputs or "B" in self.variant.inputs[name].letters

    @cached_property
    def score_count(self) -> int:
        """Scores that the run computes, one per pair of a query and a key, returned or not."""
        count = self.variant.score_count(self.inputs.axes.sizes, self.parameters)
        return count + (count if self.form.kind == "pool" else self._form_score_count)

    @property
    def _form_score_count(self) -> int:
        """Scores that the form needs beyond those of the output."""
        if self.form.kind not in ("rows", "top_k", "stats"):
            return 0
        weights = self.variant.outputs["weights"]
        spec = weight_forms.form_tensors("rows", weights)["weights"] if self.form.rows else weights
        sizes = weight_forms.form_sizes(self.form, weights, self.inputs.axes.sizes)
        return math.prod(sizes[letter] for letter in spec.letters)

    def _check_size(self, limits: Limits) -> None:
        if self.score_count > limits.score_count:
            raise PayloadTooLarge(
                f"{self.variant.name} would compute too many scores: got {self.score_count}, "
                f"expected at most {limits.score_count}; a score is one pair of a query and a "
                "key, or work that takes as long",
                limit=limits.score_count,
            )
        if self.bytes_out > limits.response_bytes:
            hint = f" ({weight_forms.SMALLER_FORMS})" if "weights" in self.outputs else ""
            raise PayloadTooLarge(
                f"the tensors of the response would be too large: got {self.bytes_out} bytes, "
                f"expected at most {limits.response_bytes}{hint}",
                limit=limits.response_bytes,
            )
        if self.bytes > limits.job_bytes:
            raise PayloadTooLarge(
                "the tensors of request and response are too large: got "
                f"{self.bytes} bytes, expected at most {limits.job_bytes}",
                limit=limits.job_bytes,
            )


def parse_parameters(variant: Variant, fields: JobFields) -> pydantic.BaseModel:
    """Returns the parameters of a request, those of its layer included.

    Raises:
        InvalidContent: a parameter is wrong, or both the request and its layer have it.
    """
    options = parse_layer_options(fields)
    own = {} if options is None else options.parameters
    for name in own:
        if name in fields.parameters:
            raise InvalidContent(
                f"{name} is given twice: in parameters and in layer",
                pointer=pointer_to("layer", name),
            )
    try:
        return variant.parse({**fields.parameters, **own})
    except InvalidContent as error:
        for name in own:
            place = pointer_to("parameters", name)
            if error.pointer is not None and error.pointer.startswith(place):
                error.pointer = pointer_to("layer", name) + error.pointer.removeprefix(place)
        raise


def _select_outputs(variant: Variant, fields: RunFields, form: WeightForm) -> frozenset[str]:
    named = fields.outputs
    if form.is_summary and "weights" not in variant.outputs:
        raise InvalidContent(f"{variant.name} has no weights", pointer="/weights")
    if named is None:
        named = [n for n in ("output", "weights") if n in variant.outputs]
        return frozenset(named) - ({"weights"} if form == NONE else set())
    for i, name in enumerate(named):
        if name not in variant.outputs:
            raise InvalidContent(
                f"{variant.name} has no output {name!r}: expected {', '.join(variant.outputs)}",
                pointer=pointer_to("outputs", i),
            )
        if name in named[:i]:
            raise InvalidContent(f"{name} is named twice", pointer=pointer_to("outputs", i))
    if not named:
        raise InvalidContent("outputs is empty: expected at least one name", pointer="/outputs")
    if form == NONE and "weights" in named:
        raise InvalidContent('weights is "none", but outputs names weights', pointer="/weights")
    if form.is_summary and "weights" not in named:
        raise InvalidContent(
            f"weights is {format_value(form.as_json)}, but outputs does not name weights",
            pointer="/weights",
        )
    return frozenset(named)
