"""Tests of a run in a notebook: the picture shows the weights in every form, without scripts."""

from __future__ import annotations

import base64
import html
import math
import re
from collections.abc import Mapping
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from qkv import Client, QkvError, Run, heatmap
from qkv.api import variant_pictures
from qkv.attention import catalogue
from qkv.client.figures.grid import Grid
from qkv.client.figures.run_grid import Options, build_grid
from support.pictures import panel_cells

TIMING: Final = {"compute_ms": 0.1234, "device": "cpu", "backend": "explicit"}


def softmax(*shape: int, seed: int = 0) -> np.ndarray:
    scores = 3 * np.random.default_rng(seed).normal(size=shape)
    exact = np.exp(scores - scores.max(-1, keepdims=True))
    weights: np.ndarray = (exact / exact.sum(-1, keepdims=True)).astype(np.float32)
    return weights


def run_html(form: Any = "full", **outputs: Any) -> tuple[str, str]:
    """Returns the HTML of a run, and the picture in it."""
    page = Run("softmax", outputs, TIMING, "stochastic", form)._repr_html_()
    (encoded,) = re.findall(
        r'<img [^>]*src="data:image/svg\+xml;base64,([^"]+)" alt="[^"]+">', page
    )
    return page, base64.b64decode(encoded).decode()


CELLS: Final = ((1, 120), (4, 64), (math.inf, 32))


def build(outputs: Mapping[str, np.ndarray], form: Any = "full") -> Grid:
    """Returns the panels of a run in a notebook."""
    grid = build_grid("softmax", "stochastic", outputs, form, Options(cells=CELLS))
    assert grid is not None
    return grid


def matrices(form: Any = "full", **outputs: Any) -> list[np.ndarray]:
    return [panel.matrix for panel in build(outputs, form).panels]


def test_every_cell_shows_a_weight() -> None:
    """A cell is exact to half a shade, and to the three digits of a shade's number.

    All heads share one scale.
    """
    weights = softmax(2, 3, 5, 7)
    weights[0, 1, 2, 3] = 0
    page, svg = run_html(weights=weights, output=weights)
    panels = panel_cells(svg)
    assert len(panels) == 3
    for panel, plane in zip(panels, weights[0], strict=True):
        assert panel.keys() == {(i, j) for i, j in np.argwhere(plane != 0).tolist()}
        for at, number in panel.items():
            share, exact = np.sqrt(np.array([number, plane[at]]) / weights[0].max())
            assert abs(share - exact) <= (0.5 + 1e-5) / heatmap.LEVELS + share / 400
    words = [e.text for e in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"softmax, stochastic weights", "head 0", "head 2", "query", "key"} <= set(words)
    assert "Only sequence 0 of 2 is shown." in page
    assert "All panels share one scale." in page
    assert "0.123 ms on cpu (explicit), weights float32 2×3×5×7" in page


@pytest.mark.parametrize(("shape", "titles"), [((4, 4), [""]), ((3, 4, 4), ["sequence 0"])])
def test_weights_without_heads_have_titles(shape: tuple[int, ...], titles: list[str]) -> None:
    assert [panel.title for panel in build({"weights": softmax(*shape)}).panels][:1] == titles


def test_large_matrix_is_pooled_and_keeps_its_row_sums() -> None:
    """A cell is 4 × 4 weights: the sum over its keys, the mean over its queries."""
    weights = softmax(1, 2, 256, 256)
    for matrix, plane in zip(matrices(weights=weights), weights[0].astype("f8"), strict=True):
        assert matrix.shape == (64, 64)
        pooled = plane.reshape(64, 4, 64, 4).sum(3).mean(1)
        assert np.abs(matrix - pooled).max() <= 256 * np.finfo("f8").eps
        assert matrix.sum(1) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("shape", [(65, 200), (129, 1), (1, 300), (1000, 127)])
def test_smaller_cells_at_an_edge_are_as_dark_as_the_others(shape: tuple[int, int]) -> None:
    (matrix,) = matrices(weights=np.full(shape, 0.5, np.float32))
    tall, wide = (math.ceil(size / 120) for size in shape)
    assert matrix.shape == tuple(math.ceil(s / n) for s, n in zip(shape, (tall, wide), strict=True))
    assert matrix == pytest.approx(0.5 * wide)


def test_top_k_weights_are_at_their_indices() -> None:
    """Other cells are empty. A large matrix is pooled without its dense form."""
    weights = softmax(1, 2, 100, 90)
    indices = np.argsort(-weights, -1)[..., :8]
    largest = np.take_along_axis(weights, indices, -1)
    sparse = np.zeros_like(weights)
    np.put_along_axis(sparse, indices, largest, -1)
    form = {"top_k": 8}
    placed = matrices(form, weights=largest, indices=indices)
    assert all(
        np.allclose(one, other, rtol=0, atol=1e-6)
        for one, other in zip(placed, matrices(weights=sparse), strict=True)
    )
    many = np.arange(32768)[None, None, :, None] % 960
    (matrix,) = matrices(
        {"top_k": 1},
        weights=np.ones((1, 1, 32768, 1), "f4"),
        indices=np.broadcast_to(many, (1, 1, 32768, 1)),
    )
    assert max(matrix.shape) <= 120
    assert matrix.sum(1) == pytest.approx(1)


