"""Tests the playground's words in Chromium: tooltips of terms, plain labels, the causal note."""

from __future__ import annotations

import json
import re
from typing import Final

from playwright.sync_api import expect

from support.browser import (
    Open,
    choose_example,
    expect_shown,
    open_narrow,
    unfold_sections,
    wait_until_drawn,
)
from support.service import Server

TERMS: Final = {
    "stochastic": "each row of weights sums to 1",
    "Symbols": "D channels of a query and a key",
    "D": "the number of channels of a query",
    "KL": "Kullback–Leibler divergence",
    "Jensen–Shannon": "symmetric",
    "Total variation": "Half the sum of absolute differences",
    "Effective keys": "exp(entropy)",
    "Cumulative": "the keys above it",
}


def test_term_has_a_tooltip_on_focus_and_on_hover(open_page: Open, server: Server) -> None:
    page = wait_until_drawn(open_page(server.url, width=390))
    unfold_sections(page)
    page.locator("#comparison table").wait_for()
    page.get_by_role("button", name="All columns").click()
    page.evaluate("() => document.querySelectorAll('details').forEach((d) => (d.open = true))")
    tooltip = page.get_by_role("tooltip")
    page.clock.install()  # the page hides the tooltip 150 ms after the pointer has left it
    for width in (390, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        for name, words in TERMS.items():
            button = page.locator(f"button.term[data-term='{name}']").first
            expect(button).to_have_accessible_description(re.compile(re.escape(words)))
            expect(tooltip).to_be_hidden()
            button.focus()
            expect_shown(tooltip, words)
            expect(tooltip).to_be_in_viewport(ratio=1)
            page.keyboard.press("Escape")
            expect(tooltip).to_be_hidden()
            button.blur()
            button.hover()
            expect_shown(tooltip, words)
            tooltip.hover()  # the pointer can move onto the tooltip
            page.clock.run_for(300)
            tooltip.wait_for()
            page.mouse.move(1, 1)
            page.clock.run_for(300)
            expect(tooltip).to_be_hidden()


def test_page_uses_plain_words_and_each_column_of_the_metrics_has_a_tooltip(
    open_page: Open, server: Server
) -> None:
    opened = open_page(server.url)
    page = wait_until_drawn(opened)
    page.locator("#comparison table").wait_for()
    page.evaluate("() => document.querySelectorAll('details').forEach((d) => (d.open = true))")
    text = page.locator("body").inner_text()
    for words in ("null", "Let go", "Bring out", "as by default", "say when", "Not now"):
        assert words not in text, words
    placeholders = page.eval_on_selector_all("input", "all => all.map((one) => one.placeholder)")
    assert "default" in placeholders
    assert "as by default" not in placeholders
    page.get_by_label("Emphasise small weights").wait_for()
    expect(page.get_by_role("button", name="Unpin this row")).to_have_text("Unpin")
    expect(page.get_by_label("scale", exact=True)).to_have_accessible_description(
        re.compile(r"By default 1/sqrt\( ?D ?\)")
    )
    expect(page.locator("#parameter-window-about")).to_contain_text("Such as [4, 0].")

    # each column of the metrics has a tooltip
    headers = page.locator("#comparison thead tr").last.locator("th").filter(has_not_text="Variant")
    expect(headers).to_have_count(5)
    page.get_by_role("button", name="All columns").click()
    expect(headers).to_have_count(11)
    expect(headers.locator("button.term")).to_have_count(11)


def test_top_left_causal_is_noted_if_queries_and_keys_differ_in_number(
    open_page: Open, server: Server
) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    note = page.locator("#causal-note")
    expect(note).to_be_hidden()  # 6 queries, 6 keys
    rows = [[1, 0], [0, 1], [1, 1]]
    page.get_by_role("button", name="Paste").click()
    page.get_by_label("Tensors or request").fill(
        json.dumps({"query": rows[:1], "key": rows, "value": rows})
    )
    page.get_by_role("button", name="Use these").click()
    expect(note).to_have_text(
        "1 query, 3 keys: causal aligns query 0 with key 0. "
        "To align the last query with the last key, set query_offset to “end”."
    )
    expect(page.get_by_label("causal", exact=True)).to_have_accessible_description(
        re.compile("causal aligns query 0 with key 0")
    )
    page.get_by_label("query_offset", exact=True).fill("end")
    expect(note).to_be_hidden()
    page.get_by_label("query_offset", exact=True).fill("")
    note.wait_for()
    choose_example(opened, "words")
    expect(note).to_be_hidden()
