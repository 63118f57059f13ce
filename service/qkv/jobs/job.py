"""A job: a plan with the tensors of one request."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Self

from qkv.attention.layers.layer import Layer
from qkv.jobs.plan import Limits, Plan
from qkv.tensors import RawTensor
from qkv.wire.message import Message

__all__ = ["Job"]


class Job:
    """A plan with the numbers of one request.

    Args:
        plan: all but the numbers.
        tensors: the variant's inputs, or the embeddings of its layer, in the request's shapes.
        layer: the layer that projects them, or None.

    Attributes:
        plan, tensors, layer: as the arguments.
    """

    __slots__ = ("__weakref__", "layer", "plan", "tensors")

    def __init__(
        self, plan: Plan, tensors: Mapping[str, RawTensor], layer: Layer | None = None
    ) -> None:
        self.plan, self.tensors, self.layer = plan, tensors, layer

    @classmethod
    def from_message(cls, plan: Plan, message: Message) -> Self:
        """Returns the job of a message with the names, dtypes and shapes of a plan.

        Raises:
            InvalidContent: a number is wrong.
        """
        return cls.checked(plan, plan.inputs.read_tensors(message), plan.inputs.read_layer(message))

    @classmethod
    def checked(
        cls, plan: Plan, tensors: Mapping[str, RawTensor], layer: Layer | None = None
    ) -> Self:
        """Returns the job of these tensors, whose dtypes and shapes are those of the plan.

        Raises:
            InvalidContent: a number is wrong.
        """
        plan.check_numbers(tensors)
        return cls(plan, tensors, layer)

    @classmethod
    def new(cls, kind: type[Plan], variant: str, message: Message, limits: Limits) -> Self:
        """Returns the job of a request that is not expected again.

        Raises:
            QkvError: from `kind.from_message`, or a number is wrong.
        """
        return cls.from_message(kind.from_message(variant, message, limits), message)

    @property
    def batch_key(self) -> Hashable:
        """Jobs with equal keys may be stacked along B and run as one batch."""
        plan = self.plan
        if plan.runs_alone:
            return id(self)
        # a loaded layer is in the key of the plan, by its name
        is_own = self.layer is not None and self.layer.loaded is None
        if not is_own and not plan.shared_names:
            return plan.batch_key
        # the items of a request share an input without B: only the same object is equal
        shared = [id(self.tensors[name]) for name in plan.shared_names]
        return plan.batch_key, *shared, id(self.layer) if is_own else None
