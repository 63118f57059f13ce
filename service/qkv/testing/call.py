"""`Call`: the inputs and parameters of one call of attention, as the oracle draws them.

`families` creates calls; `reference`, `budget`, `known_bugs` and `runner` read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from qkv.attention.variant import Variant

STATE: Final = "state.sums"
"""The state before the tokens among the inputs of `gated`, and the one behind them as a result."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a variant.

    Attributes:
        variant: the variant that the function claims to compute.
        inputs: tensors on the CPU by input name, in the order of the variant's signature.
        parameters: the parameters as the caller of `verify` wrote them.
        dtype: the dtype of the floating inputs.
        grad_output: the gradient of the output, in `dtype`; None: gradients are not checked.
        flags: changes of the formula, which only wrong variants have (`known_bugs`).
    """

    variant: Variant
    inputs: Mapping[str, Tensor]
    parameters: Mapping[str, Any]
    dtype: torch.dtype
    grad_output: Tensor | None = None
    flags: frozenset[str] = field(default_factory=frozenset)

    @property
    def positional(self) -> list[str]:
        """The names of the inputs that every call with these parameters has: they are passed by
        position."""
        return self.variant.required_names(self.variant.parse(self.parameters))

    @property
    def keywords(self) -> list[str]:
        """The names of the other inputs and of the parameters: they are passed by keyword."""
        positional = self.positional
        return [n for n in self.inputs if n not in positional] + list(self.parameters)

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """The size of each axis by its letter, from the inputs that do not broadcast.

        Raises:
            InvalidContent: the sizes, the parameters and the inputs do not fit.
        """
        sizes = {
            letter: size
            for name, x in self.inputs.items()
            if not (spec := self.variant.tensors[name]).broadcasts or spec.may_omit_last
            # an axis that is omitted has the size 1
            for letter, size in zip(spec.letters, (*x.shape, 1), strict=False)
        }
        parameters = self.variant.parse(self.parameters)
        return {**sizes, **self.variant.infer_sizes(sizes, parameters, self.inputs)}

    @cached_property
    def parsed(self) -> dict[str, Any]:
        """The parameters after validation.

        Raises:
            InvalidContent: the variant has no such parameter, or the value is out of bounds.
        """
        return self.variant.parse(self.parameters).model_dump(exclude_unset=True)

    @cached_property
    def exact_inputs(self) -> dict[str, Tensor]:
        """The inputs in float64, with zeros for NaN: a right function does not see the NaN."""
        return {
            n: x.double().nan_to_num(0.0, torch.inf, -torch.inf) if x.is_floating_point() else x
            for n, x in self.inputs.items()
        }

    @property
    def arguments(self) -> dict[str, Any]:
        """The exact inputs and the parameters, as the functions of the variant's file take them."""
        return {**self.to_arguments(self.exact_inputs), **self.parsed}

    def to_arguments(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns tensors by input name as those functions take them: with every axis."""
        found = {}
        for name, x in tensors.items():
            spec = self.variant.tensors[name]
            whole = x[..., None] if spec.may_omit_last and x.ndim < len(spec.letters) else x
            found[name if name == STATE else spec.argument] = whole
        return self.variant.with_state(found)

    @property
    def is_recurrence(self) -> bool:
        """True if the formula is that of `recurrence`."""
        return self.variant.name == "gated"

    @property
    def state_shape(self) -> tuple[int, ...]:
        """B, T, D and E: the shape of the state of a recurrence."""
        sizes = self.axis_sizes
        return tuple(sizes[x] for x in "BTDE")

    @property
    def chunk(self) -> int:
        """The tokens of a chunk of a recurrence."""
        return int(self.parsed.get("chunk", 64))

    @property
    def has_gradients(self) -> bool:
        """True if gradients are judged. Those of decays and betas are not."""
        if self.is_recurrence and self.parsed.get("rule", "linear") != "linear":
            return False
        return self.variant.backward is not None

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        """B, H, L and S of a variant with queries and keys."""
        (B, H, L, _), S = self.inputs["query"].shape, self.inputs["key"].shape[2]
        return B, H, L, S


Change = Callable[[Call], Call]
"""Returns a call with a known bug; the same call if the bug has no effect on it."""


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the state of a recurrence: float32 beside narrow inputs."""
    return torch.promote_types(dtype, torch.float32)
