"""A validated request: variant, parameters, raw tensors, what to return, and its batching key."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, NamedTuple, Self

import pydantic

from qkv.attention import catalogue
from qkv.attention.catalogue import Variant
from qkv.attention.layers.projections import ROLES
from qkv.errors import InvalidContent, TooLarge, pointer_to, shown
from qkv.jobs import weight_forms as forms
from qkv.jobs.fields import Fields, fields_of
from qkv.jobs.inputs import Inputs
from qkv.jobs.weight_forms import FULL, NONE, Form
from qkv.tensors import RawTensor, nbytes
from qkv.wire.message import Message

__all__ = ["SMALL_BYTES", "Job", "Limits", "Run"]

_SMALL_FLOPS: Final = 1 << 26  # about half a millisecond of one thread
SMALL_BYTES: Final = 1 << 21
"""Of a small job's tensors, in and out together: fewer."""
_SMALL_PAIRS: Final = 1 << 20


class Run(Fields):
    """The fields of a run."""

    outputs: Annotated[
        list[str] | None,
        pydantic.Field(description="What to return; null: output, and weights where there are."),
    ] = None
    weights: Annotated[
        Any, pydantic.Field(description="In what form the weights are answered: see `qkv.forms`.")
    ] = "full"


class Limits(NamedTuple):
    """What a request may ask for.

    Attributes:
        answer: bytes of the largest answer, tensors only.
        request: bytes of inputs and answer together, the most that may ever wait.
        scores: most scores that a variant which computes them may compute.
    """

    answer: int
    request: int
    scores: int = 1 << 34