def test_row_that_sees_no_key_is_empty() -> None:
    weights = np.array([[0.75, 0.25], [0.0, 0.0]], np.float32)
    indices = np.array([[2, 0], [-1, -1]])
    (matrix,) = matrices({"top_k": 2}, weights=weights, indices=indices)
    assert matrix.tolist() == [[0.25, 0.0, 0.75], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("form", "axes", "first_rows"),
    [
        ({"rows": [4, 9000, 2]}, ("query", "key"), ["4", "9,000", "2"]),
        ({"pool": 9}, ("bin of queries", "bin of keys"), ["0", "1", "2"]),
        ("full", ("query", "key"), ["0", "1", "2"]),
    ],
)
def test_axes_are_labelled_by_the_form(
    form: Any, axes: tuple[str, str], first_rows: list[str]
) -> None:
    rows = len(form["rows"]) if "rows" in form else 9
    panel = build({"weights": softmax(1, 1, rows, 300)}, form).panels[0]
    assert (panel.rows.name, panel.columns.name) == axes
    assert [label.text for label in panel.rows.labels][:3] == first_rows
    # a cell is three keys
    assert [label.text for label in panel.columns.labels] == [str(n) for n in range(0, 300, 3)]


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_statistics_have_a_row_for_each_head(lead: tuple[int, ...]) -> None:
    weights = softmax(*lead, 200, 130)
    entropy = -(weights * np.log(weights)).sum(-1)
    statistics = {
        "entropy": entropy, "largest": weights.max(-1), "largest_index": weights.argmax(-1),
        "effective_keys": np.exp(entropy), "received": weights.sum(-2),
    }  # fmt: skip
    page, _ = run_html("stats", **statistics)
    assert "A cell is the mean of 4 queries, or of 3 keys." in page
    first, *_, received = matrices("stats", **statistics)
    heads = lead[-1] if lead else 1
    own = entropy.reshape(-1, 200)[:heads].astype("f8")
    assert np.allclose(first, own.reshape(heads, 50, 4).mean(2), rtol=1e-6)
    assert received.shape == (heads, 44)


def test_only_the_first_sixteen_heads_are_drawn() -> None:
    page, svg = run_html(weights=softmax(1, 20, 40, 40))
    assert len(panel_cells(svg)) == 16
    assert "Heads 16 to 19 of 20 are left out." in page
    assert "A cell is 2 queries by 2 keys" in page
    assert len(page) < 300_000


def test_negative_weights_are_orange() -> None:
    weights = softmax(4, 4) - np.float32(0.25)
    page, svg = run_html(weights=weights)
    (panel,) = panel_cells(svg)
    assert {np.sign(number) for number in panel.values()} >= {-1.0, 1.0}
    assert "Negative weights are orange." in page
    assert "orange" not in run_html(weights=softmax(4, 4))[0]


@pytest.mark.filterwarnings("error")
def test_numbers_that_are_not_finite_are_left_out_with_a_note() -> None:
    weights = np.array([[np.nan, 1.0], [np.inf, 0.5]], np.float64)
    page, svg = run_html(weights=weights)
    assert [panel.keys() for panel in panel_cells(svg)] == [{(0, 1), (1, 1)}]
    assert "Numbers that are not finite are left out." in page
    huge = np.full((300, 300), np.finfo(np.float64).max)
    assert np.isfinite(matrices(weights=huge)[0]).all()


@pytest.mark.parametrize("weights", [np.zeros((0, 4)), np.zeros(3)])
def test_run_without_a_matrix_has_no_picture(weights: np.ndarray) -> None:
    assert build_grid("mean", None, {"weights": weights}, "full", Options()) is None
    page = Run("mean", {"output": np.zeros((2, 3))}, TIMING, None, "none")._repr_html_()
    assert "<img" not in page
    assert "<b>mean</b>" in page
    assert "output float64 2×3" in page


def test_html_is_escaped_and_has_no_scripts() -> None:
    odd = "<script>alert('\"&')</script>"
    timing = {"compute_ms": 1.0, "device": odd, "backend": odd}
    page = Run(odd, {"weights": softmax(2, 2)}, timing, odd)._repr_html_()
    assert not re.search(r"<(?!/?(div|small|img|b)\b)", page)
    assert html.escape(odd) in page
    (encoded,) = re.findall(r"base64,([^\"]+)", page)
    svg = base64.b64decode(encoded).decode()
    assert "<script" not in svg
    ElementTree.fromstring(svg)
    assert "prefers-color-scheme:dark" in svg


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_torch_tensors_are_drawn(dtype: torch.dtype) -> None:
    weights = torch.full((1, 2, 3, 3), 0.25, dtype=dtype)
    _, svg = run_html(weights=weights)
    assert panel_cells(svg) == [{(i, j): 0.25 for i in range(3) for j in range(3)}] * 2


FORMS: Final = ("full", "stats", {"rows": [3, 0]}, {"top_k": 3}, {"pool": 4})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", catalogue.variants())
def test_weights_of_every_variant_and_form_are_drawn(url: str, name: str, form: Any) -> None:
    variant = catalogue.find(name)
    inputs: dict[str, Any] = variant_pictures.inputs(variant)
    with Client(url) as client:
        if name == "linear_layer" and "rows" in form:
            with pytest.raises(QkvError, match="each item is one row"):
                client.attend(name, weights=form, **inputs)
            return
        run = client.attend(name, weights=form, **inputs)
    assert run.form == form
    page = run._repr_html_()
    (encoded,) = re.findall(r"base64,([^\"]+)", page)
    panels = panel_cells(base64.b64decode(encoded).decode())
    assert len(panels) == (4 if form == "stats" else 1)
    if form == "full":
        weights = run.weights.reshape(run.weights.shape[-2:])
        assert panels[0].keys() == {(i, j) for i, j in np.argwhere(weights).tolist()}
