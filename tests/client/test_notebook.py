"""Tests of a run in a notebook: a picture of its weights above a table of its outputs."""

from __future__ import annotations

import base64
import html
import re
from io import BytesIO
from typing import Any, Final

import numpy as np
import pytest
from matplotlib import image

from qkv import Run

TIMING: Final = {"compute_ms": 0.1234, "device": "cpu", "backend": "explicit"}


def picture(page: str) -> np.ndarray:
    """Returns the pixels of the only picture in a page."""
    (encoded,) = re.findall(r'<img [^>]*src="data:image/png;base64,([^"]+)">', page)
    return np.asarray(image.imread(BytesIO(base64.b64decode(encoded))))


@pytest.mark.parametrize(
    "outputs",
    [
        {"weights": np.full((2, 3, 5, 7), 0.2)},
        {"entropy": np.ones((2, 3)), "largest": np.ones((2, 3)), "effective_keys": np.ones((2, 3)),
         "received": np.ones((2, 3))},
    ],
)  # fmt: skip
def test_run_with_weights_has_a_picture_and_a_table(outputs: dict[str, Any]) -> None:
    page = Run("softmax", outputs, TIMING, "stochastic")._repr_html_()
    assert picture(page)[0, 0, :3].tolist() == [1, 1, 1]
    assert page.count("<table") == 1
    for part in ("softmax, stochastic weights", "0.123 ms on cpu (explicit)", "float64", "2×3"):
        assert part in page


@pytest.mark.parametrize(
    "outputs",
    [{"output": np.zeros((2, 3))}, {"weights": np.zeros((0, 4))}, {"weights": np.zeros(3)}],
)
def test_run_without_a_matrix_has_a_table_alone(outputs: dict[str, Any]) -> None:
    page = Run("mean", outputs, TIMING)._repr_html_()
    assert page.startswith("<table")
    assert "<img" not in page


@pytest.mark.slow
def test_long_weights_stay_small_in_a_notebook() -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(1000), (16, 1000)).astype(np.float32)
    assert len(Run("softmax", {"weights": weights[None]}, TIMING)._repr_html_()) < 2_000_000


def test_html_is_escaped() -> None:
    odd = "<script>alert('\"&')</script>"
    timing = {"compute_ms": 1.0, "device": odd, "backend": odd}
    page = Run(odd, {"weights": np.ones((2, 2))}, timing, odd)._repr_html_()
    assert "<script" not in page
    assert html.escape(odd) in page
