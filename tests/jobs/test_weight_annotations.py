"""The field `weights_are` of a response is true of its weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv import Client
from qkv.attention import catalogue
from qkv.attention.catalogue import variants
from qkv.attention.signature import fixed_size
from qkv.attention.variant import Variant
from support.service import Server

SIZES = {"B": 2, "H": 2, "G": 2, "J": 2, "V": 2, "L": 9, "S": 9, "D": 4, "E": 4}


def kind(weights: torch.Tensor) -> str:
    """Returns the kind of the weights by their values; rows of zeros see nothing."""
    if (weights < 0).any():
        return "signed"
    sums = weights.sum(-1)
    close = 1000 * torch.finfo(weights.dtype).eps
    return "stochastic" if (((sums - 1).abs() < close) | (sums == 0)).all() else "unnormalised"


def inputs_of(variant: Variant) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        i.name: torch.randn([fixed_size(x) or SIZES.get(x, 7) for x in i.letters])
        for i in variant.inputs.values()
        if not i.is_optional
    }


@pytest.mark.parametrize(
    "variant", [v for v in variants().values() if "weights" in v.outputs], ids=lambda v: v.name
)
def test_weights_are_of_the_named_kind(server: Server, variant: Variant) -> None:
    parameter_sets: list[dict[str, Any]] = [{}]
    fields = variant.parameters.model_fields
    parameter_sets += [{"causal": True}] * ("causal" in fields)
    parameter_sets += [{"normalize": False}] * ("normalize" in fields)
    parameter_sets += [{"dropout": 0.5, "seed": 3}] * ("dropout" in fields)
    with Client(server.url) as client:
        for parameters in parameter_sets:
            found = client.attend(variant.name, **inputs_of(variant), **parameters)
            assert found.weights_are == kind(found.weights), parameters
        found = client.attend(variant.name, **inputs_of(variant), weights="none")
        assert found.weights_are is None
    if "sinks" in variant.inputs:
        with Client(server.url) as client:
            sinks = torch.randn(SIZES["H"])
            found = client.attend(variant.name, **inputs_of(variant), sinks=sinks)
        assert found.weights_are == kind(found.weights) == "unnormalised"
    documented = catalogue.describe(variant)["weights"].partition(";")[0]
    assert documented in ("stochastic", "signed", "unnormalised")
    assert documented == variant.weights_are(variant.parse({}))
