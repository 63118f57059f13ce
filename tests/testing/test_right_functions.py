"""Tests that more than a hundred right functions pass and are not accused, in every dtype."""

from __future__ import annotations

from typing import Any

import pytest

from qkv.testing import verify
from support.flash_kernel import Attention
from support.right_functions import right_functions
from support.shared_truths import shared_truths as shared_truths

FUNCTIONS = dict(right_functions())
DTYPES = ["float32", "bfloat16", "float16", "float64"]
CAUSAL: dict[str, Any] = {"causal": True, "query_offset": "end"}


@pytest.mark.parametrize(
    ("n", "function"), list(enumerate(FUNCTIONS.values())), ids=list(FUNCTIONS)
)
def test_right_function_passes_and_is_not_accused(n: int, function: Attention) -> None:
    # five layouts of each kernel: every kernel runs in every dtype
    parameters = CAUSAL if n % 3 == 0 else {}
    dtype = DTYPES[n % 4]
    report = verify(function, "softmax", dtype=dtype, gradients=False, seed=n, **parameters)
    assert report.passed, report
    assert not report.diagnosis


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for n, name in enumerate(FUNCTIONS) if n % 5 == 0])
def test_right_gradients_pass_and_are_not_accused(name: str) -> None:
    report = verify(FUNCTIONS[name], "softmax", dtype=DTYPES[:3], gradients=True)
    assert report.passed, report
    assert not report.diagnosis
