"""Tests the playground's heat maps in Chromium: pointer, keyboard, rows, heads, long inputs."""

from __future__ import annotations

import json
import re
from typing import Final

import numpy as np
import pytest
from playwright.sync_api import Locator, Page, expect

from support.browser import (
    Open,
    choose_example,
    match_groups,
    open_narrow,
    paste,
    read_weights,
    unfold_sections,
    wait_until_drawn,
)
from support.service import Server

EXAMPLES: Final = ["words", "layer", "induction", "local", "document", "linear-layer"]
WORDS: Final = ["Your", "journey", "starts", "with", "one", "step"]
MAP: Final = "#map [role=application]"


def painted(canvas: Locator) -> int:
    """Returns the number of colours on a canvas."""
    colours: int = canvas.evaluate(
        """canvas => {
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            return new Set(new Uint32Array(data.buffer)).size;
        }"""
    )
    return colours


def count_drawings(page: Page) -> None:
    """Counts the drawings of the map from now on."""
    page.locator(f"{MAP} canvas").evaluate(
        """canvas => {
            const context = canvas.getContext("2d");
            const { setTransform } = context; // called once for each drawing
            window.drawings = 0;
            context.setTransform = (...values) => {
                window.drawings += 1;
                setTransform.apply(context, values);
            };
        }"""
    )


DRAWINGS: Final = """async () => {
    const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
    for (let i = 0; i < 3; i += 1) await frame();
    return window.drawings;
}"""
"""The number of drawings after three more frames."""


def move_cursor(page: Page, row: int, col: int) -> None:
    """Moves the cursor of the map to a cell with the keyboard."""
    page.locator(MAP).focus()
    page.keyboard.press("Escape")
    page.keyboard.press("Home")
    for _ in WORDS:
        page.keyboard.press("ArrowUp")
    for key, times in (("ArrowDown", row), ("ArrowRight", col)):
        for _ in range(times):
            page.keyboard.press(key)


def test_each_example_is_drawn(open_page: Open, server: Server) -> None:
    opened = open_page(server.url, width=390, path="/#open=output")
    opened.expected.append("willReadFrequently")  # `painted` reads a canvas for each example
    listed = wait_until_drawn(opened).locator("#example option[value]:not([value=''])")
    values = listed.evaluate_all("options => options.map((option) => option.value)")
    assert sorted(values) == sorted(EXAMPLES)
    for example in (*EXAMPLES[1:], EXAMPLES[0]):  # the page opens with the first
        page = choose_example(opened, example)
        expect(page.locator("#example-about")).not_to_be_empty()
        expect(page.locator("#alert")).to_be_hidden()
        for canvas in ("#map", "#output"):
            expect(page.locator(f"{canvas} [role=application]")).to_have_attribute(
                "aria-label", re.compile(r"\d+ .* by \d+")
            )
            assert painted(page.locator(f"{canvas} canvas").first) > 10, example
        page.locator("#row tbody tr").first.wait_for()


def test_pointer_and_keyboard_show_and_pin_a_row_and_the_keyboard_is_announced(
    open_page: Open, server: Server
) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    weights = read_weights(page)
    surface = page.locator(MAP)
    surface.focus()
    page.keyboard.press("Escape")  # the example starts with a pinned row
    box = page.locator(f"{MAP} canvas").bounding_box()
    assert box is not None
    heading = page.locator("#row").get_by_role("heading")
    seen = set()
    for step in range(2, 24):  # down the map, over every row
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * step / 24)
        seen.add(heading.inner_text())
    assert seen == set(WORDS)
    readout = page.locator("#map .readout")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    row, col, number = match_groups(r"(\w+) → (\w+) ([\d.]+)", readout.inner_text())
    assert float(number) == pytest.approx(weights[row][WORDS.index(col)], abs=1e-4)
    page.mouse.down()
    page.mouse.up()
    page.get_by_role("button", name="Unpin this row").wait_for()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.9)
    expect(heading).to_have_text(row)
    page.get_by_role("button", name="Unpin this row").click()
    page.get_by_role("button", name="Pin this row").wait_for()

    # the keyboard does all that the pointer does, and is announced
    move_cursor(page, 4, 1)
    spoken = page.locator("#announcements")
    expect(spoken).to_have_attribute("aria-live", "polite")
    expect(spoken).to_have_text(re.compile("^one to journey: "))
    assert float(spoken.inner_text().split()[-1]) == pytest.approx(weights["one"][1], abs=1e-4)
    page.keyboard.press("Enter")
    expect(spoken).to_have_text("Pinned: one")
    expect(page.locator("#row").get_by_role("heading")).to_have_text("one")
    page.keyboard.press("ArrowUp")
    expect(page.locator("#row").get_by_role("heading")).to_have_text("one")
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowUp")
    expect(page.locator("#row").get_by_role("heading")).to_have_text("starts")
    page.keyboard.press("End")
    expect(spoken).to_have_text(re.compile("^starts to step: "))
    page.get_by_label("Query", exact=True).fill("5")
    page.keyboard.press("Enter")
    expect(page.locator("#row").get_by_role("heading")).to_have_text("step")


