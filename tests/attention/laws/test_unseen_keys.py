"""Keys that no row sees change nothing, for every variant and its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from qkv.attention.sample_inputs import dtypes_of
from support.variant_bounds import bounds_of, is_near
from support.variant_calls import (
    EPS,
    OUTPUT,
    SIZES,
    VARIANTS,
    forward_output,
    gradients,
    head_terms,
    known_parameters,
    padded_arguments,
    random_inputs,
    with_padding,
)

LENGTHS: Final = {"key_lengths_B": torch.tensor([SIZES["S"], 2, 0])}
CAREFUL: Final = ("softmax",)
"""Variants that compute NaN and infinities on another path than torch's kernel: other bits."""
GARBAGE: Final = (torch.nan, torch.inf, -torch.inf, 3e4, -1e30, 1.7e308)

every_variant = pytest.mark.parametrize("name", VARIANTS)
with_lengths = pytest.mark.parametrize(
    "name", [n for n, v in VARIANTS.items() if "key_lengths" in v.inputs]
)
with_positions = pytest.mark.parametrize(
    "name", [n for n, v in VARIANTS.items() if "query_offset" in v.parameters.model_fields]
)


def rising(name: str, tensors: dict[str, Tensor], slope: float) -> dict[str, Tensor]:
    """Returns the tensors with keys that grow along the sequence: `efficient` then shifts more."""
    rise = {a: slope * torch.arange(SIZES["S"])[:, None] for a in padded_arguments(name)}
    return {a: t + rise[a].to(t) if a.startswith("key") and a in rise else t
            for a, t in tensors.items()}  # fmt: skip


def assert_padding_changes_nothing(
    name: str, clean: dict[str, Tensor], parameters: dict[str, Any]
) -> None:
    """Compares all outputs, each output alone, and a block of rows of the weights."""
    variant = VARIANTS[name]
    sets = [frozenset(variant.outputs), *(frozenset({n}) for n in variant.outputs)]
    expected = [variant.attend(**clean, **parameters, outputs=s) for s in sets]
    expected_rows = variant.row_block_function(clean | parameters)(slice(0, 2))
    is_careful = name in CAREFUL
    truth = variant.reference(**clean, **parameters) if is_careful else None
    bounds = bounds_of(name, clean, parameters, truth) if is_careful else {}
    for garbage in GARBAGE:
        dirty = with_padding(name, clean, garbage)
        for outputs, one in zip(sets, expected, strict=True):
            other = variant.attend(**dirty, **parameters, outputs=outputs)
            for n in outputs:
                case, tensor = (dirty, parameters, n), getattr(other, n)
                if truth is not None:
                    assert is_near(tensor, getattr(truth, n), bounds[n]), case
                else:
                    assert torch.equal(tensor, getattr(one, n)), case
        rows = variant.row_block_function(dirty | parameters)(slice(0, 2))
        if truth is not None:
            assert is_near(rows, truth.weights[..., :2, :], bounds["weights"][..., :2, :])
        else:
            assert torch.equal(rows, expected_rows), (dirty, parameters)


@with_lengths
def test_padding_may_hold_anything(name: str) -> None:
    """Nothing changes, for keys that rise or do not rise along the sequence."""
    for dtype in dtypes_of(VARIANTS[name]):
        for parameters in known_parameters(name):
            tensors = random_inputs(name, dtype=dtype)
            assert_padding_changes_nothing(name, tensors | LENGTHS, parameters)
        for parameters in known_parameters(name)[:4]:
            tensors = rising(name, random_inputs(name, dtype=dtype), 1000.0)
            assert_padding_changes_nothing(name, tensors | LENGTHS, parameters)


@with_lengths
def test_padding_has_no_gradient_and_changes_none(name: str) -> None:
    padded = padded_arguments(name)
    for dtype in dtypes_of(VARIANTS[name]):
        for parameters in known_parameters(name):
            clean = random_inputs(name, dtype=dtype) | LENGTHS
            grad = torch.randn_like(forward_output(name, clean, parameters))
            truth = gradients(name, grad, clean, parameters)
            for garbage in GARBAGE:
                case = f"{name}, {dtype}, {parameters}, {garbage}"
                found = gradients(name, grad, with_padding(name, clean, garbage), parameters)
                for n, gradient in found.items():
                    assert torch.equal(gradient, truth[n]), (case, n)
            for argument in padded:
                gradient = truth[argument.rpartition("_")[0] or argument]
                for b, length in enumerate(LENGTHS["key_lengths_B"]):
                    assert not gradient[b, :, length:].any(), (dtype, parameters, argument)


def blind_rows(name: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yields arguments that hide all keys from some rows, and the index of these rows."""
    variant = VARIANTS[name]
    if "key_lengths" in variant.inputs:
        yield LENGTHS, (2,)
        yield {"key_lengths_B": torch.tensor([0, 0, 0])}, ()
    if "query_offset" in variant.parameters.model_fields:
        every = (slice(None), slice(None))
        yield {"causal": True, "query_offset": -2}, (*every, slice(0, 2))
        yield {"causal": True, "query_offset": -100}, ()
    if "mask" in variant.inputs:
        row = torch.ones(1, 1, SIZES["L"], 1, dtype=torch.bool)
        row[:, :, 1] = False
        for hidden, index in ((row, (slice(None), slice(None), 1)), (row[:, :, 1:2], ())):
            yield {"mask_BHLS": hidden}, index
            floating = torch.zeros(hidden.shape).masked_fill(~hidden, -torch.inf)
            yield {"mask_BHLS": floating}, index
            yield {"mask_BHLS": floating.double()}, index


@every_variant
def test_row_that_sees_no_key_is_zero(name: str) -> None:
    """Its scores are -inf, and terms of heads, such as a sink, change nothing."""
    variant = VARIANTS[name]
    for dtype in dtypes_of(variant):
        tensors = random_inputs(name, dtype=dtype)
        terms: list[dict[str, Tensor]] = [{}, *({a: t} for a, t in head_terms(name).items())]
        for hiding, index in blind_rows(name):
            for term in terms:
                for outputs in (OUTPUT, frozenset(variant.outputs)):
                    found = variant.attend(**tensors, **term, **hiding, outputs=outputs)
                    case = f"{name}, {dtype}, {hiding}, {[*term]}"
                    for n in {"output", "weights"} & outputs:
                        assert not getattr(found, n)[index].any(), (case, n)
                    if "scores" in outputs and hiding:
                        assert (found.scores[index] == -torch.inf).all(), case


@with_positions
def test_row_that_sees_no_key_has_no_gradient(name: str) -> None:
    """Not even of 1e300 in the output's gradient; with offset -2 only key 0 is seen, by row 2."""
    tensors, parameters = random_inputs(name), {"causal": True, "query_offset": -2}
    grad = torch.randn_like(forward_output(name, tensors, {}))
    found = gradients(name, grad, tensors, parameters)
    assert not found["query"][:, :, :2].any()
    assert found["value"][:, :, 0].all()
    assert not found["value"][:, :, 1:].any()
    grad[:, :, :2] = 1e300
    again = gradients(name, grad, tensors, parameters)
    torch.testing.assert_close(again["value"], found["value"], rtol=8 * EPS, atol=0)
