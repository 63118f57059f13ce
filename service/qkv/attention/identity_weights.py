"""The default weights of a variant: its output for the identity as values.

`variant.Variant` uses `IdentityWeights`, `catalogue` `weights_letters`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from qkv.attention.common.score_blocks import score_dtype
from qkv.attention.common.visibility import row_blocks
from qkv.attention.signature import Input, Output

__all__ = ["IdentityWeights", "weights_letters"]

_ELEMENTS: Final = 1 << 24  # of weights that are computed at once, and of the identity's columns
_TOLERANCE: Final = 64  # roundings of a row's sum between two ways to compute it


def weights_letters(inputs: Mapping[str, Input], output: Output) -> tuple[str, ...] | None:
    """Returns the axes of the weights that `IdentityWeights` computes.

    None if no required input `value` (..., S, E) has the E of the output (..., L, E).
    """
    value = inputs.get("value")
    if value is None or value.is_optional or len(output.letters) != 4:
        return None
    if value.letters[-1] != output.letters[-1] or "float32" not in value.dtypes:
        return None
    return (*output.letters[:-1], value.letters[-2])


class IdentityWeights:
    """A function that computes a block of rows of A, as output = A @ value.

    A is the output with the identity as values. Large matrices are computed in blocks of query
    rows, if the rows do not depend on one another: each block is checked on random values.
    Otherwise the whole matrix is computed once.

    Args:
        attend: returns the output; takes the arguments.
        inputs: of the variant, with `weights_letters`.
        output: of the variant.
        arguments: of `attend`; floating tensors are computed in float32 at least.
        elements: numbers of the weights that are computed at once, if blocks of rows are right.
    """

    def __init__(
        self,
        attend: Callable[..., Tensor],
        inputs: Mapping[str, Input],
        output: Output,
        arguments: Mapping[str, Any],
        elements: int = _ELEMENTS,
    ) -> None:
        self._attend, self._elements = attend, elements
        self._value_spec = value_spec = inputs["value"]
        self._given: Tensor = arguments[value_spec.argument]
        self._dtype = dtype = score_dtype(self._given.dtype)
        self._wide = wide = {
            n: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
            for n, v in arguments.items()
        }
        others = [i for i in inputs.values() if i is not value_spec]
        self._has_fixed_width = any(value_spec.letters[-1] in i.letters for i in others)
        self._rows_axis = rows_axis = output.letters[-2]
        self._sliced = [
            i for i in others if rows_axis in i.letters and wide.get(i.argument) is not None
        ]
        self._can_slice = rows_axis not in value_spec.letters and bool(self._sliced)

    def __call__(self, rows: slice) -> Tensor:
        """Returns a block of rows."""
        if self._can_slice:
            full = self._probed_output
            is_large = full.shape[:-1].numel() * self._given.shape[-2] > self._elements
            if is_large and (block := self._from_row_blocks(rows)) is not None:
                return block
            self._can_slice = False
        return self._whole[..., rows, :]

    def _from_row_blocks(self, rows: slice) -> Tensor | None:
        """Returns a block of rows from smaller blocks; None if one is wrong on random values."""
        full, probe, parts = self._probed_output, self._probe, []
        planes, S = full.shape[:-2].numel(), self._given.shape[-2]
        for block in row_blocks(rows.stop - rows.start, planes * S, self._elements):
            block_rows = slice(rows.start + block.start, rows.start + block.stop)
            block_arguments = self._slice_rows(block_rows)
            part = self._all_columns(block_arguments)
            output = self._attend_to(probe, block_arguments)
            size = part.abs().sum(-1, keepdim=True) * probe.abs().max()
            bound = _TOLERANCE * torch.finfo(self._dtype).eps * size
            if not bool(((output - full[..., block_rows, :]).abs() <= bound).all()):
                return None  # a row depends on its position, or on other rows
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)

    def _slice_rows(self, rows: slice) -> dict[str, Any]:
        """Returns the arguments with these rows only."""
        sliced = dict(self._wide)
        for spec in self._sliced:
            axis, tensor = spec.letters.index(self._rows_axis), self._wide[spec.argument]
            if tensor.shape[axis] > 1:
                sliced[spec.argument] = tensor.narrow(axis, rows.start, rows.stop - rows.start)
        return sliced

    def _all_columns(self, block_arguments: Mapping[str, Any]) -> Tensor:
        """Returns the output with the identity as values, computed in blocks of columns."""
        given, dtype, (S, E) = self._given, self._dtype, self._given.shape[-2:]
        planes = given.shape[:-2].numel()
        step = E if self._has_fixed_width else max(1, min(S, self._elements // (planes * S)))
        parts = []
        for start in range(0, S, step):
            count = min(step, S - start)
            width = step if self._has_fixed_width else count
            columns = given.new_zeros((*given.shape[:-1], width), dtype=dtype)
            columns[..., start : start + count, :count] = torch.eye(
                count, dtype=dtype, device=given.device
            )
            parts.append(self._attend_to(columns, block_arguments)[..., :count])
        return torch.cat(parts, -1)

    def _attend_to(self, values: Tensor, block_arguments: Mapping[str, Any]) -> Tensor:
        return self._attend(**{**block_arguments, self._value_spec.argument: values})

    @cached_property
    def _probe(self) -> Tensor:
        random = torch.Generator().manual_seed(0)
        values = torch.randn(self._given.shape, generator=random, dtype=self._dtype)
        return values.to(self._given.device)

    @cached_property
    def _probed_output(self) -> Tensor:
        return self._attend_to(self._probe, self._wide)

    @cached_property
    def _whole(self) -> Tensor:
        return self._all_columns(self._wide)
