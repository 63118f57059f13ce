"""Every variant's file against its contract: annotations, reference, weights."""

from __future__ import annotations

import math
import typing

import pytest
import torch
from jaxtyping import jaxtyped
from torch import Tensor

from qkv.attention.catalogue import Variant, variants
from support.checked_softmax import OUTPUT, checked
from support.dtypes import every_dtype, exact_dtype
from support.tolerances import assert_within

every_variant = pytest.mark.parametrize("variant", variants().values(), ids=lambda v: v.name)


def request_for(variant: Variant, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Sizes and required tensors for any variant, made of what its signature says."""
    sizes = dict(zip("BHGLSDEM", (2, 4, 2, 5, 7, 6, 3, 6), strict=True))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for spec in variant.inputs.values():
        shape = [sizes.setdefault(letter, 4) for letter in spec.letters]
        if not spec.is_optional and "float32" in spec.dtypes:
            tensors[spec.argument] = torch.randn(shape, generator=generator).to(dtype)
    return sizes, tensors


@every_variant
def test_a_variants_file_says_all_that_the_catalogue_tells(variant: Variant) -> None:
    module = variant.module
    for name in ("FORMULA", "PAPER", "COST", "WEIGHTS"):
        assert isinstance(getattr(module, name), str), name
        assert getattr(module, name).strip(), name
    assert all(isinstance(reason, str) and reason for reason in variant.refuses.values())
    assert not set(variant.refuses) & set(variant.parameters.model_fields)
    assert variant.summary.endswith(".")
    for function in ("attend", "weights", "reference"):
        assert callable(getattr(module, function))
    sizes, _ = request_for(variant, torch.float32)
    assert variant.flops(sizes) > 0
    assert variant.parse({}) == variant.parameters()  # every parameter has a default


@every_dtype
@every_variant
def test_answers_are_as_annotated(variant: Variant, dtype: torch.dtype) -> None:
    """Inputs and outputs fit the jaxtyping annotations, all letters bound together."""
    _, tensors = request_for(variant, dtype)
    outputs = frozenset(variant.outputs)
    answer = checked(variant.attend)(**tensors, outputs=outputs)
    hints = typing.get_type_hints(variant.attend)
    promised = typing.get_type_hints(hints["return"])
    with jaxtyped("context"):
        for name, tensor in tensors.items():
            assert isinstance(tensor, hints[name]), name
        for name in outputs:
            found = getattr(answer, name)
            kinds = [k for k in typing.get_args(promised[name]) if k is not type(None)]
            assert any(isinstance(found, kind) for kind in kinds or [promised[name]]), name
    for name, output in variant.outputs.items():
        expected = exact_dtype(dtype) if output.is_exact else dtype
        assert getattr(answer, name).dtype == expected, name
        if name != "output":
            alone = variant.attend(**tensors, outputs=frozenset({name}))
            assert alone.output is None


@every_variant
def test_a_variant_agrees_with_its_reference(variant: Variant) -> None:
    """In float64, where two paths that share no code agree to half the digits or are wrong."""
    _, tensors = request_for(variant, torch.float64)
    outputs = frozenset(variant.outputs)
    found = variant.attend(**tensors, outputs=outputs)
    truth = variant.module.reference(**tensors)
    alone = variant.attend(**tensors, outputs=OUTPUT)
    close = math.sqrt(torch.finfo(torch.float64).eps)
    for answer, names in ((found, outputs), (alone, OUTPUT)):
        for name in names:
            torch.testing.assert_close(
                getattr(answer, name), getattr(truth, name), rtol=close, atol=close
            )


@every_dtype
@every_variant
def test_weights_by_blocks_of_rows(variant: Variant, dtype: torch.dtype) -> None:
    """`weights` gives the rows of the whole matrix, and that times the values is the output."""
    sizes, tensors = request_for(variant, dtype)
    values = frozenset({"value"} & variant.outputs.keys())  # where they are made, not sent
    answer = variant.attend(**tensors, outputs=values | {"output", "weights"})
    eps, letters = torch.finfo(exact_dtype(dtype)).eps, variant.outputs["weights"].letters
    R, S, width = sizes[letters[-2]], sizes[letters[-1]], sizes["D"]
    parts = [slice(0, 1), slice(1, R - 1), slice(R - 1, R)]
    row_block = variant.row_block_function(tensors)
    blocks = [row_block(rows) for rows in parts]
    A = answer.weights.double()
    if values:
        value = answer.value.double()
    else:
        value = tensors[variant.inputs["value"].argument].double()
        value = value.repeat_interleave(A.shape[1] // value.shape[1], 1)
    if A.ndim < value.ndim:  # each item is one row, without an axis of rows
        A = A[:, None]
    # each of the two made within S roundings of its row's mass, the scores' own apart
    size = float(answer.weights.abs().sum(-1).max()) * S * width
    torch.testing.assert_close(torch.cat(blocks, -2), answer.weights, rtol=0, atol=64 * eps * size)
    product = (A @ value).view(answer.output.shape)
    bound = (S + 2) * eps * (A.abs() @ value.abs()).view(answer.output.shape)
    assert_within(answer.output, product, bound + torch.finfo(dtype).eps * product.abs())


@every_variant
def test_wrong_shapes_do_not_pass_the_annotations(variant: Variant) -> None:
    """The annotations that tests check by are real: they refuse what does not fit."""
    _, tensors = request_for(variant, torch.float32)
    check = checked(variant.attend)
    for name in tensors:
        for wrong in (tensors[name][None], tensors[name].long()):
            with pytest.raises(TypeError, match=name):
                check(**{**tensors, name: wrong}, outputs=OUTPUT)
