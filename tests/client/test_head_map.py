"""Tests of maps of layers by heads: names of layers, colours, missing values and errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qkv import Figure, head_map, head_maps
from qkv.client.figures.colours import LIGHT
from qkv.heatmap import LEVELS
from support.pictures import SVG, parse_svg


def texts(figure: Figure) -> list[str]:
    """Returns the texts of a figure in the order of drawing, without tooltips."""
    found = parse_svg(figure.svg).iter(f"{SVG}text")
    return ["".join([e.text or "", *((c.tail or "") for c in e)]) for e in found]


def cells(figure: Figure) -> dict[str, str]:
    """Returns the colour of each cell by its tooltip."""
    return {
        path.findtext(f"{SVG}title") or "": path.get("fill") or ""
        for path in parse_svg(figure.svg).iter(f"{SVG}path")
        if path.find(f"{SVG}title") is not None
    }


def tooltips(figure: Figure) -> list[str]:
    return [e.text or "" for e in parse_svg(figure.svg).iter(f"{SVG}title")][1:]


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
    figure = head_map(layers, np.ones((len(layers), 2)))
    assert [t for t in texts(figure) if t in labels] == labels
    whole = [name for name, label in zip(layers, labels, strict=True) if name != label]
    assert [t for t in tooltips(figure) if t in whole] == whole


def test_cells_have_numbers_colours_and_tooltips() -> None:
    figure = head_map(["a", "b"], [[0, 0.25], [0.5, 1.0]], title="T & t", value_name="share")
    assert cells(figure) == {
        "a, head 0: 0": LIGHT.shade(0), "a, head 1: 0.25": LIGHT.shade(LEVELS // 4),
        "b, head 0: 0.5": LIGHT.shade(LEVELS // 2), "b, head 1: 1": LIGHT.shade(LEVELS),
    }  # fmt: skip
    shown = texts(figure)
    assert shown[0] == "T & t"
    assert shown[1:5] == ["0.00", "0.25", "0.50", "1.00"]
    assert {"share", "head"} <= set(shown)


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        ([[12.34, 5.0]], ["12.3", "5.0"]),
        ([[2.345, 1.0]], ["2.35", "1.00"]),
        ([[0.0123, 0.002]], ["0.012", "0.002"]),
        ([[120, 7]], ["120", "7"]),
        ([[-0.5, 0.25]], ["−0.50", "0.25"]),
    ],
)
def test_numbers_of_a_map_have_as_many_decimals(
    values: list[list[float]], numbers: list[str]
) -> None:
    assert texts(head_map(["a"], values))[:2] == numbers


def test_small_cells_have_no_numbers() -> None:
    values = np.linspace(0, 1, 1024).reshape(32, 32)
    figure = head_map([f"h.{n}.attn" for n in range(32)], values)
    layers, heads = [f"h.{n}" for n in range(32)], [str(n) for n in range(32)]
    assert texts(figure) == [*layers, *heads, "head", "0", "0.25", "0.5", "0.75", "1"]
    assert len(cells(figure)) == 1024


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_missing_values_are_crossed_out_and_in_the_legend(missing: float | None) -> None:
    figure = head_map(["a", "b"], [[1.0, missing], [2.0, 3.0]])
    assert "no value" in texts(figure)
    assert tooltips(figure).count("a, head 1: no value") == 1
    assert "a, head 1: no value" not in cells(figure)
    assert "no value" not in texts(head_map(["a"], [[1.0, 2.0]]))


def test_a_layer_with_fewer_heads_has_fewer_cells() -> None:
    figure = head_map(["a", "b"], [[1.0], [2.0, 3.0]])
    assert set(cells(figure)) == {"a, head 0: 1", "b, head 0: 2", "b, head 1: 3"}
    assert "no value" not in texts(figure)


def test_negative_numbers_have_the_other_colour() -> None:
    figure = head_map(["a"], [[-2.0, 1.0, 0.0]])
    assert list(cells(figure).values()) == [
        LIGHT.shade(-LEVELS), LIGHT.shade(0), LIGHT.shade(LEVELS // 2),
    ]  # fmt: skip


def test_limits_are_the_ends_of_the_scale() -> None:
    figure = head_map(["a"], [[0.9, 0.95, 1.5]], limits=(0.9, 1.0))
    colours = [cells(figure)[f"a, head {n}: {x}"] for n, x in enumerate(("0.9", "0.95", "1.5"))]
    assert colours == [LIGHT.shade(0), LIGHT.shade(LEVELS // 2), LIGHT.shade(LEVELS)]
    assert {"0.9", "1"} <= set(texts(figure))


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor, list])
def test_arrays_of_every_kind_are_drawn(kind: Any) -> None:
    rows = [[0.5, 1.0], [2.0, 4.0]]
    assert head_map(["a", "b"], kind(rows)) == head_map(["a", "b"], rows)
    assert head_map(["a", "b"], [kind(row) for row in rows]) == head_map(["a", "b"], rows)


def test_small_multiples_share_a_scale() -> None:
    values = {"softmax": [[1.0, 2.0]], "linear\nwindow=4": [[2.0, 4.0]]}
    figure = head_maps(["a"], values)
    assert [t for t in texts(figure) if t in ("softmax", "linear window=4")] == [
        "softmax", "linear window=4",
    ]  # fmt: skip
    found = parse_svg(figure.svg).iter(f"{SVG}path")
    fills = {
        (p.findtext(f"{SVG}title"), p.get("fill"))
        for p in found
        if p.find(f"{SVG}title") is not None
    }
    assert fills == {
        ("a, head 0: 1", LIGHT.shade(LEVELS // 4)), ("a, head 1: 2", LIGHT.shade(LEVELS // 2)),
        ("a, head 0: 2", LIGHT.shade(LEVELS // 2)), ("a, head 1: 4", LIGHT.shade(LEVELS)),
    }  # fmt: skip
    own = cells(head_maps(["a"], values, shared_scale=False))
    assert own["a, head 1: 2"] == own["a, head 1: 4"] == LIGHT.shade(LEVELS)


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


@pytest.mark.slow
def test_map_is_saved(tmp_path: Path) -> None:
    figure = head_map(["a", "b"], [[1.0, None], [0.5, 2.0]], caption="A sentence.")
    assert figure.caption == "A sentence."
    for suffix, magic in (("svg", b"<svg"), ("pdf", b"%PDF"), ("png", b"\x89PNG")):
        figure.save(tmp_path / f"map.{suffix}")
        assert (tmp_path / f"map.{suffix}").read_bytes().startswith(magic)
