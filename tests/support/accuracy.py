"""Measures the errors of a variant against its float64 reference, entry by entry."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from support.accuracy_cases import LONG_LENGTH, Case, make_inputs

_BLOCK_ROWS: Final = (
    16  # rows in each of three blocks, if not all rows are compared with the reference
)


class LargestErrors(NamedTuple):
    """Largest errors of one result, in the units of docs/accuracy.md."""

    output: float
    weights: float


class CaseErrors(NamedTuple):
    """Errors of all entries of a result, and their units."""

    case: Case
    errors: dict[str, Tensor]
    units: dict[str, Tensor]

    @property
    def largest(self) -> LargestErrors:
        """The largest errors; 0 if no exact value fits the dtype."""
        peaks = {n: float((e / self.units[n]).max()) for n, e in self.errors.items()}
        return LargestErrors(peaks["output"], peaks["weights"])


def weights_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the weights, which is also the narrowest dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def measure(case: Case, seed: int) -> CaseErrors:
    """Returns the errors of `attend`, entry by entry."""
    tensors = make_inputs(case, seed)
    outputs = frozenset({"output", "weights"})
    result = case.variant.attend(**tensors, **case.parameters, outputs=outputs)
    errors: dict[str, list[Tensor]] = {"output": [], "weights": []}
    units: dict[str, list[Tensor]] = {"output": [], "weights": []}
    for rows in _select_row_blocks(case):
        reference = compute_reference(case, tensors, rows)
        for name, scale in _compute_scales(case, tensors, reference).items():
            actual, expected = getattr(result, name), getattr(reference, name)
            actual = actual[:, :, rows] if rows else actual
            info = torch.finfo(actual.dtype)
            unit = info.eps * scale.clamp(min=info.smallest_normal)
            errors[name].append(_compute_errors(actual, expected, unit).flatten())
            units[name].append(unit.flatten())
    return CaseErrors(
        case,
        {name: torch.cat(parts) for name, parts in errors.items()},
        {name: torch.cat(parts) for name, parts in units.items()},
    )


def measure_sensitivity(case: Case, seed: int) -> dict[str, Tensor]:
    """Returns the change of the reference if each input changes by one eps of the dtype of sums.

    Each number moves up or down. No computation in that dtype can have a smaller error.
    """
    tensors = make_inputs(case, seed)
    eps = torch.finfo(weights_dtype_of(case.dtype)).eps
    generator = torch.Generator().manual_seed(seed)

    def perturb(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        signs = torch.randint(0, 2, x.shape, generator=generator).double() * 2 - 1
        return x.double() * (1 + eps * signs)

    perturbed = {name: perturb(x) for name, x in tensors.items()}
    changes: dict[str, list[Tensor]] = {"output": [], "weights": []}
    for rows in _select_row_blocks(case):
        first, second = (compute_reference(case, x, rows) for x in (tensors, perturbed))
        for name, parts in changes.items():
            change = (getattr(first, name) - getattr(second, name)).abs().nan_to_num(0.0)
            parts.append(change.amax(-1, keepdim=True).expand_as(change).flatten())
    return {name: torch.cat(parts) for name, parts in changes.items()}


def _select_row_blocks(case: Case) -> list[slice | None]:
    """Returns the query rows to compare with the reference; None: all.

    Without an axis of their own, queries are at the positions of their keys.
    """
    letters = {x for spec in case.variant.inputs.values() for x in spec.letters}
    if case.N < LONG_LENGTH or "L" not in letters:
        return [None]
    starts = (0, case.N // 2 - _BLOCK_ROWS // 2, case.N - _BLOCK_ROWS)
    return [slice(start, start + _BLOCK_ROWS) for start in starts]


def compute_reference(case: Case, tensors: dict[str, Tensor], rows: slice | None) -> Any:
    """Returns the result of the reference, or some rows of it."""
    arguments, parameters = dict(tensors), case.parameters
    if rows is not None:
        query = case.variant.inputs["query"].argument
        arguments[query] = arguments[query][:, :, rows]
        if case.causal:
            parameters["query_offset"] = rows.start
    result: Any = case.variant.reference(**arguments, **parameters)
    return result


def _compute_scales(case: Case, tensors: dict[str, Tensor], reference: Any) -> dict[str, Tensor]:
    """Returns the mass of each entry of the output, and the largest weight of each row."""
    A = reference.weights.abs()
    if (value := getattr(reference, "value", None)) is None:  # otherwise the variant computes it
        value = tensors[case.variant.inputs["value"].argument].double().nan_to_num(0.0)
        value = value.repeat_interleave(A.shape[1] // value.shape[1], 1)
    rows = A if A.ndim == value.ndim else A[:, None]  # each item is one row, without an axis for it
    mass: Tensor = (rows @ value.abs()).view(reference.output.shape)
    return {"output": mass, "weights": A.amax(-1, keepdim=True).expand_as(A)}


def _compute_errors(actual: Tensor, expected: Tensor, unit: Tensor) -> Tensor:
    """Returns |actual - expected|.

    NaN gives inf, and so does inf if the exact value fits the dtype. If it does not fit with an
    error of one unit, as where huge terms cancel, or if the reference has overflowed, the error
    is 0.
    """
    is_finite = (expected.abs() + unit).to(actual.dtype).isfinite()
    error = (actual.double() - expected).abs()
    error = error.masked_fill(~actual.isfinite(), torch.inf).masked_fill(~is_finite, 0.0)
    return error.masked_fill(actual.isnan() & ~expected.isnan(), torch.inf)
