"""Tests the state of the playground in its address: links, back and forward, and reloads."""

from __future__ import annotations

import json
import re
from typing import Final
from urllib.parse import parse_qs, urlencode, urlsplit

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from support.browser import (
    Open,
    WatchedPage,
    choose_example,
    expect_shown,
    open_narrow,
    paste,
    read_weights,
    unfold_form,
    wait_until_drawn,
)
from support.service import Server

THREE: Final = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]


def fields_of(address: str) -> dict[str, str]:
    """Returns the fields of the fragment of an address."""
    fragment = urlsplit(address).fragment
    return {name: values[0] for name, values in parse_qs(fragment, True).items()}


def wait_for_field(page: Page, name: str, value: str) -> None:
    """Waits until the fragment has a field with this value."""
    page.wait_for_url(lambda address: fields_of(address).get(name) == value)


def go_back(opened: WatchedPage) -> Page:
    """Goes back to the state before and waits until it is drawn."""
    opened.page.evaluate("() => { document.getElementById('status').textContent = ''; }")
    opened.page.go_back()
    return wait_until_drawn(opened)


@pytest.mark.representative
def test_address_describes_the_page(open_page: Open, server: Server) -> None:
    opened = open_page(server.url)
    page = wait_until_drawn(opened)
    assert not urlsplit(page.url).fragment  # an unchanged page has a short address
    page = choose_example(opened, "induction")
    page.get_by_label("Variant", exact=True).select_option("linear")
    page.get_by_label("causal", exact=True).check()
    page.get_by_role("button", name="head 2").click()
    page.get_by_label("Emphasise small weights").check()
    page.get_by_label("linear minus", exact=True).select_option("taylor")
    page.locator("#compare-mean").uncheck()
    wait_for_field(page, "without", "mean")
    fields = fields_of(page.url)
    assert fields.pop("labels").startswith("the cat saw the dog")
    assert fields == {
        "example": "induction", "variant": "linear", "parameters.causal": "true",
        "parameters.scale": "1", "difference": "taylor", "row": "10", "head": "2",
        "shades": "root", "without": "mean",
    }  # fmt: skip


def test_reload_and_another_browser_show_the_same_page(open_page: Open, server: Server) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    paste(page, json.dumps({"query": THREE, "key": THREE, "value": THREE}))
    wait_until_drawn(opened)
    page.get_by_label("softcap", exact=True).fill("2.5")
    page.get_by_label("Token labels").fill('"New York" is big')
    wait_for_field(page, "labels", '["New York","is","big"]')
    address, shown = page.url, read_weights(page)
    page.get_by_role("button", name="Copy link").click()
    page.get_by_role("button", name="Copied").wait_for()
    expect(page.locator("#link-note")).to_be_hidden()
    assert page.evaluate("() => navigator.clipboard.readText()") == address
    page.reload()
    for one in (opened, open_page(address, path="", width=390)):
        same = wait_until_drawn(one)
        assert same.url == address
        assert read_weights(same) == shown
        expect(same.get_by_label("softcap", exact=True)).to_have_value("2.5")
        expect(same.get_by_label("Example")).to_have_value("")
        expect(same.locator("#tensors .name")).to_have_text(["query", "key", "value"])
        assert "New York" not in json.dumps(one.bodies)


def test_back_and_forward_return_to_states(open_page: Open, server: Server) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    words = read_weights(page)
    page.get_by_label("causal", exact=True).check()
    wait_for_field(page, "parameters.causal", "true")
    for text in ("a", "a b", "a b c d e f"):  # typing on in a field makes no further entry
        page.get_by_label("Token labels").fill(text)
        wait_for_field(page, "labels", text)
    page = choose_example(opened, "linear-layer")
    wait_for_field(page, "example", "linear-layer")
    go_back(opened)
    assert list(read_weights(page)) == list("abcdef")
    go_back(opened)
    assert list(read_weights(page)) == list(words)
    expect(page.get_by_label("causal", exact=True)).to_be_checked()
    go_back(opened)
    assert read_weights(page) == words
    assert not urlsplit(page.url).fragment
    page.go_forward()
    wait_until_drawn(opened)
    expect(page.get_by_label("causal", exact=True)).to_be_checked()