@pytest.mark.representative
def test_row_lists_keys_by_weight_with_cumulative_share_and_entropy(
    open_page: Open, server: Server
) -> None:
    opened = open_page(server.url, width=390, path="/#example=local")
    page = wait_until_drawn(opened)
    page.get_by_label("Query", exact=True).fill("9")
    page.keyboard.press("Enter")
    expect(page.locator("#row").get_by_role("heading")).to_have_text("query 9")
    body = [b for b in opened.posted("/v1/attention/softmax") if "weights" not in b][-1]
    response = server.http.post("/v1/attention/softmax", json=body | {"encoding": "lists"}).json()
    row = np.array(response["outputs"]["weights"])[0, 0, 9]
    order = np.argsort(-row, kind="stable")[:8]
    shown = page.locator("#row tbody tr").all_inner_texts()
    for text, key, sum_ in zip(shown, order, np.cumsum(row[order]), strict=True):
        name, weight, share = re.split(r"\s*\t\s*", text.strip())
        assert name == f"key {key}"
        assert float(weight) == pytest.approx(row[key], abs=0.51e-4)
        assert float(share.split()[0]) == pytest.approx(100 * sum_, abs=0.51)
    entropy = -np.sum(row[row > 0] * np.log(row[row > 0]))
    facts = page.locator("#row dl").inner_text()
    assert float(match_groups(r"([\d.]+) nats", facts)[0]) == pytest.approx(entropy, rel=2e-3)


def test_row_with_nan_says_so_instead_of_seeing_no_key(open_page: Open, server: Server) -> None:
    opened = open_page(server.url)
    page = wait_until_drawn(opened)
    key = [[1, 0], [0, 1], [1, 1]]
    paste(page, json.dumps({"inputs": {"query": [[1, 0], ["NaN", 1]], "key": key, "value": key}}))
    wait_until_drawn(opened)
    page.get_by_label("Query", exact=True).fill("1")
    page.keyboard.press("Enter")
    row = page.locator("#row")
    expect(row.locator(".hint")).to_contain_text("All weights of this row are NaN.")
    expect(row.locator(".facts dd")).to_have_text(["–", "–"])
    expect(row.get_by_role("table")).to_be_hidden()
    expect(page.locator("#difference [role=status]")).to_contain_text(
        re.compile(r"1 row has NaN, and no part in the figures\..* 0\.\d+ on average")
    )
    colours = page.locator("#map canvas").first.evaluate(
        """canvas => {
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            return [...new Set(new Uint32Array(data.buffer))].map((x) => x & 0xffffff);
        }"""
    )
    assert 0xA0A0A0 in colours  # the cells of NaN are grey, not empty as those of 0
    page.get_by_label("Query", exact=True).fill("0")
    page.keyboard.press("Enter")
    expect(row.locator(".hint")).to_contain_text("Half of the mass is on")
    expect(row.locator(".facts dd").first).to_contain_text("nats")


def test_head_thumbnails_select_the_head_and_a_row_beyond_the_next_input_is_unpinned(
    open_page: Open, server: Server
) -> None:
    opened = open_narrow(open_page, server.url, path="/#example=induction")
    page = opened.page
    grid = page.get_by_role("group", name="Heads")
    heads = grid.get_by_role("button")
    expect(heads).to_have_count(4)
    expect(heads.nth(0)).to_have_attribute("aria-pressed", "true")
    before = read_weights(page)
    heads.nth(2).click()
    expect(heads.nth(2)).to_have_attribute("aria-pressed", "true")
    expect(page.locator(MAP)).to_have_attribute("aria-label", re.compile("head 2"))
    assert read_weights(page) != before
    for index in range(4):
        assert painted(heads.nth(index).locator("canvas")) > 2

    # a pinned row beyond the next input is unpinned
    page.get_by_label("Example").select_option("local")
    heading = page.locator("#row").get_by_role("heading")
    expect(heading).to_have_text("query 32")
    count_drawings(wait_until_drawn(opened))
    page.get_by_label("Example").select_option("linear-layer")
    expect(heading).to_have_text("journey")
    # another height of the map is no reason to draw it again
    assert page.evaluate(DRAWINGS) == 1
    page.get_by_label("Query", exact=True).fill("5")
    page.keyboard.press("Enter")
    expect(heading).to_have_text("step")
    page.get_by_role("button", name="Paste").click()
    two = [[1, 0], [0, 1]]
    page.get_by_label("Tensors or request").fill(json.dumps({"x": two, "weight": two}))
    page.get_by_role("button", name="Use these").click()
    expect(page.locator("#status")).to_have_text(re.compile("2 queries, 2 keys"))
    expect(heading).to_have_text("query 1")


