"""Tests the numbers of small tensors in the playground: a grid in which users change them."""

from __future__ import annotations

import json
import re
from typing import Final

import numpy as np
import pytest
from playwright.sync_api import expect

from support.browser import (
    Open,
    choose_example,
    open_narrow,
    paste,
    read_weights,
    unfold_form,
    wait_until_drawn,
)
from support.service import Server

TWO: Final = [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.representative
def test_each_edit_is_drawn_and_can_be_undone(open_page: Open, server: Server) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    undo, words = page.get_by_role("button", name="Undo"), read_weights(page)
    page.get_by_role("button", name="Edit words").click()
    page.get_by_label("words, Your, 0").focus()
    seen = []
    for number in ("0.9", "0,25"):  # with a decimal point and a decimal comma
        page.keyboard.type(number)
        with page.expect_request("**/v1/attention/softmax") as sent:
            page.keyboard.press("Enter")  # goes to the cell below
        seen.append((sent.value.post_data_json or {})["inputs"]["query"])
        wait_until_drawn(opened)
        page.wait_for_timeout(300)  # a step of the history
    assert [row[0] for row in seen[0]] == [0.9, 0.55, 0.57, 0.22, 0.77, 0.05]
    assert [row[0] for row in seen[1]] == [0.9, 0.25, 0.57, 0.22, 0.77, 0.05]
    expect(page.get_by_label("words, starts, 0")).to_be_focused()
    expect(page.get_by_label("Example")).to_have_value("")
    expect(page.get_by_label("Token labels")).to_have_value("Your journey starts with one step")
    after = read_weights(page)
    page.reload()  # the fragment holds the numbers
    wait_until_drawn(opened)
    assert read_weights(page) == after
    unfold_form(page)
    page.get_by_role("button", name="Edit words").click()
    undo.click()
    expect(page.get_by_label("words, journey, 0")).to_have_value("0.55")
    expect(page.get_by_label("words, Your, 0")).to_have_value("0.9")
    undo.click()
    expect(page.get_by_label("words, Your, 0")).to_have_value("0.43")
    expect(page.get_by_label("Example")).to_have_value("words")
    wait_until_drawn(opened)
    assert read_weights(page) == words


def test_grid_is_used_by_keyboard_alone_and_sends_no_wrong_number(
    open_page: Open, server: Server
) -> None:
    opened = open_page(server.url)
    page = wait_until_drawn(opened)
    page.get_by_label("Role of words").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    done = page.get_by_role("button", name="Done editing words")
    expect(done).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Tab")
    expect(page.get_by_label("words, Your, 0")).to_be_focused()
    for key, label in (
        ("ArrowDown", "words, journey, 0"), ("Tab", "words, journey, 1"),
        ("ArrowUp", "words, Your, 1"), ("ArrowUp", "words, Your, 1"),
    ):  # fmt: skip
        page.keyboard.press(key)
        expect(page.get_by_label(label)).to_be_focused()
    area = page.locator("#tensors .cells .scroll")  # three columns fit
    assert area.evaluate("element => element.scrollWidth <= element.clientWidth")

    cell = page.get_by_label("words, with, 2")
    before = len(opened.requests)
    cell.fill("two")
    page.keyboard.press("Tab")
    alert = page.locator("#tensors [role=alert]")
    expect(alert).to_have_text("A number of words is invalid: got “two”, expected a number.")
    expect(cell).to_have_attribute("aria-invalid", "")
    page.wait_for_timeout(300)  # longer than the page waits after a change
    assert len(opened.requests) == before
    cell.fill("2")
    page.keyboard.press("Tab")
    expect(alert).to_be_hidden()
    expect(page.locator("#status")).to_contain_text("6 queries")
    page.get_by_role("button", name="Done editing words").click()
    expect(cell).to_be_hidden()


def test_only_small_tensors_have_a_grid_and_a_mask_check_boxes(
    open_page: Open, server: Server
) -> None:
    opened = open_narrow(open_page, server.url)
    page = choose_example(opened, "induction")
    expect(page.get_by_role("button", name=re.compile("^Edit"))).to_have_count(0)
    choose_example(opened, "linear-layer")
    expect(page.get_by_role("button", name=re.compile("^Edit"))).to_have_count(2)
    choose_example(opened, "words")
    paste(page, json.dumps([TWO, TWO]))
    wait_until_drawn(opened)
    page.get_by_role("button", name="Edit tensor").click()
    expect(page.get_by_label("tensor, 1, 0, 1")).to_have_value("0")  # item 1, position 0

    choose_example(opened, "words")
    paste(page, json.dumps({"mask": np.tri(6, dtype=bool).tolist()}))
    expect(page.get_by_label("Role of mask")).to_have_value("mask")
    wait_until_drawn(opened)
    page.get_by_role("button", name="Edit mask").click()
    box = page.get_by_label("mask, Your, 5")
    expect(box).not_to_be_checked()
    with page.expect_request("**/v1/attention/softmax"):
        box.check()
    wait_until_drawn(opened)
    first = read_weights(page)["Your"]
    assert [weight > 0 for weight in first] == [True, False, False, False, False, True]

    # a tensor of an example with a chosen role stays
    choose_example(opened, "words")
    page.get_by_label("Role of words").select_option("query")
    expect(page.get_by_label("Example")).to_have_value("")
    expect(page.locator("#example-about")).to_contain_text("from the example “Six words”")
    for name in ("key", "value"):
        paste(page, json.dumps({name: [[1, 0, 0], [0, 1, 0]]}))
    expect(page.locator("#tensors .name")).to_have_text(["words", "key", "value"])
    expect(page.locator("#status")).to_contain_text("6 queries, 2 keys")
