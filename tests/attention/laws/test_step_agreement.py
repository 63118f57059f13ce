"""The steps of every variant: what they say of themselves, and that the last one is the output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.attention.step import STEPS
from qkv.attention.variant import Variant
from support.examples import examples
from support.variant_bounds import bounds_of, is_near
from support.variant_calls import VARIANTS, with_padding
from support.variant_draws import calls

with_steps = pytest.mark.parametrize(
    "variant", [v for v in VARIANTS.values() if v.steps], ids=lambda v: v.name
)


@with_steps
def test_steps_begin_with_inputs_and_point_to_the_formula(variant: Variant) -> None:
    steps = list(variant.steps.values())
    inputs = [n for n in ("query", "key", "value") if n in variant.inputs]
    assert [step.name for step in steps[: len(inputs)]] == inputs
    for step in steps:
        assert step.symbol is None or step.symbol in variant.formula, step
        assert step.summary.endswith("."), step
        assert step.name.isidentifier(), step


@examples(40)
@given(data=st.data())
@with_steps
def test_steps_agree_with_output_and_weights(variant: Variant, data: st.DataObject) -> None:
    """Draws every dtype and parameter, masks, and lengths with garbage in the padding."""
    call: dict[str, Any] = data.draw(calls(variant))
    arguments = {i.argument for i in variant.inputs.values()}
    tensors = {n: x for n, x in call.items() if n in arguments}
    parameters = {n: x for n, x in call.items() if n not in arguments}
    found = variant.compute_steps(**wide(variant, call))
    truth = variant.reference(**call)
    bounds = bounds_of(variant.name, with_padding(variant.name, tensors, 0.0), parameters, truth)
    result = variant.attend(**call, outputs=frozenset({"output", "weights"}))
    for name in {"output", "weights"} & bounds.keys():
        if name == "output" or not call.get("dropout"):  # which has a step of its own
            output = getattr(result, name)
            # the bound has one rounding to the dtype: that of the output
            assert is_near(output, found[STEPS + name], bounds[name]), name


def wide(variant: Variant, call: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `compute_steps` of one request."""
    found = {
        n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for n, x in variant.random_inputs(call).items()
    }
    if variant.takes_plane:
        B, H = found["query_BHLD"].shape[:2]
        found["plane_BH"] = torch.arange(B * H).view(B, H)
    return found