def test_page_never_requests_the_full_map_of_4096_tokens(open_page: Open, server: Server) -> None:
    opened = open_page(server.url, path="/#example=document")
    page = wait_until_drawn(opened)
    expect(page.locator("#status")).to_have_text(re.compile("4096 queries, 4096 keys"))
    page.get_by_label("Query", exact=True).fill("2000")
    page.keyboard.press("Enter")
    expect(page.locator("#row").get_by_role("heading")).to_have_text("query 2000")
    page.locator(MAP).focus()
    page.keyboard.press("Escape")
    page.evaluate(
        """() => {
            const canvas = document.querySelector("#map canvas");
            const { left, top, width, height } = canvas.getBoundingClientRect();
            for (let step = 0; step < 200; step += 1) {
                const [clientX, clientY] = [left + width / 2, top + (height * step) / 400];
                const moved = new PointerEvent("pointermove", { clientX, clientY, bubbles: true });
                canvas.dispatchEvent(moved);
            }
        }"""
    )
    expect(page.locator("#row").get_by_role("heading")).not_to_have_text("query 2000")
    wait_until_drawn(opened)
    forms = [body["weights"] for body in opened.posted("/v1/attention/softmax")]
    assert forms[0] == {"pool": 256}  # drawn before the statistics arrive
    rest = [form for form in forms[1:] if form != "stats"]
    assert len(rest) == len(forms) - 2
    assert all("rows" in form and len(form["rows"]) == 1 for form in rest)
    assert {"rows": [2000]} in forms
    assert len(forms) <= 8  # the page does not request every row that the pointer passes
    # the full map of two heads has 134 MB
    assert opened.received_bytes < 4e6


def test_main_controls_are_visible_in_a_narrow_window(open_page: Open, server: Server) -> None:
    page = wait_until_drawn(open_page(server.url, width=390, height=844))
    for name in ("Weights", "Compare", "Length"):
        page.get_by_role("link", name=name, exact=True).wait_for()
    unfold_sections(page)
    page.locator("#comparison table").wait_for()
    area = page.locator("#comparison .scroll")
    assert area.evaluate("area => (area.scrollLeft = 9999) && area.scrollLeft > 100")
    variant = page.locator("#comparison tbody th").first.bounding_box()
    edge = area.bounding_box()
    assert variant is not None
    assert edge is not None
    assert variant["x"] == pytest.approx(edge["x"], abs=1)  # the first column does not scroll
    assert page.evaluate("() => document.documentElement.scrollWidth") == 390


def test_table_names_the_largest_weight_of_the_keys_that_a_row_sees(
    open_page: Open, server: Server
) -> None:
    """The weight of a token that is not seen yet is 0, which is above all negative weights."""
    tokens = np.ones((30, 2))
    tokens[0, 0] = 0.0
    key = np.array([-1.0, 1.0]) * tokens
    inputs = {"query": tokens.tolist(), "key": key.tolist(), "value": tokens.tolist()}
    inputs["query"][0] = [0.0, -1.0]
    inputs["query"][1] = [3.0, 1.0]
    inputs["query"][5] = [0.0, 0.0]
    opened = open_narrow(open_page, server.url, path="/#variant=gated")
    page = opened.page
    paste(page, json.dumps({"inputs": inputs}))
    wait_until_drawn(opened)
    page.get_by_text("Weights as a table").click()
    rows = page.locator("#table tbody tr")
    expect(rows).to_have_count(30)
    assert rows.nth(0).inner_text().split("\t")[1:3] == ["key 0", "\u22120.7071"]
    assert rows.nth(1).inner_text().split("\t")[1:3] == ["key 0", "0.7071"]
    assert rows.nth(5).inner_text().split("\t")[1:3] == ["\u2013", "\u2013"]
