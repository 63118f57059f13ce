"""Averages of values of any size, for every variant whose weights are stochastic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from qkv.attention.sample_inputs import dtypes_of
from support.variant_bounds import bounds_of
from support.variant_calls import SIZES, VARIANTS, forward_output, known_parameters, random_inputs

SMALL: Final = {
    torch.float64: 2.0**-400,
    torch.float32: 2.0**-100,
    torch.bfloat16: 2.0**-100,
    torch.float16: 2.0**-8,
}
"""A small number of each dtype, far above the smallest one."""


def stochastic_parameters(name: str) -> list[dict[str, Any]]:
    """Returns the known parameters with which each row of the weights is an average."""
    variant = VARIANTS[name]
    return [
        parameters
        for parameters in known_parameters(name)
        if variant.weights_are(variant.parse(parameters)) == "stochastic"
    ]


STOCHASTIC: Final = [
    n for n, v in VARIANTS.items() if "value" in v.inputs and stochastic_parameters(n)
]
CAUSAL: Final = [n for n in STOCHASTIC if "causal" in VARIANTS[n].parameters.model_fields]


def value_of(name: str) -> str:
    """Returns the argument of the values."""
    return VARIANTS[name].inputs["value"].argument


def truth_and_bound_of_ones(
    name: str, tensors: dict[str, Tensor], parameters: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns the output for values of 1 and its largest error, which is in proportion to them."""
    ones = tensors | {value_of(name): torch.ones_like(tensors[value_of(name)])}
    truth = VARIANTS[name].reference(**ones, **parameters)
    return truth.output, bounds_of(name, ones, parameters, truth)["output"]


@pytest.mark.parametrize("length", [1, 50])
@pytest.mark.parametrize("name", STOCHASTIC)
def test_average_of_one_number_is_that_number(name: str, length: int) -> None:
    """Of the largest one too: no sum on the way overflows. With one key it is the key's value."""
    sizes = SIZES | {"L": length, "S": length, "N": length + 2}
    for parameters in stochastic_parameters(name):
        for dtype in dtypes_of(VARIANTS[name]):
            tensors = random_inputs(name, sizes, dtype)
            truth, bound = truth_and_bound_of_ones(name, tensors, parameters)
            for size in (torch.finfo(dtype).max, SMALL[dtype]):
                value = torch.full_like(tensors[value_of(name)], size)
                found = forward_output(name, tensors | {value_of(name): value}, parameters)
                error = (found.double() / size - truth).abs()
                assert (error <= bound).all(), (parameters, dtype, size, float(error.max()))


def late_keys(name: str, tensors: dict[str, Tensor], cut: int) -> Iterator[dict[str, Tensor]]:
    """Yields tensors whose late keys are far from the early ones."""
    if "key" not in VARIANTS[name].inputs:
        yield tensors
        return
    key = VARIANTS[name].inputs["key"].argument
    far = ((0.0, 0.0), (0.0, 39.0), (0.0, 120.0), (0.0, 301.0), (0.0, 1e4), (0.0, -1e4))
    for early, late in (*far, (-900.0, 50.0)):
        moved = tensors[key] + early
        moved[:, :, cut:] += late - early
        yield tensors | {key: moved}


@pytest.mark.parametrize("name", CAUSAL)
def test_late_tokens_of_any_size_change_no_early_row(name: str) -> None:
    """The early values are small. The late ones are the largest numbers, as are their averages."""
    variant, cut, parameters = VARIANTS[name], 8, {"causal": True}
    sizes = SIZES | {"L": 12, "S": 12, "D": 4}
    letters = {i.argument: i.letters for i in variant.inputs.values()}
    for dtype in dtypes_of(variant):
        small, plain = SMALL[dtype], random_inputs(name, sizes, dtype)
        value = torch.rand_like(plain[value_of(name)]) + 1
        value[:, :, cut:] = 0
        late = (value == 0).to(dtype)
        sized = torch.where(late > 0, torch.finfo(dtype).max, value * small)
        for tensors in late_keys(name, plain, cut):
            found = forward_output(name, tensors | {value_of(name): sized}, parameters).double()
            _, bound = truth_and_bound_of_ones(name, tensors, parameters)
            bound = 2 * bound  # no value is above 2
            early = {
                a: x.narrow(letters[a].index("S" if "S" in letters[a] else "L"), 0, cut)
                for a, x in (tensors | {value_of(name): value}).items()
            }
            truth = variant.reference(**early, **parameters).output
            error = (found[:, :, :cut] / small - truth).abs()
            assert (error <= bound[:, :, :cut]).all(), (dtype, tensors, float(error.max()))
            truth = variant.reference(**tensors | {value_of(name): late}, **parameters).output
            error = (found / torch.finfo(dtype).max - truth)[:, :, cut:].abs()
            assert (error <= bound[:, :, cut:]).all(), (dtype, tensors, float(error.max()))
