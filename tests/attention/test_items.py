"""The items of a batch do not change each other, for every variant."""

from __future__ import annotations

import math

import pytest
import torch

from support.variant_bounds import bounds_of, is_near
from support.variant_calls import VARIANTS, known_parameters, random_inputs

with_items = pytest.mark.parametrize(
    "name", [n for n, v in VARIANTS.items() if any("B" in i.letters for i in v.inputs.values())]
)


@with_items
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_number_that_is_not_finite_stays_in_its_item(name: str, number: float) -> None:
    torch.manual_seed(0)
    variant = VARIANTS[name]
    for parameters in known_parameters(name):
        clean = random_inputs(name)
        truth = variant.reference(**clean, **parameters)
        bounds = bounds_of(name, clean, parameters, truth)
        with_batch = [i.argument for i in variant.inputs.values() if "B" in i.letters]
        for argument in clean.keys() & {*with_batch}:
            dirty = clean | {argument: clean[argument].clone()}
            dirty[argument][0] = number
            for output in variant.outputs:
                outputs = frozenset({output})
                tensor = getattr(variant.attend(**dirty, **parameters, outputs=outputs), output)
                expected, bound = getattr(truth, output)[1:], bounds[output][1:]
                assert is_near(tensor[1:], expected, bound), (argument, parameters, output)
