"""Tests that right functions of every variant are not accused, and wrong gradients are found."""

from __future__ import annotations

import pytest

from qkv.testing import verify
from support.right_draws import DTYPES, RightDraw
from support.shared_truths import shared_truths as shared_truths
from support.wrong_gradients import WRONG_GRADIENTS


@pytest.mark.parametrize("seed", range(20))
def test_right_function_with_gradients_passes_and_is_not_accused(seed: int) -> None:
    draw = RightDraw.of(seed)
    report = draw.verify(family_count=5)
    assert report.passed, (draw, report)
    assert {check.result for check in report.checks if check.passed} > {"output"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("variant", "name"), list(WRONG_GRADIENTS))
def test_wrong_gradient_is_found(variant: str, name: str, dtype: str) -> None:
    function = WRONG_GRADIENTS[variant, name]
    families = ["normal", "odd sizes", "one query", "grouped heads"]
    report = verify(function, variant, gradients=True, dtype=dtype, families=families)
    failed = {check.result for check in report.failures}
    assert failed, report
    assert "output" not in failed, report
