"""Every variant against its contract: annotations, reference, weights, and `contract.CHECKS`."""

from __future__ import annotations

import math
import typing
from pathlib import Path

import pytest
import torch
from jaxtyping import jaxtyped
from torch import Tensor

from qkv.attention.catalogue import broken, variants
from qkv.attention.contract import CHECKS, Skipped
from qkv.attention.variant import Variant
from support.checked_softmax import OUTPUT, checked
from support.dtypes import every_dtype, exact_dtype
from support.paths import ROOT
from support.tolerances import assert_within

every_variant = pytest.mark.parametrize("variant", variants().values(), ids=lambda v: v.name)


def request_for(variant: Variant, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Returns sizes and required tensors for any variant, by its signature."""
    sizes = dict(zip("BHGLSDEM", (2, 4, 2, 5, 7, 6, 3, 6), strict=True))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for spec in variant.inputs.values():
        shape = [sizes.setdefault(letter, 4) for letter in spec.letters]
        if not spec.is_optional and "float32" in spec.dtypes:
            tensors[spec.argument] = torch.randn(shape, generator=generator).to(dtype)
    return sizes, tensors


def call_checked(variant: Variant, tensors: dict[str, Tensor], outputs: frozenset[str]) -> object:
    """Calls the file's own `attend` with its annotations checked; returns its result."""
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
    sizes, _ = request_for(variant, torch.float32)
    assert variant.flops(sizes) > 0
    assert variant.parse({}) == variant.parameters()  # every parameter has a default


@every_variant
def test_shipped_variant_has_every_part(variant: Variant) -> None:
    if not Path(variant.module.__file__ or "").is_relative_to(ROOT):
        pytest.skip("the project does not ship it")
    for function in ("attend", "weights", "reference", "backward", "flops"):
        assert callable(getattr(variant.module, function))
    assert "not given" not in (variant.formula, variant.paper, variant.cost)
    assert variant.stackable_below > 0


@pytest.mark.parametrize("check", CHECKS)
@every_variant
def test_variant_passes_check(variant: Variant, check: str) -> None:
    """`qkv check-variant` runs the same checks."""
    try:
        CHECKS[check](variant)
    except Skipped as reason:
        pytest.skip(str(reason))


@every_dtype
@every_variant
def test_outputs_fit_their_annotations(variant: Variant, dtype: torch.dtype) -> None:
    """Inputs and outputs fit the jaxtyping annotations, with one size for each letter."""
    _, tensors = request_for(variant, dtype)
    outputs = frozenset(variant.outputs)
    response = variant.attend(**tensors, outputs=outputs)
    call_checked(variant, tensors, outputs)
    hints = typing.get_type_hints(variant.module.attend)
    promised = {"output": hints["return"]}
    if variant.returned is not None:
        promised = typing.get_type_hints(hints["return"])
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
def test_variant_agrees_with_its_reference(variant: Variant) -> None:
    """Two float64 paths that share no code agree to half the digits, or one of them is wrong."""
    _, tensors = request_for(variant, torch.float64)
    outputs = frozenset(variant.outputs)
    found = variant.attend(**tensors, outputs=outputs)
    truth = variant.reference(**tensors)
    alone = variant.attend(**tensors, outputs=OUTPUT)
    close = math.sqrt(torch.finfo(torch.float64).eps)
    for response, names in ((found, outputs), (alone, OUTPUT)):
        for name in names:
            torch.testing.assert_close(
                getattr(response, name), getattr(truth, name), rtol=close, atol=close
            )


@every_dtype
@every_variant
def test_weights_by_blocks_of_rows(variant: Variant, dtype: torch.dtype) -> None:
    """Row blocks are rows of the whole matrix, and the matrix times the values is the output."""
    sizes, tensors = request_for(variant, dtype)
    values = frozenset({"value"} & variant.outputs.keys())  # computed, not sent
    response = variant.attend(**tensors, outputs=values | {"output", "weights"})
    eps, letters = torch.finfo(exact_dtype(dtype)).eps, variant.outputs["weights"].letters
    R, S, width = sizes[letters[-2]], sizes[letters[-1]], sizes["D"]
    parts = [slice(0, 1), slice(1, R - 1), slice(R - 1, R)]
    row_block = variant.row_block_function(tensors)
    blocks = [row_block(rows) for rows in parts]
    A = response.weights.double()
    if values:
        value = response.value.double()
    else:
        value = tensors[variant.inputs["value"].argument].double()
        value = value.repeat_interleave(A.shape[1] // value.shape[1], 1)
    if A.ndim < value.ndim:  # each item is one row, without an axis of rows
        A = A[:, None]
    # each is within S roundings of its row's mass, beside the rounding of the scores
    size = float(response.weights.abs().sum(-1).max()) * S * width
    torch.testing.assert_close(
        torch.cat(blocks, -2), response.weights, rtol=0, atol=64 * eps * size
    )
    product = (A @ value).view(response.output.shape)
    # a file without `weights` may have sums in the dtype of the request
    own = eps if variant.has_row_blocks else torch.finfo(dtype).eps
    bound = (S + 2) * own * (A.abs() @ value.abs()).view(response.output.shape)
    assert_within(response.output, product, bound + torch.finfo(dtype).eps * product.abs())


@every_variant
def test_wrong_shapes_do_not_pass_the_annotations(variant: Variant) -> None:
    """The annotations are effective: a call with a wrong shape or dtype fails."""
    _, tensors = request_for(variant, torch.float32)
    for name in tensors:
        for wrong in (tensors[name][None], tensors[name].long()):
            with pytest.raises(TypeError, match=name):
                call_checked(variant, {**tensors, name: wrong}, OUTPUT)
