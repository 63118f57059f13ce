"""Comparison of a call of any variant with its reference, within the bound of its roundings."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from support.dtypes import exact_dtype
from support.variant_bounds import bounds_of, is_near
from support.variant_calls import OUTPUT, VARIANTS, with_padding

ONE_PATH: Final = ("efficient", "linear", "taylor")
"""Variants whose output has the same bits alone and beside other outputs."""


def assert_agrees(name: str, *tensors: Tensor | None, **arguments: Any) -> None:
    """Checks the outputs of a call: dtypes, numbers, zeros, and a block of rows of the weights.

    Args:
        name: of the variant.
        tensors: the first inputs, in their order; None leaves one out.
        arguments: other tensors by argument, and parameters.
    """
    variant = VARIANTS[name]
    names = [i.argument for i in variant.inputs.values()]
    every: dict[str, Any] = dict(zip(names, tensors, strict=False)) | arguments
    every = {n: x for n, x in every.items() if x is not None or n not in names}
    truth = variant.reference(**every)
    clean = with_padding(name, {n: x for n, x in every.items() if n in names}, 0.0)
    parameters = {n: x for n, x in every.items() if n not in names}
    bounds = bounds_of(name, clean, parameters, truth)
    dtype = next(iter(clean.values())).dtype
    sets = dict.fromkeys([OUTPUT, frozenset(variant.outputs), *(frozenset([n]) for n in bounds)])
    results = {outputs: variant.attend(**every, outputs=outputs) for outputs in sets}
    for outputs, found in results.items():
        for n, spec in variant.outputs.items():
            tensor = getattr(found, n)
            assert (tensor is not None) == (n in outputs)
            if tensor is not None:
                assert tensor.dtype == (exact_dtype(dtype) if spec.is_exact else dtype)
                if n in bounds:
                    assert is_near(tensor, getattr(truth, n), bounds[n]), (n, outputs)
        assert_zeros(found, truth)
        if name in ONE_PATH and found.output is not None:
            assert torch.equal(found.output, results[OUTPUT].output)
    if "weights" in bounds and truth.weights.ndim == 4:
        L = truth.weights.shape[-2]
        for rows in (slice(L // 2, L), slice(0, 1)):
            block = variant.row_block_function(every)(rows)
            assert block.dtype == exact_dtype(dtype)
            part, bound = (x[..., rows, :] for x in (truth.weights, bounds["weights"]))
            assert is_near(block, part, bound), rows


def assert_zeros(found: Any, truth: Any) -> None:
    """Checks that a score of -inf has no weight, and that a row of them is zeros."""
    if getattr(truth, "scores", None) is None or truth.scores.ndim < 4:
        return
    hidden = truth.scores == -torch.inf
    if found.weights is not None:
        assert not found.weights[hidden].any()
    if found.output is not None:
        assert not found.output[hidden.all(-1)].any()
