"""Every variant rejects parameters and inputs that it does not have, by name and with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from support.known_requests import assert_problem
from support.paths import ROOT
from support.service import Server
from support.variant_calls import VARIANTS, random_inputs

PARAMETERS: Final = sorted({n for v in VARIANTS.values() for n in v.parameters.model_fields})
INPUTS: Final = sorted({n for v in VARIANTS.values() for n in v.inputs} | {"nothing"})

every_variant = pytest.mark.parametrize("name", VARIANTS)


def inputs_of(name: str) -> dict[str, Any]:
    """Returns ordinary inputs by wire name."""
    tensors, sizes = random_inputs(name), VARIANTS[name].inputs.values()
    return {i.name: tensors[i.argument].tolist() for i in sizes if not i.is_optional}


@every_variant
def test_parameters_of_softmax_are_taken_or_refused_with_a_reason(name: str) -> None:
    variant = VARIANTS[name]
    if not Path(variant.module.__file__ or "").is_relative_to(ROOT):
        pytest.skip("the project does not ship it")
    known = {*variant.refuses, *variant.parameters.model_fields}
    assert VARIANTS["softmax"].parameters.model_fields.keys() <= known


@every_variant
def test_parameters_of_other_variants_are_rejected_by_name(server: Server, name: str) -> None:
    variant, path = VARIANTS[name], f"/v1/attention/{name}"
    own = variant.parameters.model_fields
    for parameter in {*PARAMETERS, *variant.refuses, "no_such_parameter"} - own.keys():
        body = {"inputs": inputs_of(name), "parameters": {parameter: 1}}
        problem = assert_problem(server.http.post(path, json=body), 422)
        assert problem["pointer"] == f"/parameters/{parameter}"
        if parameter in variant.refuses:
            reason = f"{name} refuses '{parameter}': {variant.refuses[parameter]}"
        else:
            reason = f"{name} has no parameter '{parameter}'; its parameters are"
        assert problem["detail"].startswith(reason)


@every_variant
def test_inputs_of_other_variants_are_rejected_by_name(server: Server, name: str) -> None:
    variant, path = VARIANTS[name], f"/v1/attention/{name}"
    hides_padding = "key_lengths" in variant.inputs and "mask" not in variant.inputs
    for given in {*INPUTS} - variant.inputs.keys():
        body = {"inputs": inputs_of(name) | {given: torch.ones(1, 1).tolist()}}
        detail = assert_problem(server.http.post(path, json=body), 422)["detail"]
        assert f"no input '{given}'; it takes {', '.join(variant.inputs)}" in detail
        if given == "mask" and hides_padding:
            assert detail.endswith("to hide padding, give key_lengths")
