"""Tests that the playground is accessible: axe, keyboard, themes, narrow windows and API keys."""

from __future__ import annotations

import json
import re
import runpy
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from playwright.sync_api import Page, Route, expect

from support.accessibility import HEIGHTS, THEMES, looks, overflow, problems, small_targets
from support.browser import (
    Open,
    choose_example,
    expect_shown,
    paste,
    unfold_sections,
    wait_until_drawn,
)
from support.paths import ROOT
from support.service import Server, running_server

SCREENSHOTS: Final = runpy.run_path(str(ROOT / "docs/screenshots.py"))
PICTURES: Final = SCREENSHOTS["README_PICTURES"] | SCREENSHOTS["OTHER_PICTURES"]
PREPARE: Final = SCREENSHOTS["prepare"]


REFERENCE: Final = re.compile(r"#/components/schemas/([\w.-]+)")

FIRST, SECOND = "first-0123456789", "second-0123456789"


def unfold(page: Page) -> None:
    """Opens every section and every `details` element."""
    unfold_sections(page)
    page.evaluate("() => document.querySelectorAll('details').forEach((d) => (d.open = true))")
    for section in ("#steps", "#gradients"):
        expect(page.locator(f"{section} > div")).not_to_be_empty()
        expect(page.locator(section)).not_to_have_attribute("aria-busy", "true")


def assert_no_violation(page: Page, context: str | None = None) -> None:
    """Reads a part of the page in each look; all of it without a part."""
    for look in looks(page):
        assert problems(page, context) == [], look


@pytest.mark.rare("service/qkv/playground", "tests/support/accessibility.py")
def test_page_has_no_axe_violation_and_no_overflow(open_page: Open, server: Server) -> None:
    """All of the page is read with all its sections open, then the parts that a state adds.

    Other tests read steps, gradients, lessons, a checkpoint and captured models.
    """
    opened = open_page(server.url)
    opened.expect_status(422)
    page = wait_until_drawn(opened)
    unfold_sections(page)
    page.get_by_role("region", name="Comparison").get_by_role("table").wait_for()
    unfold(page)
    page.get_by_role("button", name="Edit words").click()
    page.get_by_role("button", name="All columns").click()
    for look in looks(page):
        assert small_targets(page) == [], look
    page.get_by_role("button", name="Save the weights").click()
    assert_no_violation(page)
    page.keyboard.press("Escape")
    for section in ("Steps", "Gradients"):  # their tables would be those of each further input
        page.get_by_role("button", name=section, exact=True).click()
    for _ in range(2):  # the second one would replace the first one
        paste(page, "[[1, 0], [0, 1]]")
    page.get_by_role("group", name=re.compile("you brought")).wait_for()
    assert_no_violation(page, "form")
    page.get_by_role("button", name="Paste").click()
    page.get_by_label("Tensors or request").fill("")
    page.get_by_role("button", name="Use these").click()
    page.locator("#paste-error").wait_for()
    assert_no_violation(page, "dialog[open]")
    page.keyboard.press("Escape")
    page.get_by_label("softcap", exact=True).fill("-1")
    page.locator("#alert").wait_for()
    assert_no_violation(page, "form, #alert")
    page.get_by_label("Example").select_option("induction")  # has heads and signed differences
    page.get_by_role("group", name="Heads").wait_for()
    page.locator("#map [role=application]").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    sweep = page.locator("#sweep")
    sweep.get_by_label("Up to").select_option("512")
    for label in ("Heads", "Width", "Repeats"):
        sweep.get_by_label(label).fill("2")
    sweep.get_by_role("button", name="Measure").click()
    expect(sweep.get_by_role("status")).to_contain_text("measurements")
    assert_no_violation(page, "#weights, #compare, #length")


def test_examples_fit_narrow_and_wide_windows(open_page: Open, server: Server) -> None:
    opened = open_page(server.url)
    for example in ("layer", "local", "document", "linear-layer"):
        page = choose_example(opened, example)
        unfold(page)
        for width in (390, 2560):
            page.set_viewport_size({"width": width, "height": HEIGHTS[width]})
            assert overflow(page) == 0, (example, width)


@pytest.mark.parametrize("theme", THEMES)
def test_theme_follows_the_system_until_the_user_selects_one(
    open_page: Open, server: Server, theme: str
) -> None:
    page = wait_until_drawn(open_page(server.url, theme=theme, width=390))

    def light() -> float:
        style = "() => getComputedStyle(document.documentElement).backgroundColor"
        return sum(float(part) for part in re.findall(r"[\d.]+", page.evaluate(style))[:3]) / 3

    first = light()
    assert (first > 200) == (theme == "light")
    assert (first < 60) == (theme == "dark")
    page.locator("#theme").click()
    assert (light() < 60) == (theme == "light")
    page.reload()
    drawn_again = light()
    assert (drawn_again < 60) == (theme == "light")
    page.evaluate("() => localStorage.clear()")
    page.reload()
    page.emulate_media(color_scheme="dark" if theme == "light" else "light")
    expect(page.locator("#theme")).to_have_accessible_name(f"{theme.title()} theme")


