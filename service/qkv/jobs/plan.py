"""A plan: all of a validated request but its numbers, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, NamedTuple, Self, TypeVar

import pydantic

from qkv.attention import catalogue
from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.signature import STATE, VERSION
from qkv.attention.step import STEPS
from qkv.attention.variant import Variant
from qkv.errors import PayloadTooLarge
from qkv.jobs import state, weight_forms
from qkv.jobs.fields import parse_fields
from qkv.jobs.inputs import Inputs
from qkv.jobs.layer_inputs import find_loaded
from qkv.jobs.load import Load
from qkv.jobs.loaded.loaded_layers import NO_LAYERS, LoadedLayers
from qkv.jobs.run_fields import RunFields, parse_parameters, select_outputs
from qkv.jobs.steps import check_steps
from qkv.jobs.weight_forms import FULL, WeightForm
from qkv.tensors import RawTensor, nbytes
from qkv.wire.message import Message

_T = TypeVar("_T")

_SMALL_FLOPS: Final = 1 << 26  # half a millisecond of one thread, roughly
SMALL_BYTES: Final = 1 << 21
"""A small job has fewer bytes of tensors, inputs and outputs together."""
_SMALL_SCORES: Final = 1 << 20


class Limits(NamedTuple):
    """The limits of a job, and the loaded layers that it may name.

    Attributes:
        response_bytes: bytes of the tensors in the response.
        job_bytes: bytes of the tensors in request and response together.
        score_count: scores that a variant may compute, one per pair of a query and a key.
        layers: those that the operator loaded.
    """

    response_bytes: int
    job_bytes: int
    score_count: int = 1 << 34
    layers: LoadedLayers = NO_LAYERS


class BatchKey:
    """A batch key that computes its hash once: the queue looks it up several times.

    Args:
        parts: plans with equal parts have equal keys.

    Attributes:
        parts: as the argument.
    """

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:  # the usual case: jobs of one plan
            return True
        return isinstance(other, BatchKey) and self.parts == other.parts


class Measurement(NamedTuple):
    """How a plan runs for a comparison or a sweep. No field of a request says so.

    Attributes:
        alone: the job is alone in its batch, runs on the device's thread however small it is, and
            borrows no idle threads, so that its time is its own.
        peak: the result has the peak of memory. Its time means nothing.
        float64: inputs and layer are widened on the device, and the outputs are float64.
    """

    alone: bool = False
    peak: bool = False
    float64: bool = False


_UNMEASURED: Final = Measurement()


@dataclass(frozen=True, eq=False)
class Plan:
    """A call of a variant.

    Attributes:
        variant: the variant.
        parameters: of the request, those of its layer included.
        inputs: the tensors and the layer, without their numbers.
        outputs: names of the outputs to return.
        form: the form of the weights, if they are returned.
        measurement: how it runs.
        fields: of the request, as it has them.
    """

    variant: Variant
    parameters: pydantic.BaseModel
    inputs: Inputs
    outputs: frozenset[str]
    form: WeightForm = FULL
    measurement: Measurement = _UNMEASURED
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_message(cls, variant_name: str, message: Message, limits: Limits) -> Self:
        """Finds the variant and checks the request against it, but for its numbers.

        Raises:
            NotFound: the variant does not exist.
            InvalidContent: a field, parameter, tensor, dtype or shape is wrong.
            PayloadTooLarge: the job exceeds the limits.
        """
        variant = catalogue.find(variant_name)
        fields = parse_fields(message, RunFields)
        loaded = find_loaded(fields, message, limits.layers)
        parameters = parse_parameters(variant, fields, loaded)
        form = weight_forms.parse(fields.weights)
        inputs = Inputs.from_message(variant, parameters, fields, message, loaded)
        outputs = select_outputs(variant, parameters, fields, form, inputs.names)
        state.check_tokens(variant, inputs.axes.sizes, sorted(outputs))
        if form.is_summary:
            weight_forms.check(form, variant.name, variant.outputs["weights"], inputs.axes.sizes)
        form = form if "weights" in outputs else FULL
        plan = cls(variant, parameters, inputs, outputs, form, fields=message.fields)
        if plan.has_state:
            state.check_fit(variant, parameters, inputs.axes.sizes, inputs.layer)
        if plan.has_steps:
            steps = [n for n in plan.output_names if n.startswith(STEPS)]
            steps_bytes = sum(nbytes(plan.dtype_of(n), plan.output_shape(n)) for n in steps)
            check_steps(inputs.axes.sizes, steps_bytes, inputs.specs)
        plan.check_size(limits)
        return plan

    def measured(self, *, peak: bool = False, float64: bool = False) -> Self:
        """Returns the plan of the same run, alone; arguments as of `Measurement`."""
        return replace(self, measurement=Measurement(True, peak, float64))

    @property
    def is_inference(self) -> bool:
        """True if a client has asked for the run: statistics count it."""
        return not self.measurement.alone

    def derived(self, compute: Callable[[Plan], _T]) -> _T:
        """Returns what a reader of plans computes from one, and computes it once.

        Args:
            compute: the function of a module; always the same object.
        """
        try:
            value: _T = self._derived[compute]
        except KeyError:
            value = self._derived[compute] = compute(self)
        return value

    @cached_property
    def _derived(self) -> dict[Callable[[Plan], Any], Any]:
        return {}

    @cached_property
    def runs_alone(self) -> bool:
        """True if a job of the plan is never stacked."""
        return self.measurement.alone

    @cached_property
    def shared_names(self) -> Sequence[str]:
        """The tensors without B, which all items of a request share."""
        return [name for name in self.inputs.specs if not self.has_batch(name)]

    @cached_property
    def batch_key(self) -> BatchKey:
        """Class, variant, parameters and outputs; names, dtypes and shapes of the tensors, without
        B; the name of a loaded layer."""
        shapes, dtypes = self.inputs.shapes, self.inputs.dtypes
        axes = tuple(
            (name, dtypes[name], shapes[name][1 if self.has_batch(name) else 0 :])
            for name in self.inputs.specs
        )
        layer = self.inputs.layer
        weights = () if layer is None else tuple((n, t.shape) for n, t in layer.tensors.items())
        options = None if layer is None else layer.options.model_dump_json()
        returned = self.outputs, self.form
        parameters: Any = self.parameters  # they are frozen, and have a hash
        of_layer = weights, options, self.layer_name
        return BatchKey((type(self), self.variant.name, parameters, axes, *returned, *of_layer))

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

    @cached_property
    def load(self) -> Load:
        """The work of a job."""
        return Load(1, self.bytes, self.flops)

    @property
    def layer_name(self) -> str | None:
        """The name of the loaded layer; None: the plan has none."""
        layer = self.inputs.layer
        return None if layer is None or layer.loaded is None else layer.loaded.name

    @property
    def roles(self) -> tuple[str, ...]:
        """The inputs that a layer projects."""
        return tuple(role for role in ROLES if role in self.variant.inputs)

    def dtype_of(self, output: str) -> str:
        """Returns the dtype of an output in the response."""
        if self.measurement.float64:
            return "float64"
        if output.startswith(STATE):
            return self._dtype_of_state(output)
        if output.startswith(STEPS):
            return "float64"
        if self.variant.outputs[output].is_exact:
            return "float64" if self.inputs.dtype == "float64" else "float32"
        return self.inputs.dtype

    def _dtype_of_state(self, name: str) -> str:
        """Returns the dtype of a tensor of the state: sums are wide, the tail is as it was sent."""
        if (like := state.input_of_tail(name)) is not None:
            return self.inputs.dtypes.get(like, self.inputs.dtype)
        return "float64" if "float64" in self.variant.tensors[name].dtypes else "int64"

    def output_shape(self, output: str) -> tuple[int, ...]:
        """Returns the shape of an output in the response."""
        groups = self.variant.groups.values()
        specs = next((specs for specs in groups if output in specs), self.variant.outputs)
        return self.inputs.output_shape(specs[output])

    @cached_property
    def has_state(self) -> bool:
        """True if the request brings a state or asks for one."""
        return any(n.startswith(STATE) for n in (*self.inputs.specs, *self.outputs))

    @cached_property
    def has_steps(self) -> bool:
        """True if the request asks for steps."""
        return any(n.startswith(STEPS) for n in self.outputs)

    def check_numbers(self, tensors: Mapping[str, RawTensor]) -> None:
        """Checks lengths, and what a state belongs to.

        Raises:
            InvalidContent: a number is out of range, or the state is that of other requests.
        """
        if "key_lengths" in tensors:
            self.inputs.check_key_lengths(tensors)
        if VERSION in tensors:
            state.check_numbers(self.variant, self.parameters, self.inputs.dtype, tensors)

    @cached_property
    def is_small(self) -> bool:
        """True if the job takes about as long as handing it to another thread.

        The bounds also keep the slow path, which visits each pair of a query and a key, below
        50 ms.
        """
        pairs = math.prod(self.inputs.axes.sizes.get(letter, 1) for letter in "BHLS")
        return (
            not (self.has_steps or self.measurement.alone)
            and self.flops < _SMALL_FLOPS
            and self.bytes < SMALL_BYTES
            and max(self.score_count, pairs) < _SMALL_SCORES
        )

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """The parameters by name, as the variant's functions take them."""
        return {n: getattr(self.parameters, n) for n in type(self.parameters).model_fields}

    @cached_property
    def output_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """The dtype and shape of each output in the response, in its order."""
        names = [name for name in self.output_names if name in self.outputs]
        specs = {n: (self.dtype_of(n), self.output_shape(n)) for n in names}
        if self.form.is_summary:
            dtype, _ = specs.pop("weights")
            weights, axes = self.variant.outputs["weights"], self.inputs.axes
            sizes = weight_forms.form_sizes(self.form, weights, axes.sizes)
            for name, spec in weight_forms.form_tensors(self.form.kind, weights).items():
                shape = tuple(sizes[x] for x in spec.letters if x not in axes.omitted)
                specs[name] = "int64" if spec.is_integer else dtype, shape
        return specs

    @property
    def output_names(self) -> Sequence[str]:
        """The names that outputs may have, in the order of a response."""
        groups = self.variant.group_names(self.parameters, self.inputs.names)
        return [*self.variant.outputs, *(n for names in groups.values() for n in names)]

    @property
    def uses_sdpa(self) -> bool:
        """True if torch's SDPA kernel alone runs, without a layer, and may have idle threads: these
        would skew a measurement."""
        inputs = self.inputs
        return (
            self.is_inference
            and inputs.layer is None
            and self.variant.uses_sdpa(
                inputs.axes.sizes, self.parameters, self.outputs, inputs.specs
            )
        )

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

    def check_size(self, limits: Limits) -> None:
        """Checks the limits of a job.

        Raises:
            PayloadTooLarge: the job exceeds one.
        """
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
