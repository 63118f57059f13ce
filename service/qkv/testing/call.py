"""`Call`: the inputs and parameters of one call of attention, as the oracle draws them.

`families` creates calls; `reference`, `budget`, `known_bugs` and `runner` read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qkv.attention.variant import Variant


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
        """The names of the inputs that every call has: they are passed by position."""
        return [i.name for i in self.variant.inputs.values() if not i.is_optional]

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
            if not (spec := self.variant.inputs[name]).broadcasts
            for letter, size in zip(spec.letters, x.shape, strict=True)
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
        specs = self.variant.inputs
        tensors = {specs[n].argument: x for n, x in self.exact_inputs.items()}
        return {**tensors, **self.parsed}

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        """B, H, L and S of a variant with queries and keys."""
        (B, H, L, _), S = self.inputs["query"].shape, self.inputs["key"].shape[2]
        return B, H, L, S