def test_tab_reaches_every_control_and_the_focus_is_visible(
    open_page: Open, server: Server
) -> None:
    page = wait_until_drawn(open_page(server.url))
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the weights")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#weights")).to_be_focused()
    page.evaluate("() => { document.body.focus(); document.activeElement.blur(); }")
    every = page.evaluate(
        """() => {
            const kinds = "a, button, input, select, textarea, summary, [tabindex='0']";
            const shown = (e) => e.tabIndex >= 0 && e.checkVisibility({ visibilityProperty: true });
            return [...document.querySelectorAll(kinds)].filter(shown).length;
        }"""
    )
    reached, hidden = set(), []
    page.locator("a.skip").focus()
    for _ in range(every + 5):
        where, html = page.evaluate(
            """() => {
                const e = document.activeElement;
                const all = [...document.querySelectorAll("*")];
                const { outlineStyle, boxShadow } = getComputedStyle(e);
                const near = e.labels?.[0] && getComputedStyle(e.labels[0]);
                const shown = [outlineStyle, near?.outlineStyle].some((s) => s && s !== "none");
                const isOutlined = shown || boxShadow !== "none";
                return [all.indexOf(e), isOutlined ? null : e.outerHTML.slice(0, 120)];
            }"""
        )
        reached.add(where)
        if html:
            hidden.append(html)
        page.keyboard.press("Tab")
    assert len(reached) >= every
    assert not [html for html in hidden if not html.startswith("<body")]


def test_page_asks_for_the_api_key_and_keeps_it(
    open_page: Open, serve: Callable[..., Server]
) -> None:
    served = serve(api_keys=f"{FIRST},{SECOND}")
    opened = open_page(served.url)
    opened.expect_status(401)
    page = opened.page
    dialogue = page.get_by_role("dialog", name="API key required")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect_shown(page.locator("#alert"), "key")
    page.reload()
    dialogue.wait_for()
    page.keyboard.press("Escape")
    expect_shown(page.locator("#alert"), "key")
    page.reload()
    dialogue.wait_for()
    expect(dialogue.get_by_label("API key")).to_be_focused()
    assert problems(page) == []
    dialogue.get_by_label("API key").fill("first\u2026")  # no header can have this character
    page.keyboard.press("Enter")
    dialogue.wait_for()
    assert page.evaluate(
        "() => [sessionStorage.length, document.querySelector('#key:invalid') && 1]"
    ) == [0, 1]
    dialogue.get_by_label("API key").fill(" neither ")
    page.keyboard.press("Enter")
    expect(dialogue).to_contain_text("rejected this key")
    dialogue.get_by_label("API key").fill(SECOND)
    dialogue.get_by_role("button", name="Use key").click()
    wait_until_drawn(opened)
    expect(page.locator("#kind")).to_have_text("stochastic")
    code = page.locator("#request code").inner_text()
    assert "QKV_API_KEY" in code
    assert SECOND not in code
    page.reload()  # the tab keeps the key
    wait_until_drawn(opened)
    expect(dialogue).to_be_hidden()


@pytest.fixture(scope="module")
def keyed(_clean_environment: None) -> Iterator[Server]:
    """Returns a service with an API key."""
    with running_server(api_keys=FIRST) as running:
        yield running


def leave_one_operation(page: Page) -> None:
    """Leaves of the API document the list of variants: the page takes 6 s of CPU time for all.

    For tests of the key, beside one that sees the whole document.
    """

    def cut(route: Route) -> None:
        response = route.fetch()
        if not response.ok:
            route.fulfill(response=response)
            return
        document = response.json()
        schemas = document["components"]["schemas"]
        kept = {"/v1/variants": document["paths"]["/v1/variants"]}
        needed: dict[str, Any] = {}
        while names := set(REFERENCE.findall(json.dumps([kept, needed]))) - needed.keys():
            needed |= {name: schemas[name] for name in names}
        components = document["components"] | {"schemas": needed}
        route.fulfill(response=response, json=document | {"paths": kept, "components": components})

    page.route("**/openapi.json", cut)


@pytest.mark.parametrize("has_key", [True, False])
def test_api_link_shows_the_document_with_the_key_of_the_tab(
    open_page: Open, server: Server, keyed: Server, has_key: bool
) -> None:
    opened = open_page((keyed if has_key else server).url, width=390)
    page = opened.page
    if has_key:
        opened.expect_status(401)
        page.get_by_role("textbox", name="API key").fill(FIRST)
        page.get_by_role("button", name="Use key").click()
    else:
        leave_one_operation(page)  # the case with a key draws the whole document
    wait_until_drawn(opened)
    page.get_by_role("link", name="API", exact=True).click()
    operation = page.locator("#operations-catalogue-list_variants")  # it needs a key too
    operation.wait_for()
    operation.click()
    operation.get_by_role("button", name="Try it out").click()
    operation.get_by_role("button", name="Execute").click()
    expect_shown(operation.locator(".live-responses-table .response-col_status").last, "200")
    if has_key:
        page.locator("#operations-attention-attend_softmax").wait_for()


def test_page_of_the_api_asks_for_the_key(open_page: Open, keyed: Server) -> None:
    opened = open_page(keyed.url, path="/docs")
    opened.expect_status(401)
    page = opened.page
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect_shown(page.get_by_role("alert"), "key")
    leave_one_operation(page)
    page.reload()
    page.get_by_role("textbox", name="API key").fill(FIRST)
    page.keyboard.press("Enter")
    page.locator("#operations-catalogue-list_variants").wait_for()


@pytest.mark.parametrize("name", PICTURES)
def test_screenshots_have_their_size_and_content(
    open_page: Open, server: Server, name: str
) -> None:
    picture = PICTURES[name]
    opened = open_page(server.url, picture.width, picture.height, picture.theme)
    PREPARE(opened.page, picture)
    png = opened.page.screenshot()
    assert png[16:24] == struct.pack(">II", picture.width, picture.height)
    assert len(png) > 20_000  # an empty page has a tenth of these bytes
    shown = f'src="docs/{name}"' in (ROOT / "README.md").read_text()
    assert shown == (ROOT / "docs" / name).exists() == (name in SCREENSHOTS["README_PICTURES"])
