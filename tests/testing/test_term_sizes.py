"""Tests of `TermSizes`: terms that cancel keep their size, through views and in place."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor

from qkv.attention.catalogue import find, variants
from qkv.testing.condition import gradient_budgets, reference_gradients
from qkv.testing.families import draw
from qkv.testing.family import NotDrawn
from qkv.testing.term_sizes import TermSizes
from support.right_variants import RIGHT_VARIANTS

_MORE: Final[dict[str, dict[str, Any]]] = {
    "gated": {"rule": "gated_delta", "normalize_qk": True},
    "linear": {"normalize": False},
    "sigmoid": {"softcap": 3.0, "window": (3, 0)},
    "softmax": {"softcap": 3.0, "window": (3, 0)},
}


def test_terms_that_cancel_keep_their_size() -> None:
    x = torch.tensor([[3.0, -3.0], [5.0, 1.0]], dtype=torch.float64)
    with TermSizes(0.0) as sizes:
        total = x.sum(1)
        product = x @ torch.ones(2, 1, dtype=torch.float64)
        rest = 1 - x.sigmoid()
        share = total / 2 - total / 2
        buffer = torch.zeros(2, 2, dtype=torch.float64)
        buffer[:, 0] = total
        buffer[:, 1].sub_(total).add_(total)
    assert total.tolist() == [0, 6]
    assert sizes.of(total).tolist() == [6, 6]
    assert sizes.of(product).flatten().tolist() == [6, 6]
    assert sizes.of(rest).tolist() == [[2, 2], [2, 2]]
    assert sizes.of(share).tolist() == [6, 6]
    assert sizes.of(buffer.mT[0]).tolist() == [6, 6]
    assert sizes.of(buffer[:, 1]).tolist() == [12, 12]


def test_numbers_keep_their_bits_and_are_at_most_as_large_as_their_terms() -> None:
    def compute(x: Tensor) -> list[Tensor]:
        y = x.softmax(-1) @ x.mT - x.mean()
        return [y, y.cumsum(0), (y / y.norm()).flip(0), torch.cat([y, y.exp()]).mul_(-2)]

    x = torch.randn(6, 6, dtype=torch.float64)
    with TermSizes(0.0) as sizes:
        found = compute(x)
    for plain, result in zip(compute(x), found, strict=True):
        assert torch.equal(plain, result)
        assert bool((sizes.of(result) >= result.abs() * (1 - 1e-12)).all())


@pytest.mark.parametrize("name", variants())
@pytest.mark.parametrize("has_more", [False, True])
def test_no_operation_of_the_steps_forgets_its_terms(name: str, has_more: bool) -> None:
    for family in ("normal", "mask", "padding"):
        try:
            parameters = _MORE.get(name, {}) if has_more else {}
            call = draw(find(name), family, torch.float32, parameters=parameters)
        except NotDrawn:
            continue
        with TermSizes(0.0) as sizes:
            reference_gradients(call)
        assert not sizes.unknown


@pytest.mark.parametrize("family", ["normal", "steep", "near-cancelling", "one query"])
@pytest.mark.parametrize("variant", RIGHT_VARIANTS)
def test_sizes_of_the_steps_are_those_of_right_functions(variant: str, family: str) -> None:
    """They are not below half of those of any form, though their operations are others.

    The features of `linear` have the error of elu(x) + 1 by the condition, so the form by exp is
    compared. So have squares of `taylor`.
    """
    try:
        call = draw(find(variant), family, torch.float32)
    except NotDrawn:
        return
    with TermSizes(0.0) as sizes:
        exact = reference_gradients(call)
    forms = RIGHT_VARIANTS[variant]
    names = {"linear": ["one head at a time"], "taylor": ["distances"]}.get(variant, list(forms))
    for form in names:
        leaves = {n: x.clone().requires_grad_() for n, x in call.exact_inputs.items()}
        positional = [leaves[n] for n in call.positional]
        keywords = {n: x for n, x in leaves.items() if n not in call.positional}
        assert call.grad_output is not None
        with TermSizes(0.0) as those:
            output = forms[form](*positional, **keywords)
            found = torch.autograd.grad(output, positional, call.grad_output.double())
        for n, gradient in zip(call.positional, found, strict=True):
            assert bool((sizes.of(exact[n]) >= 0.5 * those.of(gradient)).all()), (form, n)


def test_budgets_of_gradients_read_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, variant in variants().items():
        call = draw(variant, "normal", torch.float32, sizes={"B": 1, "H": 2})
        before = gradient_budgets(call)
        with monkeypatch.context() as patch:
            patch.setattr(variant.module, "backward", None)
            after = gradient_budgets(call)
        assert all(torch.equal(after[n], before[n]) for n in before), name
