"""Conditions that are read at once, and those that are deferred."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.attention.common.guards import (
    are_deferred,
    are_wide,
    bounds,
    deferred,
    holds,
    is_finite,
    items_within,
    largest_size,
    occurs,
    of_items,
)
from support.each import each

CPU = torch.device("cpu")
X_BN = torch.tensor([[1.0, -2.0], [3.0, -40.0], [0.0, 5.0]])


def test_condition_is_read_at_once() -> None:
    assert not are_deferred()
    assert holds(torch.tensor([True, True]))
    assert not holds(torch.tensor([True, False]))
    assert occurs(torch.tensor([True, False]))
    assert not occurs(torch.tensor([False, False]))
    assert bounds(X_BN) == (-40.0, 5.0)
    assert largest_size(X_BN) == 40.0
    assert items_within(X_BN[:, 1], -3.0, 9.0) == [True, False, True]
    assert is_finite(X_BN)
    assert not is_finite(X_BN * torch.inf)


def test_deferred_condition_always_holds_and_is_kept_for_each_item() -> None:
    with deferred(3) as guards:
        assert are_deferred()
        assert holds(torch.tensor([True, False, True]))
        assert not occurs(torch.tensor([[False], [False], [True]]))
        assert guards.fitting_items(CPU).tolist() == [True, False, False]
    assert not are_deferred()


def test_numbers_of_a_deferred_call_are_those_of_each_item() -> None:
    with deferred(3) as guards:
        low, high = bounds(X_BN)
        size = largest_size(X_BN.half())
        assert isinstance(low, Tensor)
        assert isinstance(high, Tensor)
        assert isinstance(size, Tensor)
        assert (low.tolist(), high.tolist()) == ([-2.0, -40.0, 0.0], [1.0, 3.0, 5.0])
        assert (size.tolist(), size.dtype) == ([2.0, 40.0, 5.0], torch.float64)
        assert items_within(X_BN[:, 1], -3.0, 9.0) == [True, True, True]
        assert holds(largest_size(X_BN) < 10)
        assert guards.fitting_items(CPU).tolist() == [True, False, True]


@each("number", [torch.inf, -torch.inf, torch.nan])
def test_item_with_infinity_or_nan_does_not_fit(number: float) -> None:
    x_BN = X_BN.clone()
    x_BN[2, 1] = number
    with deferred(3) as guards:
        assert holds(is_finite(x_BN))
        assert guards.fitting_items(CPU).tolist() == [True, True, False]
    with deferred(3) as guards:
        assert holds(largest_size(x_BN) < 1e9)
        assert guards.fitting_items(CPU).tolist() == [True, True, False]


def test_condition_of_a_shared_tensor_is_that_of_every_item() -> None:
    with deferred(2) as guards:
        holds(largest_size(X_BN, shared=True) < 10)
        assert guards.fitting_items(CPU).tolist() == [False, False]


def test_conditions_of_some_items() -> None:
    """Ranges count from the first item of the range around them."""
    with deferred(5) as guards:
        with of_items(slice(1, 5)):
            holds(torch.tensor([True, False, True, True]))
            with of_items(slice(2, 4)):
                holds(torch.tensor([True, False]))
        holds(torch.tensor([False, True, True, True, True]))
        assert guards.fitting_items(CPU).tolist() == [False, True, False, True, False]
    with of_items(slice(0, 1)):  # without effect
        assert not holds(torch.tensor(False))


def test_call_may_be_wide() -> None:
    assert not are_wide()
    with deferred(1):
        assert not are_wide()
    with deferred(1, is_wide=True):
        assert are_wide()
    assert not are_wide()
