"""Every variant against its contract: texts, annotations, and `contract.CHECKS`."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import jaxtyped
from torch import Tensor

from qkv.attention.catalogue import broken, variants
from qkv.attention.contract import CHECKS
from qkv.attention.contract_results import check
from qkv.attention.sample_inputs import sample
from qkv.attention.variant import Variant
from support.checked_softmax import OUTPUT, checked, checked_call
from support.dtypes import DTYPES, exact_dtype
from support.each import each
from support.paths import ROOT

every_variant = pytest.mark.parametrize("variant", variants().values(), ids=lambda v: v.name)


def call_checked(variant: Variant, tensors: dict[str, Tensor], outputs: frozenset[str]) -> Any:
    """Calls the file's own `attend` with its annotations checked; returns its result."""
    if variant.call is not None:
        return variant.module.attend(checked_call(variant.call)(**tensors), outputs)
    selected = {"outputs": outputs} if "outputs" in variant.from_engine else {}
    return checked(variant.module.attend)(**tensors, **selected)


def test_no_variant_file_is_broken() -> None:
    if broken():
        pytest.fail("\n".join(map(str, broken().values())))


@every_variant
def test_catalogue_has_every_text_of_a_variant(variant: Variant) -> None:
    for text in (variant.formula, variant.paper, variant.cost, variant.weights_text):
        assert isinstance(text, str)
        assert text.strip()
    assert all(isinstance(reason, str) and reason for reason in variant.refuses.values())
    assert not set(variant.refuses) & set(variant.parameters.model_fields)
    assert variant.summary.endswith(".")
    assert variant.weights_are(variant.parse({})) in ("stochastic", "signed", "unnormalised")
    sizes, _ = sample(variant, torch.float32)
    assert variant.flops(sizes) > 0
    assert variant.parse({}) == variant.parameters()  # every parameter has a default


@every_variant
def test_shipped_variant_has_every_part(variant: Variant) -> None:
    if not Path(variant.module.__file__ or "").is_relative_to(ROOT):
        pytest.skip("the project does not ship it")
    for function in ("attend", "weights", "steps", "backward", "flops"):
        assert callable(getattr(variant.module, function))
    assert "not given" not in (variant.formula, variant.paper, variant.cost)
    assert variant.stackable_below > 0


@every_variant
def test_variant_passes_every_check(variant: Variant) -> None:
    """`qkv check-variant` runs the same checks."""
    results = list(check(variant))
    assert [result for result in results if result.status == "FAIL"] == []
    assert {result.name for result in results} == {*CHECKS}


@each("dtype", DTYPES)
@every_variant
def test_outputs_fit_their_annotations(variant: Variant, dtype: torch.dtype) -> None:
    """Inputs and outputs fit the jaxtyping annotations, with one size for each letter."""
    _, tensors = sample(variant, dtype)
    outputs = frozenset(variant.outputs)
    response = variant.attend(**tensors, outputs=outputs)
    call_checked(variant, tensors, outputs)
    hints = typing.get_type_hints(variant.module.attend)
    promised = {"output": hints["return"]}
    if variant.returned is not None:
        promised = typing.get_type_hints(hints["return"])
    if variant.call is not None:
        hints = typing.get_type_hints(variant.call)
    with jaxtyped("context"):
        for name, tensor in tensors.items():
            assert isinstance(tensor, hints[name]), name
        for name in promised.keys() & outputs:
            found = getattr(response, name)
            kinds = [k for k in typing.get_args(promised[name]) if k is not type(None)]
            assert any(isinstance(found, kind) for kind in kinds or [promised[name]]), name
    for name, output in variant.outputs.items():
        expected = exact_dtype(dtype) if output.is_exact else dtype
        assert getattr(response, name).dtype == expected, name
        if name != "output":
            alone = variant.attend(**tensors, outputs=frozenset({name}))
            assert alone.output is None


@every_variant
def test_wrong_shapes_do_not_pass_the_annotations(variant: Variant) -> None:
    """The annotations are effective: a call with a wrong shape or dtype fails."""
    _, tensors = sample(variant, torch.float32)
    for name in tensors:
        for wrong in (tensors[name][None], tensors[name].long()):
            with pytest.raises(TypeError, match=name):
                call_checked(variant, {**tensors, name: wrong}, OUTPUT)
