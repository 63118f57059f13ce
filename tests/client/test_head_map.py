"""Tests of maps of layers by heads: names of layers, colours, missing values and errors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import same_color
from matplotlib.figure import Figure

from qkv import head_map, head_maps
from support.pictures import colours, matrix, norm, panels, row_labels, titles


def numbers(figure: Figure) -> list[str]:
    """Returns the texts in the cells of the first panel."""
    return [text.get_text() for text in panels(figure)[0].texts]


def values_of(figure: Figure, n: int = 0) -> np.ndarray:
    """Returns the numbers of a panel; NaN for an empty cell."""
    found: np.ndarray = matrix(panels(figure)[n]).filled(np.nan)
    return found


@pytest.mark.parametrize(
    ("layers", "labels"),
    [
        (
            ["bert.encoder.layer.0.attention.self", "bert.encoder.layer.11.attention.self"],
            ["layer.0", "layer.11"],
        ),
        (
            ["encoder.layers.0.attn", "decoder.layers.0.attn"],
            ["encoder", "decoder"],
        ),
        (["a.0.self", "a.0.cross", "a.1.self"], ["a.0.self", "a.0.cross", "a.1.self"]),
        (["h.3.attn"], ["h.3.attn"]),
        (["first", "second"], ["first", "second"]),
    ],
)
def test_layers_are_named_by_the_parts_that_differ(layers: list[str], labels: list[str]) -> None:
    assert row_labels(panels(head_map(layers, np.ones((len(layers), 2))))[0]) == labels


def test_cells_have_numbers_and_colours() -> None:
    figure = head_map(["a", "b"], [[0, 0.25], [0.5, 1.0]], title="T & t", value_name="share")
    (ax,) = panels(figure)
    assert values_of(figure).tolist() == [[0, 0.25], [0.5, 1.0]]
    assert numbers(figure) == ["0.00", "0.25", "0.50", "1.00"]
    assert (figure.get_suptitle(), ax.get_xlabel()) == ("T & t", "head")
    assert [bar.get_ylabel() for bar in figure.axes if bar is not ax] == ["share"]
    scale = norm(ax)
    assert (scale.vmin, scale.vmax, scale(0.25)) == (0, 1, 0.25)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[12.34, 5.0]], ["12.3", "5.0"]),
        ([[2.345, 1.0]], ["2.35", "1.00"]),
        ([[0.0123, 0.002]], ["0.012", "0.002"]),
        ([[120, 7]], ["120", "7"]),
        ([[-0.5, 0.25]], ["−0.50", "0.25"]),
    ],
)
def test_numbers_of_a_map_have_as_many_decimals(
    values: list[list[float]], expected: list[str]
) -> None:
    assert numbers(head_map(["a"], values)) == expected


@pytest.mark.parametrize("value", [0.0, 0.3, 0.5, 0.7, 1.0, -1.0, -0.5])
def test_numbers_contrast_with_their_cell(value: float) -> None:
    """Contrast is at least 3, which WCAG 2.2 requires for large text."""
    (ax,) = panels(head_map(["a"], [[value, 1.0, -1.0 if value < 0 else 0.0]]))
    text = 1.0 if same_color(ax.texts[0].get_color(), "white") else 0.0
    srgb = colours(ax)[0, 0, :3]
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    behind = float(linear @ [0.2126, 0.7152, 0.0722])
    assert (max(text, behind) + 0.05) / (min(text, behind) + 0.05) >= 3


def test_small_cells_have_no_numbers() -> None:
    values = np.linspace(0, 1, 1024).reshape(32, 32)
    figure = head_map([f"h.{n}.attn" for n in range(32)], values)
    assert row_labels(panels(figure)[0]) == [f"h.{n}" for n in range(32)]
    assert numbers(figure) == []
    assert (values_of(figure) == values).all()


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_missing_values_have_a_cross(missing: float | None) -> None:
    figure = head_map(["a", "b"], [[1.0, missing], [2.0, 3.0]])
    (ax,) = panels(figure)
    (crosses,) = ax.lines
    assert np.array_equal(crosses.get_xydata(), [[1, 0]])
    assert colours(ax)[0, 1, 3] == 0
    assert not panels(head_map(["a"], [[1.0, 2.0]]))[0].lines


def test_a_layer_with_fewer_heads_has_fewer_cells() -> None:
    figure = head_map(["a", "b"], [[1.0], [2.0, 3.0]])
    assert np.isnan(values_of(figure)).tolist() == [[False, True], [False, False]]
    assert not panels(figure)[0].lines


def test_negative_numbers_have_the_other_colour() -> None:
    (ax,) = panels(head_map(["a"], [[-2.0, 1.0, 0.0]]))
    scale = norm(ax)
    assert (scale.vmin, scale.vmax, scale(0.0)) == (-2, 2, 0.5)
    negative, positive, _ = colours(ax)[0]
    assert negative[0] > negative[2]
    assert positive[2] > positive[0]


def test_limits_are_the_ends_of_the_scale() -> None:
    (ax,) = panels(head_map(["a"], [[0.9, 0.95, 1.5, 1.0]], limits=(0.9, 1.0)))
    scale = norm(ax)
    assert (scale.vmin, scale.vmax) == (0.9, 1.0)
    assert same_color(colours(ax)[0, 2], colours(ax)[0, 3])
    (ax,) = panels(head_map(["a"], [[1.0]], limits=(-1.0, 3.0)))
    assert norm(ax)(0.0) == 0.5


def test_map_is_drawn_into_given_axes() -> None:
    page = Figure(layout="constrained")
    left, right = page.subplots(1, 2)
    assert head_map(["a"], [[1.0, 2.0]], ax=right, title="mine") is page
    assert (right.get_title(), len(left.images)) == ("mine", 0)
    with pytest.raises(ValueError, match="ax holds one panel: got 2 panels"):
        head_maps(["a"], {"one": [[1.0]], "two": [[1.0]]}, ax=left)


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor, list])
def test_arrays_of_every_kind_are_drawn(kind: Any) -> None:
    rows = [[0.5, 1.0], [2.0, 4.0]]
    assert values_of(head_map(["a", "b"], kind(rows))).tolist() == rows
    assert values_of(head_map(["a", "b"], [kind(row) for row in rows])).tolist() == rows


def test_small_multiples_share_a_scale() -> None:
    values = {"softmax": [[1.0, 2.0]], "linear\nwindow=4": [[2.0, 4.0]]}
    figure = head_maps(["a"], values)
    assert titles(figure) == ["softmax", "linear window=4"]
    one, other = map(colours, panels(figure))
    assert same_color(one[0, 1], other[0, 0])
    assert len(figure.axes) == 3
    figure = head_maps(["a"], values, shared_scale=False)
    one, other = map(colours, panels(figure))
    assert same_color(one[0, 1], other[0, 1])
    assert len(figure.axes) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0]], "values has the wrong number of rows: got 1, expected 2"),
        ([1.0, 2.0], "values is invalid for layer a: got 1.0"),
        ([[1.0], ["x"]], "values is invalid for layer b: got ['x']"),
        ([[1.0], [float("inf")]], "values is not finite for layer b"),
        ([[], []], "values has no head"),
    ],
)
def test_errors_name_the_layer(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        head_map(["a", "b"], values)


@pytest.mark.parametrize("limits", [(1.0, 1.0), (2.0, 1.0), (0.0, float("inf"))])
def test_limits_must_rise(limits: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="limits is invalid"):
        head_map(["a"], [[1.0]], limits=limits)


def test_map_without_layers_or_values_is_refused() -> None:
    with pytest.raises(ValueError, match="needs layers and values"):
        head_map([], [])
    with pytest.raises(ValueError, match="needs layers and values"):
        head_maps(["a"], {})