def test_large_tensors_stay_out_of_the_link_and_survive_a_reload(
    open_page: Open, server: Server
) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    rows = np.random.default_rng(0).standard_normal((20, 64)).round(3).tolist()
    paste(page, json.dumps(rows))
    wait_until_drawn(opened)
    wait_for_field(page, "left_out", "tensors")
    assert len(page.url) < 300
    shown = read_weights(page)
    page.reload()
    wait_until_drawn(opened)
    assert read_weights(page) == shown
    unfold_form(page)
    choose_example(opened, "words")
    wait_for_field(page, "example", "words")
    go_back(opened)
    assert read_weights(page) == shown
    page.get_by_role("button", name="Copy link").click()
    expect(page.locator("#link-note")).to_have_text(
        "The link is copied. It does not hold the tensors: too large for a link."
    )
    other = open_page(page.url, path="", width=390).page
    expect(other.locator("#example-about")).to_contain_text("This link does not hold the tensors")
    expect_shown(other.locator("#alert"), "requires query, key and value")


SHORT_LINKS: Final = {
    "example=induction": ("softmax: 19 queries", "10"),
    "variant=linear_layer": ("linear_layer: 6 queries", "1"),
    "example=words&variant=sigmoid&parameters.bias=-1&row=4": ("sigmoid: 6 queries", "4"),
}


def test_written_link_has_the_values_of_its_example(open_page: Open, server: Server) -> None:
    """The first one opens the page; the others are pasted into its address."""
    first = next(iter(SHORT_LINKS))
    page = open_page(server.url, path=f"/#{first}", width=390).page
    for fragment, (status, row) in SHORT_LINKS.items():
        if fragment != first:
            page.goto(f"{server.url}/#{fragment}")
        expect(page.locator("#status")).to_contain_text(status)
        expect(page.get_by_label("Query", exact=True)).to_have_value(row)
        assert urlsplit(page.url).fragment == fragment


WRONG_LINKS: Final = [
    ({"variant": "none"}, "Variant of this link is invalid: got “none”, expected efficient, "),
    ({"example": "<b>"}, "Example of this link is invalid: got “<b>”, expected words, "),
    ({"row": "-1"}, "Row of this link is invalid: got “-1”, expected a whole number."),
    ({"parameters.scale": "{"}, "parameters.scale of this link is invalid: got “{”, expected JSON"),
    ({"tensors": "[1]"}, "Tensors of this link is invalid: got “[1]”, expected a list"),
    ({"tensors": '[{"name": "a", "tensor": [[1, "x"]]}]'}, '[0][1] is "x": expected a number'),
    ({"layer": "3"}, "Layer of this link is invalid: got “3”, expected an object with tensors, "),
]


def test_damaged_link_is_reported_beside_an_example(open_page: Open, server: Server) -> None:
    """The first one opens the page; the others are pasted into its address."""
    first, *others = [f"/#{urlencode(fields)}" for fields, _ in WRONG_LINKS]
    opened = open_page(server.url, path=first, width=390)
    for path, (_, message) in zip((None, *others), WRONG_LINKS, strict=True):
        if path:
            opened.page.goto(server.url + path)
        page = wait_until_drawn(opened)
        expect(page.locator("#example-about")).to_contain_text(message)
        expect(page.locator("#example-about")).to_contain_text("This is an example instead.")
        expect(page.locator("#status")).to_have_text(re.compile("^softmax: 6 queries"))


def test_link_to_a_section_keeps_the_state(open_page: Open, server: Server) -> None:
    page = wait_until_drawn(open_page(server.url, path="/#example=linear-layer"))
    address = page.url
    page.get_by_role("link", name="Compare").click()
    expect(page.locator("#compare")).to_be_focused()
    expect(page.locator("#compare")).to_be_in_viewport()
    assert page.url == address
