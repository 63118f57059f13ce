"""Tests the playground on a telephone: sections fold, and only open ones send requests."""

from __future__ import annotations

import re
from typing import Final

from playwright.sync_api import Locator, Page, expect

from support.accessibility import problems
from support.browser import Open, unfold_sections, wait_until_drawn
from support.service import Server

TELEPHONE: Final = {"width": 390, "height": 844}
MAX_HEIGHT: Final = 2500  # pixels of the page when it is loaded


def heading(page: Page, name: str) -> Locator:
    """Returns the button that folds a section."""
    return page.get_by_role("heading", name=name, exact=True).get_by_role("button")


def wait_for_link(page: Page, pattern: str) -> None:
    page.wait_for_url(re.compile(pattern))


def test_sections_fold_and_open(open_page: Open, server: Server) -> None:
    opened = open_page(server.url, **TELEPHONE)
    page = wait_until_drawn(opened)
    page.wait_for_load_state("networkidle")
    assert page.evaluate("() => document.documentElement.scrollHeight") <= MAX_HEIGHT
    assert problems(page) == []
    headings = page.locator("main section:visible h2")
    assert headings.count() == headings.get_by_role("button").count()
    expect(page.locator("main .fold[aria-expanded=true]:visible")).to_have_text(["Weights"])
    expect(page.locator("#comparison")).to_be_hidden()
    assert opened.posted("/v1/compare") == []
    assert opened.posted("/v1/attention/linear") == []  # for the difference

    compare = heading(page, "Compare")
    page.get_by_role("link", name="Compare").click()
    expect(compare).to_have_attribute("aria-expanded", "true")
    expect(page.locator("#compare")).to_be_in_viewport()
    page.locator("#comparison tbody tr").first.wait_for()
    assert len(opened.posted("/v1/compare")) == 1
    wait_for_link(page, "open=compare")

    page.get_by_label("Variant", exact=True).select_option("linear")
    wait_for_link(page, "variant=linear")
    wait_until_drawn(opened)
    heading(page, "Weights").press("Enter")
    expect(page.locator("#map")).to_be_hidden()
    wait_for_link(page, "open=compare&closed=weights")
    page.get_by_role("button", name="Undo").click()  # takes back the variant, not the folding
    expect(page.get_by_label("Variant", exact=True)).to_have_value("softmax")
    expect(heading(page, "Weights")).to_have_attribute("aria-expanded", "false")
    expect(compare).to_have_attribute("aria-expanded", "true")

    page.set_viewport_size({"width": 1440, "height": 900})
    page.locator("#map").wait_for()
    expect(page.locator("main .fold")).to_have_text(["Steps", "Gradients"])


def test_link_opens_sections(open_page: Open, server: Server) -> None:
    page = wait_until_drawn(open_page(server.url, **TELEPHONE, path="/#open=length&closed=weights"))
    expect(heading(page, "Sequence length")).to_have_attribute("aria-expanded", "true")
    expect(heading(page, "Weights")).to_have_attribute("aria-expanded", "false")
    page = wait_until_drawn(open_page(server.url, **TELEPHONE, path="/#compare"))
    expect(heading(page, "Compare")).to_have_attribute("aria-expanded", "true")
    expect(heading(page, "Weights")).to_have_attribute("aria-expanded", "true")


def test_texts_speak_of_touch(open_page: Open, server: Server) -> None:
    opened = open_page(server.url, **TELEPHONE, touch=True)
    page = wait_until_drawn(opened)
    unfold_sections(page)
    page.evaluate("() => document.querySelectorAll('details').forEach((d) => (d.open = true))")
    text = page.locator("body").inner_text()
    assert "Tap a cell to read it and to pin its row." in text
    assert not re.findall(r"\b(?:[Cc]lick|[Pp]ointer|[Hh]over|drop files|arrow keys)\b.*", text)
    surface = page.locator("#map [role=application]")
    assert "Tap" in (surface.get_attribute("aria-label") or "")
    surface.scroll_into_view_if_needed()
    canvas = surface.locator("canvas").bounding_box()
    assert canvas is not None
    page.touchscreen.tap(canvas["x"] + canvas["width"] / 2, canvas["y"] + canvas["height"] / 2)
    expect(page.locator("#map .readout strong")).to_have_text(re.compile(r"^0\.\d+$"))


def test_numbers_stay_beside_long_labels(open_page: Open, server: Server) -> None:
    page = wait_until_drawn(open_page(server.url, **TELEPHONE, theme="dark"))
    labels = [f"a label of thirty letters, no. {i}" for i in range(6)]
    page.get_by_text("Tensors", exact=True).click()
    page.get_by_label("Token labels").fill("\n".join(labels))
    surface = page.locator("#map [role=application]")
    surface.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#map .readout")).to_contain_text(f"{labels[1]} → {labels[0]}")
    ink = surface.locator("canvas").evaluate(
        """canvas => {
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            const isInk = (i) => data[i] === 255 && data[i + 1] === 255 && data[i + 2] === 255;
            return Array.from({ length: width * height }, (_, at) => 4 * at).filter(isInk).length;
        }"""
    )
    assert ink > 0  # of the numbers: nothing else on the map is white in the dark theme
