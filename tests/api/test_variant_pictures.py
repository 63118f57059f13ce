"""The picture of every variant shows the weights of the service's response."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np
import pytest
import variant_pictures
from matplotlib import image

from qkv.attention import catalogue, variant_file
from qkv.attention.variant import Variant
from support.known_requests import as_json, assert_problem
from support.pictures import colours, matrix, panels
from support.service import Server

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
NAMES: Final = [n for n, v in catalogue.variants().items() if variant_pictures.has_matrix(v)]

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


def stored(name: str) -> str:
    """Returns the picture in the package."""
    return (variant_file.FOLDER / "pictures" / f"{name}.svg").read_text(encoding="utf-8")


def embedded(svg: str) -> list[np.ndarray]:
    """Returns the matrices of colours in a picture, from the top, without colour bars."""
    found = [
        np.asarray(image.imread(BytesIO(base64.b64decode(data))))
        for data in re.findall(r'href="data:image/png;base64,([^"]+)"', svg)
    ]
    return [pixels for pixels in found if pixels.shape == (16, 16, 4)]


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_shows_the_weight_of_the_response(server: Server, name: str) -> None:
    """A colour has 256 levels, and the last digits of a weight may move it by one."""
    variant = catalogue.find(name)
    figure, ways = variant_pictures.draw(variant), variant_pictures.ways(variant)
    pictures = embedded(stored(name))
    assert len(panels(figure)) == len(ways) == len(pictures)
    assert len(ways) == (2 if "causal" in variant.parameters.model_fields else 1)
    for ax, way, pixels in zip(panels(figure), ways, pictures, strict=True):
        weights = response_weights(server, variant, way.parameters)
        assert np.allclose(matrix(ax).filled(0), weights, rtol=1e-12, atol=1e-15)
        assert (pixels[..., 3] == (weights != 0)).all()
        shown = weights != 0
        assert np.abs(pixels - colours(ax))[shown].max() <= 2 / 255
        if way.parameters.get("causal"):
            assert not np.triu(shown, 1).any()


@pytest.mark.parametrize("name", NAMES)
def test_picture_is_small_and_has_no_scripts(name: str) -> None:
    svg = stored(name)
    assert len(svg) < 60_000
    texts = {e.text for e in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}
    rows = "input i" if catalogue.find(name).outputs["weights"].letters == ("B", "I") else "query i"
    assert {name, rows, "weight"} <= texts
    assert "<script" not in svg
    assert not re.search(r"@import|\bon\w+=|href=\"(?!#|data:image/png)", svg)


def test_same_figure_has_the_same_text() -> None:
    one, other = (
        variant_pictures.to_svg(variant_pictures.draw(catalogue.find("mean"))) for _ in range(2)
    )
    assert one == other


def test_variants_can_be_told_apart() -> None:
    assert len({stored(name) for name in NAMES}) == len(NAMES)


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
        assert response.text == stored(name)
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
    (ax,) = panels(variant_pictures.draw(variant))
    drawn = matrix(ax)
    assert np.allclose(drawn.filled(0), found["query"][0, 0] @ found["table"][:3])
    assert drawn.min() < 0 < drawn.max()


@pytest.mark.parametrize(
    "returns",
    [
        "",
        'weights: Float64[Tensor, "S"] | None = None',
        'weights: Float64[Tensor, "B H L S D"] | None = None',
    ],
    ids=["no weights", "one axis", "five axes"],
)
def test_variant_without_a_weights_matrix_cannot_be_drawn(
    odd: Callable[[str, str], Variant], returns: str
) -> None:
    assert not variant_pictures.has_matrix(odd(returns, "return Odd()"))


def test_variant_without_a_file_has_no_picture(
    server: Server, odd: Callable[[str, str], Variant]
) -> None:
    odd(MATRIX, "return Odd()")
    assert server.http.get("/v1/variants/odd").json()["picture"] is None
    problem = assert_problem(server.http.get("/v1/variants/odd/picture"), 404)
    assert "odd has no picture" in problem["detail"]
