"""Sample inputs of a variant and their outputs, for the checks of its contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from qkv.attention.signature import Input, fixed_size
from qkv.attention.variant import Variant
from qkv.tensors import FLOATING

_SIZES: Final = dict(zip("BHGLSDEM", (2, 4, 2, 5, 7, 6, 3, 6), strict=True))
_OTHER_SIZE: Final = 4  # of a letter that is not among them


def sample(
    variant: Variant,
    dtype: torch.dtype,
    *,
    parameters: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Returns sizes of all letters, and random tensors by argument for the required inputs."""
    known, tensors = {**_SIZES, **(sizes or {})}, {}
    generator = torch.Generator().manual_seed(1)
    for spec in variant.inputs.values():
        if spec.is_optional:
            continue
        shape = [fixed_size(x) or known.setdefault(x, _OTHER_SIZE) for x in spec.letters]
        if set(spec.dtypes) & set(FLOATING):
            tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
            tensors[spec.argument] = tensor.to(dtype)
        else:
            tensors[spec.argument] = _full(spec, shape, known)
    every = variant.parse(dict(parameters or {}))
    known.update(variant.infer_sizes(known, every))
    return known, tensors


def _full(spec: Input, shape: list[int], sizes: Mapping[str, int]) -> Tensor:
    """Returns lengths that leave no padding, or a mask that hides nothing."""
    if "bool" in spec.dtypes:
        return torch.ones(shape, dtype=torch.bool)
    return torch.full(shape, sizes["S"])


def dtypes_of(variant: Variant) -> list[torch.dtype]:
    """Returns the floating dtypes that a variant takes."""
    first = next(iter(variant.inputs.values()))
    return [getattr(torch, name) for name in FLOATING if name in first.dtypes]


def output_of(variant: Variant, tensors: Mapping[str, Any]) -> Tensor:
    """Returns the output of a variant for these arguments."""
    output: Tensor = variant.attend(**tensors, outputs=frozenset({"output"})).output
    return output


def largest_number(tensors: Mapping[str, Tensor]) -> float:
    """Returns the largest absolute number of the floating tensors; 1 without one."""
    return max(
        (float(t.abs().max()) for t in tensors.values() if t.is_floating_point()), default=1.0
    )


def to_float64(value: Any) -> Any:
    """Returns a floating tensor in float64; other values unchanged."""
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if is_floating else value
