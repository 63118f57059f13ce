"""Tests the presenter view: large type, and the map beside its controls."""

from __future__ import annotations

import re
from typing import Final

from playwright.sync_api import Page, expect

from support.accessibility import problems
from support.browser import Open, wait_until_drawn
from support.service import Server

WINDOWS: Final = {(1920, 1080): 26, (2560, 1440): 32, (1280, 720): 20, (960, 470): 18}
"""Least font size, in CSS pixels, by the window; the last is one of 1,920 pixels at 200 %."""


def font_size(page: Page) -> float:
    size: float = page.evaluate(
        "() => parseFloat(getComputedStyle(document.documentElement).fontSize)"
    )
    return size


def test_map_and_controls_are_visible_together(open_page: Open, server: Server) -> None:
    path = "/#example=induction&variant=softmax&parameters.causal=true&view=presenter"
    page = wait_until_drawn(open_page(server.url, path=path))
    for i, ((width, height), least) in enumerate(WINDOWS.items()):
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme="dark" if i % 2 else "light")
        assert font_size(page) >= least
        for part in (
            page.get_by_label("Example", exact=True),
            page.get_by_label("Variant", exact=True),
            page.get_by_label("causal", exact=True),
            page.locator("#map canvas").first,
            page.locator("#map .legend"),
            page.get_by_role("button", name="head 1"),
        ):
            expect(part).to_be_in_viewport(ratio=1)
        canvas = page.locator("#map canvas").first.bounding_box()
        assert canvas is not None
        assert canvas["width"] > width * 0.4
        assert canvas["height"] > height * 0.6
        assert problems(page) == []


def test_view_is_entered_and_left(open_page: Open, server: Server) -> None:
    opened = open_page(server.url)
    page = wait_until_drawn(opened)
    small = font_size(page)
    button = page.get_by_role("button", name="Present", exact=True)
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    assert font_size(page) > 1.4 * small
    expect(page).to_have_url(re.compile("view=presenter"))
    expect(page.locator("#comparison")).to_be_hidden()
    page.get_by_role("link", name="Compare").click()
    expect(page.locator("#comparison tbody tr").first).to_be_visible()

    page.get_by_label("causal", exact=True).check()
    expect(page).to_have_url(re.compile("causal=true"))
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_label("causal", exact=True)).not_to_be_checked()
    expect(button).to_have_attribute("aria-pressed", "true")

    page.locator("#map [role=application]").focus()
    page.keyboard.press("Escape")  # takes back the row
    expect(button).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Escape")
    expect(button).to_have_attribute("aria-pressed", "false")
    assert font_size(page) == small
    expect(page.locator("#timing")).to_be_visible()
    page.keyboard.press("Alt+p")
    expect(button).to_have_attribute("aria-pressed", "true")
