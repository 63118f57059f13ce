"""Tests the playground's gradients: their numbers, the check by differences, and the entry."""

from __future__ import annotations

import json
import re
from typing import Any, Final
from urllib.parse import parse_qs, urlencode, urlsplit

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from qkv import Client
from support.accessibility import overflow, problems
from support.browser import Open, paste, read_gradients, unfold_form, wait_until_drawn
from support.service import Server

WORDS: Final = np.array(
    [
        [0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33], [0.77, 0.25, 0.10], [0.05, 0.80, 0.55],
    ]
)  # fmt: skip

ERROR: Final = 2**-30
"""Of a finite difference with the step h = 2^-17, about h^2, for numbers of size 1."""


def one_hot(row: int, col: int, shape: tuple[int, ...] = (6, 3)) -> np.ndarray[Any, Any]:
    """Returns the gradient of an output whose one entry is chosen."""
    grad = np.zeros(shape)
    grad[row, col] = 1
    return grad


def fields_of(page: Page) -> dict[str, list[str]]:
    """Returns the fields of the page's fragment."""
    return parse_qs(urlsplit(page.url).fragment, keep_blank_values=True)


@pytest.mark.representative
def test_gradients_are_those_of_the_client_and_near_finite_differences(
    open_page: Open, server: Server
) -> None:
    opened = open_page(server.url, width=390)
    page = wait_until_drawn(opened)
    path = "/v1/gradients/softmax"
    assert path not in opened.requests  # a folded section sends nothing
    page.get_by_role("button", name="Gradients", exact=True).click()
    with Client(server.url) as client:
        arguments: dict[str, Any] = {"query": WORDS, "key": WORDS, "value": WORDS, "scale": 1.0}
        for row, col in ((5, 0), (4, 1)):
            expect(page.locator("#entry-row")).to_have_value(str(row))
            table = read_gradients(page)
            expected = client.gradients("softmax", grad_output=one_hot(row, col), **arguments)
            numbers = np.concatenate([expected[n].ravel() for n in ("query", "key", "value")])
            shown = np.array(list(table.values()))
            assert shown.shape == (54, 3)
            for column in (0, 1):  # of four digits; small numbers have three
                np.testing.assert_allclose(shown[:, column], numbers, rtol=5e-3, atol=ERROR)
            assert shown[:, 2].max() < ERROR
            expect(page.locator("#gradients [role=status]")).to_contain_text("both in float64")
            output = page.locator("#gradients").get_by_role("application", name="choose it")
            output.focus()
            for key in ("End", "ArrowLeft", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown"):
                page.keyboard.press(key)
            page.keyboard.press("Enter")
    # one batch for each input: the service computes every difference
    batches = [body for body in opened.posted("/v1/attention/softmax") if "encoding" in body]
    assert [body["inputs"]["query"]["shape"] for body in batches[:3]] == [[36, 6, 3]] * 3


def test_chosen_entry_and_open_section_belong_to_the_link(open_page: Open, server: Server) -> None:
    opened = open_page(server.url, width=390, path="/#example=words&open=gradients&entry=2,1")
    page = wait_until_drawn(opened)
    section = page.locator("#gradients")
    section.scroll_into_view_if_needed()
    expect(page.locator("#entry-row")).to_have_value("2")
    before = read_gradients(page)
    page.get_by_label("Channel", exact=True).fill("0")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("entry=2%2C0"))
    assert read_gradients(page) != before
    assert fields_of(page)["open"] == ["gradients"]
    map_of_key = section.get_by_role("application", name="gradient of key")
    map_of_key.focus()
    page.keyboard.press("ArrowDown")
    name, numbers = "key, journey, channel 0", read_gradients(page)["key, journey, channel 0"]
    readout = section.locator(".gradient-readout")
    expect(readout).to_contain_text(f"{name}: gradient {numbers[0]}".replace("-", "\u2212"))
    expect(readout).to_contain_text("finite difference")
    assert problems(page, "#gradients") == []
    page.go_back()
    wait_until_drawn(opened)
    expect(page.locator("#entry-channel")).to_have_value("1")
    assert read_gradients(page) == before
    page.get_by_role("button", name="Gradients", exact=True).click()
    page.wait_for_url(lambda address: "open=" not in address)
    expect(section.locator("table")).to_be_hidden()


def link(variant: str, tensors: dict[str, Any], **fields: str) -> str:
    """Returns the path of a page with these tensors and the gradients open."""
    entries = [{"name": n, "role": n, "tensor": t.tolist()} for n, t in tensors.items()]
    return "/#" + urlencode(
        {"variant": variant, "tensors": json.dumps(entries), "open": "gradients", **fields}
    )


def draw(*shapes: tuple[int, ...]) -> dict[str, Any]:
    """Draws query, key and value."""
    rng = np.random.default_rng(0)
    drawn = [rng.standard_normal(shape).round(3) for shape in shapes]
    return dict(zip(("query", "key", "value"), drawn, strict=True))


HEADS: Final = draw((2, 4, 5, 3), (2, 2, 5, 3), (2, 2, 5, 2))
LAYER: Final = {
    "layout": "v2",
    "heads": 2,
    "tensors": {f"W_{name}.weight": np.eye(4, 3).tolist() for name in ("query", "key", "value")},
}

CASES: Final = {
    "heads": link("efficient", HEADS, head="5"),
    "items": link("gated", draw((2, 5, 3), (2, 5, 3), (2, 5, 2)), head="1", entry="3,1"),
    "mask": link(
        "softmax", {**HEADS, "mask": np.ones((2, 1, 1, 1)) * np.tri(5) > 0, "sinks": np.ones(4)}
    ),
    "lengths": link("sigmoid", {**draw((5, 3), (5, 3), (5, 2)), "key_lengths": np.array([3])}),
    "layer": link("softmax", {"x": HEADS["query"][0, :2]}, layer=json.dumps(LAYER), head="3"),
    "one row": "/#example=linear-layer&open=gradients",
}
"""A case for each kind of shape that the entry's item is found in."""


@pytest.mark.slow
def test_gradients_of_each_kind_of_input_are_near_finite_differences(
    open_page: Open, server: Server
) -> None:
    opened = open_page(server.url, width=390, height=3000)
    page = wait_until_drawn(opened)
    for name, path in CASES.items():
        page.evaluate("() => { document.getElementById('status').textContent = ''; }")
        page.goto(server.url + path)
        wait_until_drawn(opened)
        shown = np.array(list(read_gradients(page).values()))
        assert np.abs(shown[:, 0]).max() > 0, name
        assert shown[:, 2].max() < 16 * ERROR * np.abs(shown[:, 0]).max(), name


def test_gradients_that_cannot_be_shown_or_checked_say_why(open_page: Open, server: Server) -> None:
    path = "/#variant=mean&open=gradients"
    opened = open_page(server.url, width=390, height=3000, path=path)
    page = wait_until_drawn(opened)
    unfold_form(page)
    paste(page, json.dumps({"value": [[0] * 128] * 600}))
    status = wait_until_drawn(opened).locator("#gradients").get_by_role("status")
    expect(status).to_have_text(
        "Gradients are shown for inputs of up to 65,536 numbers. This run has 76,800."
    )
    assert len(opened.posted("/v1/gradients/mean")) == 1  # of the example before
    page.get_by_label("Example").select_option("words")
    page.get_by_label("Variant", exact=True).select_option("softmax")
    page.get_by_label("dropout", exact=True).fill("0.5")
    expect(status).to_contain_text("Dropout draws other weights for each run")
    assert overflow(page) == 0
