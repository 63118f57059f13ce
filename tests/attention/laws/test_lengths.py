"""Every variant agrees with its reference at lengths on both sides of its chunks and blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch

from support.agreement import assert_agrees
from support.dtypes import DTYPES

LENGTHS: Final = {
    "efficient": (16, 17, 64, 65, 1000),
    "linear": (64, 65, 1000, 2100),  # more than 1,024 keys are summed in pieces
    "mean": (128, 129, 160, 512, 513, 1100),
    "taylor": (64, 65, 129, 1000),
}
LONG: Final = 600
"""From here on every dtype and every parameter is tested, but not each with each: with all weights
the time is quadratic."""


OTHERS: Final[dict[str, list[dict[str, Any]]]] = {
    "efficient": [{"slope": 0.0}, {"slope": 5.0}],
    "mean": [{"normalize": x, "lengths": y} for x in (True, False) for y in (True, False)],
}


def arguments(name: str, length: int) -> Iterator[dict[str, Any]]:
    """Yields tensors and parameters of calls."""
    choices = [*itertools.product((False, True), OTHERS.get(name, [{}]))]
    if length < LONG:
        pairs = [*itertools.product(DTYPES, choices)]
    else:
        count = max(len(DTYPES), len(choices))
        pairs = [*itertools.islice(zip(itertools.cycle(DTYPES), itertools.cycle(
            [*choices, *choices[::-1]])), count)]  # fmt: skip
    for dtype, (causal, more) in pairs:
        yield call(name, length, dtype, H=1 if length >= LONG else 2, causal=causal, **more)


def call(
    name: str, length: int, dtype: torch.dtype, H: int, slope: float = 0.0, lengths: bool = False,
    **parameters: Any,
) -> dict[str, Any]:  # fmt: skip
    """Returns the arguments of one call; keys rise by `slope` from token to token."""
    if name == "mean":
        given = {"value_BHSE": torch.randn(2, H, length, 3).to(dtype)}
        given |= {"key_lengths_B": torch.tensor([length, length // 2])} if lengths else {}
        return given | parameters
    query, key, value = (torch.randn(1, H, length, 8) for _ in range(3))
    key = key + slope * torch.arange(length)[:, None]
    names = ("query_BHLD", "key_BGSD", "value_BGSE")
    return dict(zip(names, (x.to(dtype) for x in (query, key, value)), strict=True)) | parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "length"), [(name, length) for name, some in LENGTHS.items() for length in some]
)
def test_lengths_on_both_sides_of_a_chunk(name: str, length: int) -> None:
    for given in arguments(name, length):
        assert_agrees(name, **given)
