"""The picture of every variant shows the weights of the service's response."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import pytest

from qkv import heatmap
from qkv.api import variant_pictures
from qkv.attention import catalogue
from qkv.attention.variant import Variant
from support.known_requests import as_json, assert_problem
from support.pictures import SVG, panel_cells, parse_svg
from support.service import Server

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
NAMES: Final = [name for name, v in catalogue.variants().items() if variant_pictures._axes(v)]

ODD: Final = '''\
"""An odd variant: what a file may look like that is not like the others."""

from typing import Annotated, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64
from pydantic import Field
from torch import Tensor

REFUSES = {{}}
FORMULA = PAPER = COST = "odd"
WEIGHTS = "signed"


class Odd(NamedTuple):
    output: Float[Tensor, "B H L D"] | None = None
    {answers}


def flops(sizes):
    return 1


def attend(
    query_BHL3: Float[Tensor, "B H L 3"],
    table_5D: Float[Tensor, "5 D"],
    count_B: Int64[Tensor, "B"],
    mask_BHLS: Bool[Tensor, "#B #H #L #S"],
    *,
    outputs: frozenset[str],
) -> Odd:
    {body}
'''


def response_weights(server: Server, variant: Variant, parameters: Any) -> np.ndarray:
    """Returns the weights of a request over HTTP with the example input."""
    inputs = {n: as_json(array, "base64") for n, array in variant_pictures.inputs(variant).items()}
    body = {"inputs": inputs, "parameters": dict(parameters), "outputs": ["weights"]}
    response = server.http.post(
        f"/v1/attention/{variant.name}", json=body | {"encoding": "lists", "dtype": "float64"}
    )
    assert response.status_code == 200, response.text
    weights = np.array(response.json()["outputs"]["weights"])
    return weights.reshape(weights.shape[-2:])


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_shows_the_weight_of_the_response(server: Server, name: str) -> None:
    """Up to half a shade, and to the three digits of a shade's number."""
    variant = catalogue.find(name)
    panels, ways = panel_cells(variant_pictures.draw(variant)), variant_pictures.ways(variant)
    assert len(panels) == len(ways) == (2 if "causal" in variant.parameters.model_fields else 1)
    for panel, way in zip(panels, ways, strict=True):
        weights = response_weights(server, variant, way.parameters)
        assert panel.keys() == {(i, j) for i, j in np.argwhere(weights != 0).tolist()}
        most = np.abs(weights).max()
        for at, number in panel.items():
            share, exact = np.sqrt(np.abs([number, weights[at]]) / most)
            # three digits have an error of 1/200 at most, and the root half of that
            assert abs(share - exact) <= (0.5 + 1e-5) / heatmap.LEVELS + share / 400
            assert number == 0 or np.sign(number) == np.sign(weights[at])
        if way.parameters.get("causal"):
            assert all(j <= i for i, j in panel)


@pytest.mark.parametrize("name", NAMES)
def test_picture_is_small_has_no_scripts_and_a_title(name: str) -> None:
    variant = catalogue.find(name)
    svg = variant_pictures.draw(variant)
    assert svg is not None
    assert len(svg) < 30_000
    root = parse_svg(svg)
    assert root.get("role") == "img"
    texts = {e.get("id"): e.text or "" for e in root if e.get("id")}
    assert list(texts) == (root.get("aria-labelledby") or "").split()
    assert name in texts["title"]
    assert variant.summary in texts["description"]
    words = {text.text: text.get("class") for text in root.iter(f"{SVG}text")}
    assert words[name] == "name"
    rows = "input i" if variant.outputs["weights"].letters == ("B", "I") else "query i"
    assert words[rows] == "axis"
    kinds = {e.tag.removeprefix(SVG) for e in root.iter()}
    assert kinds <= {"svg", "title", "desc", "style", "rect", "text", "g", "path"}
    assert not re.search(r"url\(|@import|href|\bon\w+=", svg)
    assert "prefers-color-scheme:dark" in svg


