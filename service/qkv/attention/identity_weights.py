"""The default weights of a variant: its output for the identity as values.

`variant.Variant` uses `IdentityWeights`, `catalogue` `weights_letters`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, Final

import torch
from torch import Tensor

from qkv.attention.common.score_blocks import score_dtype
from qkv.attention.signature import Input, Output

_ELEMENTS: Final = 1 << 24  # of weights that are computed at once, and of the identity's columns
_COLUMNS: Final = 64  # of values whose gradient is computed: products are fast from about there
_SMALL: Final = 1 << 18  # weights that are faster at once than in blocks
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
    rows, if the rows do not depend on one another, by the first of these ways that is right on
    random values:

    - The gradient of the values. If each row of the output has a column of its own, it is A^T, for
      products of as many columns as the block has rows.
    - The identity, whose products have S columns.

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
        can_slice = rows_axis not in value_spec.letters and bool(self._sliced)
        self._ways = [self._by_gradient, self._by_identity] if can_slice else []

    def __call__(self, rows: slice) -> Tensor:
        """Returns a block of rows."""
        while self._ways and self._is_large:
            if (block := self._ways[0](rows)) is not None:
                return block
            del self._ways[0]
        return self._whole[..., rows, :]

    @property
    def _is_large(self) -> bool:
        count = self._probed_output.shape[:-1].numel() * self._given.shape[-2]
        return count > min(self._elements, _SMALL)

    def _by_gradient(self, rows: slice) -> Tensor | None:
        """Returns rows by the gradient of the values; None if there is none, or it is wrong."""
        E, planes = self._given.shape[-1], self._given.shape[:-2].numel()
        heads = self._probed_output.shape[:-2].numel() // planes  # that read the same values
        columns = E if self._has_fixed_width else max(_COLUMNS, heads)
        return self._in_blocks(rows, columns // heads, partial(self._gradient_block, heads))

    def _by_identity(self, rows: slice) -> Tensor | None:
        """Returns rows by the identity; None if one depends on its position, or on other rows."""
        return self._in_blocks(rows, rows.stop - rows.start, self._identity_block)

    def _in_blocks(
        self, rows: slice, at_most: int, compute: Callable[[slice], Tensor | None]
    ) -> Tensor | None:
        """Returns rows from blocks of `at_most` of them, or fewer; None if a block is None."""
        planes, S = self._probed_output.shape[:-2].numel(), self._given.shape[-2]
        at_once = min(at_most, max(1, self._elements // (planes * S)))
        parts = []
        for start in range(rows.start, rows.stop, at_once or 1):
            block = slice(start, min(rows.stop, start + at_once))
            if not at_once or (part := compute(block)) is None:
                return None
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)

    def _gradient_block(self, heads: int, rows: slice) -> Tensor | None:
        """Returns a block of rows: each row of each head has a column of its own."""
        given, count = self._given, heads * (rows.stop - rows.start)
        width = given.shape[-1] if self._has_fixed_width else count
        one_hot = torch.eye(count, width, dtype=self._dtype, device=given.device)
        with torch.inference_mode(False), torch.enable_grad():
            values = given.new_zeros((*given.shape[:-1], width), dtype=self._dtype)
            output = self._attend_to(values.requires_grad_(), self._slice_rows(self._saved, rows))
            one_hot = one_hot.view(heads, -1, width).repeat(given.shape[:-2].numel(), 1, 1)
            try:
                (gradient,) = torch.autograd.grad(output, values, one_hot.view(output.shape))
            except RuntimeError:  # `attend` has no gradient, or fails to compute it
                return None
        columns = gradient[..., :count].flatten(0, -3).mT
        products = columns @ self._probe.flatten(0, -3)
        weights = columns.reshape(*output.shape[:-1], given.shape[-2])
        is_right = self._is_right(weights, products.view(*output.shape[:-1], -1), rows)
        return weights if is_right else None

    def _identity_block(self, rows: slice) -> Tensor | None:
        block_arguments = self._slice_rows(self._wide, rows)
        weights = self._all_columns(block_arguments)
        output = self._attend_to(self._probe, block_arguments)
        return weights if self._is_right(weights, output, rows) else None

    def _is_right(self, weights: Tensor, output: Tensor, rows: slice) -> bool:
        """Returns True if the output of a block for random values is that of all rows."""
        size = torch.linalg.vector_norm(weights, 1, -1, keepdim=True) * self._probe.abs().max()
        bound = _TOLERANCE * torch.finfo(self._dtype).eps * size
        return bool(((output - self._probed_output[..., rows, :]).abs() <= bound).all())

    def _slice_rows(self, arguments: Mapping[str, Any], rows: slice) -> dict[str, Any]:
        """Returns the arguments with these rows only."""
        sliced = dict(arguments)
        for spec in self._sliced:
            axis, tensor = spec.letters.index(self._rows_axis), arguments[spec.argument]
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
    def _saved(self) -> dict[str, Any]:
        """The arguments as tensors that autograd may save."""
        return {
            n: v.clone() if isinstance(v, Tensor) and v.is_inference() else v
            for n, v in self._wide.items()
        }

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