@dataclass(frozen=True, eq=False)
class Job:
    """A request that can run: nothing in it is left to be found wrong.

    Attributes:
        inputs: its tensors and its layer.
        outputs: what to return.
        form: how the weights go back, where they do.
        is_inference: it answers what a caller asked a variant for, and is counted as that.
    """

    is_inference: ClassVar[bool] = True

    variant: Variant
    parameters: pydantic.BaseModel
    inputs: Inputs
    outputs: frozenset[str]
    form: Form = FULL

    @classmethod
    def of(cls, variant_name: str, message: Message, limits: Limits) -> Job:
        """Finds the variant and checks all that a request says against it.

        Raises:
            NotFound: no such variant or layer.
            InvalidContent: a field, parameter, tensor, dtype, shape or value is wrong.
            TooLarge: the answer, or the request and its answer, can never fit the limits.
        """
        variant = catalogue.find(variant_name)
        run = fields_of(message, Run)
        parameters, form = variant.parse(run.parameters), forms.parse(run.weights)
        outputs = _outputs(variant, run, form)
        inputs = Inputs.of(variant, parameters, run, message)
        if form.is_digest:
            forms.check(form, variant.name, variant.outputs["weights"], inputs.bound.sizes)
        job = cls(variant, parameters, inputs, outputs, form if "weights" in outputs else FULL)
        job._check_size(limits)
        return job

    @cached_property
    def key(self) -> Hashable:
        """Jobs with equal keys may run stacked along B."""
        axes = tuple(
            # without B it belongs to the whole request: only the very same tensor is equal
            (name, t.dtype, self.inputs.shapes[name][1:]) if self.has_batch(name) else (name, id(t))
            for name, t in self.inputs.tensors.items()
        )
        asked = self.outputs, self.form
        return self.variant.name, self.parameters, axes, *asked, id(self.inputs.layer)

    @property
    def batch(self) -> int:
        """Its items, the size of B."""
        return self.inputs.bound.sizes.get("B", 1)

    @cached_property
    def bytes_in(self) -> int:
        """Bytes of all tensors that came."""
        return self.inputs.nbytes

    @cached_property
    def bytes_out(self) -> int:
        """Bytes of all tensors that the answer holds."""
        return sum(nbytes(dtype, shape) for dtype, shape in self.answers.values())

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of the matrix products, projections included."""
        sizes, layer = self.inputs.bound.sizes, self.inputs.layer
        total = self.variant.flops(sizes)
        if layer is not None:
            for role, projection in zip(ROLES, layer.projections, strict=True):
                if role in self.roles:
                    batch, length, _ = self.inputs.embedding_shape(role)
                    total += 2 * batch * length * projection.weight.size
        if self.form.kind == "pool":  # values as wide as there are bins
            return total + self.variant.flops(sizes | {"E": min(self.form.size, sizes.get("S", 1))})
        return total + 2 * self._looked_at * sizes.get("D", 1)

    @property
    def roles(self) -> tuple[str, ...]:
        """What a layer projects for it."""
        return tuple(role for role in ROLES if role in self.variant.inputs)

    def dtype_of(self, output: str) -> str:
        """The dtype an output goes back in."""
        if self.variant.outputs[output].exact:
            return "float64" if self.inputs.dtype == "float64" else "float32"
        return self.inputs.dtype

    def answer_shape(self, output: str) -> tuple[int, ...]:
        """The shape an output goes back in."""
        return self.inputs.answer_shape(self.variant.outputs[output])

    @cached_property
    def is_small(self) -> bool:
        """Whether it is done sooner than it would be handed to another thread and back, or nearly;
        and within some 50 ms where its numbers have every query meet every key, one by one."""
        meetings = math.prod(self.inputs.bound.sizes.get(letter, 1) for letter in "BHLS")
        return (
            self.flops < _SMALL_FLOPS
            and self.bytes_in + self.bytes_out < SMALL_BYTES
            and max(self.pairs, meetings) < _SMALL_PAIRS
        )

    def again(self, tensors: Mapping[str, RawTensor]) -> Self:
        """The same job for other numbers, of the same names, dtypes and shapes; what has been
        found of those holds for it too."""
        twin = copy(self)
        twin.__dict__.pop("key", None)  # tells tensors without B apart
        object.__setattr__(twin, "inputs", self.inputs._replace(tensors=tensors))
        return twin

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """The parameters, by the names that the variant's functions give them."""
        return {n: getattr(self.parameters, n) for n in type(self.parameters).model_fields}

    @cached_property
    def answers(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """dtype and shape of each output, as it goes back."""
        found = {n: (self.dtype_of(n), self.answer_shape(n)) for n in self.outputs}
        if self.form.is_digest:
            dtype, _ = found.pop("weights")
            weights, bound = self.variant.outputs["weights"], self.inputs.bound
            extents = forms.extents(self.form, weights, bound.sizes)
            for name, part in forms.parts(self.form.kind, weights).items():
                shape = tuple(extents[x] for x in part.letters if x not in bound.dropped)
                found[name] = "int64" if part.is_whole else dtype, shape
        return found

    @property
    def is_fused(self) -> bool:
        """Whether nothing but torch's kernel is to run; a layer's products are not that."""
        inputs = self.inputs
        return inputs.layer is None and self.variant.fused(
            inputs.bound.sizes, self.parameters, self.outputs
        )

    @property
    def marks(self) -> dict[str, str]:
        """What an answer says of its weights, where it has them: `weights_are`."""
        if "weights" not in self.outputs:
            return {}
        return {"weights_are": self.variant.weights_are(self.parameters)}

    def has_batch(self, name: str) -> bool:
        """Whether an input has one item for each item of the batch."""
        return name not in self.variant.inputs or "B" in self.variant.inputs[name].letters

    @cached_property
    def pairs(self) -> int:
        """How many pairs of a query and a key are looked at, whether they are returned or not."""
        own = self.variant.pairs(self.inputs.bound.sizes, self.parameters)
        return own + (own if self.form.kind == "pool" else self._looked_at)

    @property
    def _looked_at(self) -> int:
        """How many weights a form is made of, beside those that make the output."""
        if self.form.kind not in ("rows", "top_k", "stats"):
            return 0
        weights = self.variant.outputs["weights"]
        rows = forms.parts("rows", weights) if self.form.rows else {"weights": weights}
        extents = forms.extents(self.form, weights, self.inputs.bound.sizes)
        return math.prod(extents[letter] for letter in rows["weights"].letters)

    def _check_size(self, limits: Limits) -> None:
        if self.pairs > limits.scores:
            raise TooLarge(
                f"{self.variant.name} would compute {self.pairs} scores, one for each pair of a "
                f"query and a key, or what takes as long; at most {limits.scores} are computed",
                limit=limits.scores,
            )
        if self.bytes_out > limits.answer:
            hint = f" ({forms.LESS})" if "weights" in self.outputs else ""
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


def _outputs(variant: Variant, run: Run, form: Form) -> frozenset[str]:
    named = run.outputs
    if form.is_digest and "weights" not in variant.outputs:
        raise InvalidContent(f"{variant.name} has no weights", pointer="/weights")
    if named is None:
        named = [n for n in ("output", "weights") if n in variant.outputs]
        return frozenset(named) - ({"weights"} if form == NONE else set())
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
    if form == NONE and "weights" in named:
        raise InvalidContent('outputs names weights, and "weights" says "none"', pointer="/weights")
    if form.is_digest and "weights" not in named:
        raise InvalidContent(
            f"weights came as {shown(form.asked)}, and outputs does not name weights",
            pointer="/weights",
        )
    return frozenset(named)