@pytest.mark.parametrize("name", NAMES)
def test_last_digits_do_not_change_the_picture(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Another processor or build of torch draws the same bytes."""
    variant, exact, random = (
        catalogue.find(name),
        variant_pictures._weights,
        np.random.default_rng(0),
    )

    def noisy(*of: Any) -> np.ndarray:
        weights = exact(*of)
        return weights * (1 + random.uniform(-1e-11, 1e-11, weights.shape))

    # private: no argument changes the last bits of the weights, as another processor would
    monkeypatch.setattr(variant_pictures, "_weights", noisy)
    assert variant_pictures.draw.__wrapped__(variant) == variant_pictures.draw(variant)


def test_variants_can_be_told_apart() -> None:
    assert len({variant_pictures.draw(v) for v in catalogue.variants().values()}) == len(NAMES)
    sharp, flat = (
        variant_pictures._weights(catalogue.find(n), variant_pictures.Way("", {}))
        for n in ("softmax", "taylor")
    )
    assert sharp.max() > 5 * flat.max()


def test_negative_weights_are_orange_and_zeros_are_empty() -> None:
    matrix = np.array([[-4.0, 0.0, 1.0], [2.0, -1e-9, 4.0]])
    panel = heatmap.Panel("", matrix, "row i", "column j", "", "")
    svg = heatmap.draw("<signed>", "a & b", "", [panel])
    (found,) = panel_cells(svg)
    assert found.keys() == {(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)}
    assert found[0, 0] == -4
    assert found[1, 2] == 4
    assert found[0, 2] == 1
    assert found[1, 1] == 0
    classes = {p.get("class"): p for p in parse_svg(svg).iter(f"{SVG}path")}
    assert {"n32", "p32", "p0"} <= classes.keys()
    assert ">-4<" in svg
    assert "&lt;signed&gt;" in svg


def test_shades_change_evenly() -> None:
    """Lightness is monotonic, in light and dark, on both sides of 0."""
    matrix = np.array([[-1.0, 1.0]])
    svg = heatmap.draw("", "", "", [heatmap.Panel("", matrix, "", "", "", "")])
    light, dark = svg.split("@media")
    for style, down in ((light, True), (dark, False)):
        colours = dict(re.findall(r"\.([np]\d+)\{fill:#([0-9a-f]{6})\}", style))
        assert len(colours) == 2 * heatmap.LEVELS + 1
        for side in ("n", "p"):
            ramp = [colours[f"{side}{s}" if s else "p0"] for s in range(heatmap.LEVELS + 1)]
            rgb = np.array([[int(c[i : i + 2], 16) for i in (0, 2, 4)] for c in ramp]) / 255
            linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
            luminance = np.cbrt(linear @ [0.2126, 0.7152, 0.0722])
            steps = np.diff(luminance) * (-1 if down else 1)
            assert (steps > 0).all()
            assert steps.max() < 3 * steps.min()


def test_picture_over_http(server: Server) -> None:
    entries = {e["variant"]: e for e in server.http.get("/v1/variants").json()["variants"]}
    assert [name for name, entry in entries.items() if entry["picture"]] == NAMES
    for name in NAMES:
        entry = server.http.get(f"/v1/variants/{name}").json()
        assert entry == entries[name]
        path = entry["picture"]
        assert path == f"/v1/variants/{name}/picture"
        response = server.http.get(path)
        assert response.status_code == 200
        assert response.text == variant_pictures.draw(catalogue.find(name))
        assert response.headers["content-type"] == "image/svg+xml"
        assert response.headers["content-security-policy"] == POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"
        tag = response.headers["etag"]
        for known in (tag, f'"other", W/{tag}', "*"):
            again = server.http.get(path, headers={"If-None-Match": known})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == tag
        assert server.http.get(path, headers={"If-None-Match": '"other"'}).content
    problem = assert_problem(server.http.get("/v1/variants/sotfmax/picture"), 404)
    assert "softmax" in problem["detail"]


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Variant]:
    """Returns a variant for one test, from its output and its signature."""

    def new_variant(returns: str, body: str) -> Variant:
        module = ModuleType("qkv.attention.variants.odd")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(ODD.format(answers=returns, body=body), module.__dict__)
        variant = catalogue.read_module(module, Path("odd.py"))
        everything = {**catalogue.variants(), "odd": variant}
        monkeypatch.setattr(catalogue, "variants", lambda: everything)
        return variant

    return new_variant


MATRIX: Final = 'weights: Float64[Tensor, "B H L S"] | None = None'


def test_unusual_signatures_get_a_picture(odd: Callable[[str, str], Variant]) -> None:
    """Fixed axes, integers, a required mask, a table: all come from the signature."""
    body = (
        "return Odd(weights=query_BHL3 @ table_5D[:3, :].expand(1, 1, -1, -1) * mask_BHLS"
        " * (count_B == 16))"
    )
    variant = odd(MATRIX, body)
    found = variant_pictures.inputs(variant)
    assert {n: (a.shape, a.dtype.name) for n, a in found.items()} == {
        "query": ((1, 1, 16, 3), "float64"),
        "table": ((5, 16), "float64"),
        "count": ((1,), "int64"),
        "mask": ((1, 1, 16, 16), "bool"),
    }
    (panel,) = panel_cells(variant_pictures.draw(variant))
    expected = found["query"][0, 0] @ found["table"][:3]
    assert panel.keys() == {(i, j) for i, j in np.argwhere(expected != 0).tolist()}
    assert min(panel.values()) < 0 < max(panel.values())


@pytest.mark.parametrize(
    ("returns", "body"),
    [
        ("", "return Odd()"),
        ('weights: Float64[Tensor, "S"] | None = None', "return Odd()"),
        ('weights: Float64[Tensor, "B H L S D"] | None = None', "return Odd()"),
        (MATRIX, "raise ValueError('D must be a multiple of 64')"),
        (MATRIX, "return Odd(weights=torch.full((1, 1, 16, 16), torch.nan, dtype=torch.float64))"),
    ],
    ids=["no weights", "one axis", "five axes", "fails", "not finite"],
)
def test_variant_without_a_weights_matrix_has_no_picture(
    server: Server, odd: Callable[[str, str], Variant], returns: str, body: str
) -> None:
    variant = odd(returns, body)
    assert variant_pictures.draw(variant) is None
    assert server.http.get("/v1/variants/odd").json()["picture"] is None
    problem = assert_problem(server.http.get("/v1/variants/odd/picture"), 404)
    assert "odd has no picture" in problem["detail"]
