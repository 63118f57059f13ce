"""Tests the presenter view: large type, and the map beside its controls."""

from __future__ import annotations

import re
from typing import Final

from playwright.sync_api import Page, expect

from support.accessibility import overflow, problems
from support.browser import Open, typeset, wait_until_drawn
from support.javascript import Modules
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
        if i in (0, 3):  # each layout and each theme once
            assert problems(page) == []
        assert overflow(page) == 0


def test_view_is_entered_and_left(open_page: Open, server: Server) -> None:
    opened = open_page(server.url)
    page = wait_until_drawn(opened)
    small = font_size(page)
    button = page.get_by_role("button", name="Present", exact=True)
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    assert font_size(page) > 1.4 * small
    page.wait_for_url(re.compile("view=presenter"))
    expect(page.locator("#comparison")).to_be_hidden()
    page.get_by_role("link", name="Compare").click()
    page.locator("#comparison tbody tr").first.wait_for()

    page.get_by_label("causal", exact=True).check()
    page.wait_for_url(re.compile("causal=true"))
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_label("causal", exact=True)).not_to_be_checked()
    expect(button).to_have_attribute("aria-pressed", "true")

    page.locator("#map [role=application]").focus()
    page.keyboard.press("Escape")  # takes back the row
    expect(button).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Escape")
    expect(button).to_have_attribute("aria-pressed", "false")
    assert font_size(page) == small
    page.locator("#timing").wait_for()
    page.keyboard.press("Alt+p")
    expect(button).to_have_attribute("aria-pressed", "true")


FITS: Final = """() => {
    const [text, buttons] = ["p", ".steps"].map((one) => document.querySelector(`#lesson ${one}`));
    return text.getBoundingClientRect().bottom <= buttons.getBoundingClientRect().top;
}"""


def test_texts_of_lessons_fit_above_their_buttons(
    open_page: Open, server: Server, modules: Modules
) -> None:
    lessons = modules.evaluate("() => lesson_list.LESSONS.map(({ id, stops }) => [id, stops])")
    opened = open_page(server.url, path="/#lesson=attention&view=presenter")
    page = wait_until_drawn(opened)
    page.set_viewport_size({"width": 1280, "height": 720})
    page.route("**/v1/**", lambda route: None)  # the texts do not wait for the results
    for _, stops in lessons:
        for stop in stops:
            expect(page.locator("#lesson p")).to_have_text(typeset(stop["text"]))
            assert page.evaluate(FITS), stop["text"]
            page.locator("#lesson .primary").click()


def test_what_a_lesson_is_about_stays_in_view(open_page: Open, server: Server) -> None:
    opened = open_page(server.url, path="/#lesson=attention&stop=4")
    page = wait_until_drawn(opened)
    page.set_viewport_size({"width": 1280, "height": 720})
    for _ in range(2):
        page.get_by_role("button", name="Present", exact=True).click()
        wait_until_drawn(opened)
        for one in page.locator(".looked-at").all():
            expect(one).to_be_in_viewport()


def test_types_of_charts_and_gradients_grow_and_steps_stand_side_by_side(
    open_page: Open, server: Server
) -> None:
    path = "/#lesson=gradients&stop=3&view=presenter&open=gradients,steps,length"
    opened = open_page(server.url, path=path)
    page = wait_until_drawn(opened)
    page.set_viewport_size({"width": 1920, "height": 1080})
    page.get_by_label("Up to").select_option("512")
    page.get_by_role("button", name="Measure").click()
    expect(page.locator("#sweep progress")).to_be_hidden()
    label = page.locator("#chart [data-label]").first.bounding_box()
    assert label is not None
    assert label["height"] > 20  # pixels; 14 in the page's own size
    tops = page.locator(".step-list > li").evaluate_all("all => all.map((one) => one.offsetTop)")
    assert len(set(tops)) < len(tops)
