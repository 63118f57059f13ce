"""Tests the lessons in Chromium: every stop, the keys, links to a stop, and the way back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from playwright.sync_api import Page, Route, expect

from support.accessibility import overflow, problems
from support.browser import Open, read_gradients, typeset, wait_until_drawn
from support.javascript import Modules
from support.service import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

SHOWS = """numbers => {
    const parts = [...document.querySelectorAll("main, form")].map((one) => one.textContent);
    const values = [...document.querySelectorAll("input, select")].map((one) => one.value);
    const text = [...parts, ...values].join(" ");
    return numbers.every((number) => text.includes(number));
}"""


def stops_of(modules: Modules) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    """Returns the lessons, with the place and the content of each of their stops."""
    lessons: list[dict[str, Any]] = modules.evaluate("() => lesson_list.LESSONS")
    for lesson in lessons:
        for number, stop in enumerate(lesson["stops"], start=1):
            yield lesson, f"{number} of {len(lesson['stops'])}", stop


def numbers_of(text: str) -> list[str]:
    """Returns the numbers of a text, as the page writes them."""
    return re.findall(r"\N{MINUS SIGN}?\d+(?:[.,]\d+)*", text)


def check_gradients(page: Page) -> None:
    """Checks that the gradients of each input are their finite differences, apart from rounding."""
    rows = read_gradients(page)
    for name in ("query", "key", "value"):
        shown = np.array([row for entry, row in rows.items() if entry.startswith(f"{name},")])
        assert shown[:, 2].max() < 1e-4 * np.abs(shown[:, 0]).max(), (page.url, name, shown)
        np.testing.assert_array_equal(shown[:, 0] == 0, shown[:, 1] == 0)  # a blank cell is 0


@pytest.mark.rare("service/qkv/playground", "service/qkv/attention", "service/qkv/jobs/measure")
def test_each_stop_shows_its_section_and_every_number_of_its_text(
    open_page: Open, server: Server, modules: Modules
) -> None:
    opened = open_page(server.url)
    page = wait_until_drawn(opened)
    page.get_by_role("link", name="What attention is").click()
    panel = page.locator("#lesson")
    for lesson, place, stop in stops_of(modules):
        expect(panel.get_by_role("heading")).to_have_text(lesson["title"])
        expect(panel.locator("header .hint")).to_have_text(place)
        expect(panel.locator("p")).to_have_text(typeset(stop["text"]))
        assert len(re.findall(r"[.?](?= |$)", stop["text"])) == 2, stop["text"]
        wait_until_drawn(opened)
        expect(page.locator("#sweep progress")).to_be_hidden()
        expect(page.locator("#alert")).to_be_hidden()
        expect(page.locator(f"section:has(#{stop['section']}-title)")).to_be_in_viewport()
        expect(page.locator("#gradients[aria-busy]")).to_have_count(0)
        if "look" in stop:
            elements = page.locator(".looked-at")
            expect(elements).to_have_count(1 + stop["look"].count(","))
            for element in elements.all():
                expect(element).to_be_in_viewport()
        # reads all texts: not in each frame
        page.wait_for_function(SHOWS, arg=numbers_of(stop["text"]), polling=100)
        if stop["section"] == "gradients":
            check_gradients(page)
        panel.locator(".primary").click()  # Next, Next lesson, and Close at the end
    expect(panel).to_be_hidden()
    expect(page.get_by_role("link", name=lesson["title"])).to_be_focused()
    page.wait_for_url(lambda address: "lesson" not in address)


def test_lesson_is_followed_by_keys_links_and_history(open_page: Open, server: Server) -> None:
    opened = open_page(server.url, path="/#lesson=causal&stop=2")
    page = wait_until_drawn(opened)
    panel = page.locator("#lesson")
    place = panel.locator("header .hint")
    expect(panel.get_by_role("heading")).to_have_text("Causal masks")
    expect(place).to_have_text("2 of 6")
    expect(page.get_by_label("Query", exact=True)).to_have_value("5")
    assert urlsplit(page.url).fragment == "lesson=causal&stop=2"

    page.keyboard.press("ArrowRight")  # nothing has the focus
    expect(place).to_have_text("3 of 6")
    expect(page.get_by_label("Variant", exact=True)).to_have_value("mean")
    page.wait_for_url("**/#lesson=causal&stop=3")
    page.get_by_label("Variant", exact=True).select_option("linear")
    page.wait_for_url("**/#lesson=causal&stop=3&example=words&variant=linear**")
    page.get_by_label("Query", exact=True).press("ArrowRight")  # moves in the text of the field
    expect(place).to_have_text("3 of 6")
    panel.get_by_role("button", name="Next").click()
    expect(place).to_have_text("4 of 6")
    expect(page.get_by_label("Variant", exact=True)).to_have_value("softmax")
    page.wait_for_url("**/#lesson=causal&stop=4")
    page.go_back()
    expect(place).to_have_text("3 of 6")
    expect(page.get_by_label("Variant", exact=True)).not_to_have_value("softmax")

    wait_until_drawn(opened)  # the page brings the section into view: not while the mouse is down
    page.get_by_role("link", name="Why linear is linear").click()
    heading = panel.get_by_role("heading")
    expect(heading).to_have_text("Why linear is linear")
    expect(heading).to_be_focused()
    page.get_by_role("button", name="Undo").click()
    expect(heading).to_have_text("Causal masks")
    page.get_by_role("button", name="Close the lesson").click()
    expect(panel).to_be_hidden()
    expect(page.locator(".looked-at")).to_have_count(0)


def test_sweep_of_a_stop_waits_for_the_comparison(open_page: Open, server: Server) -> None:
    opened = open_page(server.url, path="/#lesson=linear&stop=3")
    page = wait_until_drawn(opened)
    held: list[Route] = []
    page.route("**/v1/compare", lambda route: held.append(route))
    page.locator("#lesson").get_by_role("button", name="Back").click()
    expect(page.locator("#lesson header .hint")).to_have_text("2 of 6")
    wait_until_drawn(opened)
    expect(page.locator("#comparison [role=status]")).to_have_text("Comparing…")
    expect(page.locator("#sweep-repeats")).to_have_value("9")
    assert "/v1/sweep" not in opened.requests
    with page.expect_request("**/v1/sweep"):
        held[0].continue_()
    expect(page.locator("#sweep progress")).to_be_hidden()


def test_lesson_leaves_the_map_free_in_each_width(open_page: Open, server: Server) -> None:
    opened = open_page(server.url, path="/#lesson=attention&stop=1")
    page = wait_until_drawn(opened)
    for width, height in {390: 844, 1440: 900}.items():
        page.set_viewport_size({"width": width, "height": height})
        box = page.locator("#lesson").bounding_box()
        drawn = page.locator("#map canvas").first.bounding_box()
        assert box is not None
        assert drawn is not None
        is_beside = box["x"] + box["width"] <= drawn["x"]
        is_below = box["y"] >= drawn["y"] + drawn["height"]
        assert is_beside or is_below, (width, box, drawn)
        assert not overflow(page)
    assert not problems(page, ".columns")
