"""Tests the playground's token labels: parsing, and a number that does not fit."""

from __future__ import annotations

import json
import re
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import expect

from support.browser import Open, choose_example, open_narrow, read_weights, wait_until_drawn
from support.examples import examples
from support.javascript import Modules
from support.service import Server

SIX: Final = ["New York", "is", "a", "big", "old", "city"]


PARSED: Final = {
    "a b  c": ["a", "b", "c"],
    '"New York" is big': ["New York", "is", "big"],
    '["New York", "is", 7]': ["New York", "is", "7"],
    "New York\nis\r\nbig\n": ["New York", "is", "big"],
    "[CLS] the cat [SEP]": ["[CLS]", "the", "cat", "[SEP]"],
    'he said " hi "': ["he", "said", '"', "hi", '"'],
    r'"a \"b\" c" d': ['a "b" c', "d"],
    '" "': ['"', '"'],
    "": [],
}


def test_labels_are_parsed(modules: Modules) -> None:
    parsed = modules.evaluate("texts => texts.map(labels.parseLabels)", list(PARSED))
    assert dict(zip(PARSED, parsed, strict=True)) == PARSED


@pytest.mark.slow
@examples(60)
@given(st.lists(st.text(max_size=8), max_size=5))
def test_formatted_labels_parse_to_themselves(modules: Modules, labels: list[str]) -> None:
    round_trip = "list => labels.parseLabels(labels.formatLabels(list))"
    assert modules.evaluate(round_trip, labels) == labels


def test_labels_name_queries_and_keys_and_a_wrong_number_is_reported(
    open_page: Open, server: Server
) -> None:
    page = open_narrow(open_page, server.url).page
    for text in (json.dumps(SIX), "\n".join(SIX), '"New York" is a big old city'):
        page.get_by_label("Token labels").fill("a b c d e f")
        expect(page.locator("#row").get_by_role("heading")).to_have_text("b")
        page.get_by_label("Token labels").fill(text)
        expect(page.locator("#row").get_by_role("heading")).to_have_text("is")
        assert list(read_weights(page)) == SIX
        expect(page.locator("#labels-note")).to_be_hidden()

    # a wrong number of labels is reported, and the given ones are shown
    field = page.get_by_label("Token labels")
    field.fill("Your journey starts")
    note = page.locator("#labels-note")
    expect(note).to_have_text("3 labels for 6 positions: the other positions show their index.")
    assert list(read_weights(page)) == [
        "Your", "journey", "starts", "query 3", "query 4", "query 5",
    ]  # fmt: skip
    headings = page.locator("#table thead th").all_inner_texts()
    assert headings[1:7] == ["Your", "journey", "starts", "key 3", "key 4", "key 5"]
    field.fill("a b c d e f g h")
    expect(note).to_have_text("8 labels for 6 positions: the last 2 are not shown.")
    assert list(read_weights(page)) == list("abcdef")
    expect(field).to_have_accessible_description("One word for each position. For labels with "
        "spaces: double quotes, one label a line, or a JSON list. "
        "8 labels for 6 positions: the last 2 are not shown.")  # fmt: skip
    field.fill("a b c d e f")
    expect(note).to_be_hidden()

    # labels that fit the keys alone name the keys
    page.get_by_role("button", name="Paste").click()
    rows = [[1, 0], [0, 1], [1, 1]]
    page.get_by_label("Tensors or request").fill(
        json.dumps({"query": rows[:2], "key": rows, "value": rows})
    )
    page.get_by_role("button", name="Use these").click()
    page.get_by_label("Token labels").fill("a b c")
    assert list(read_weights(page)) == ["query 0", "query 1"]
    expect(page.locator("#table thead th").nth(1)).to_have_text("a")
    expect(page.locator("#labels-note")).to_be_hidden()
    page.get_by_label("Token labels").fill("a b c d")
    expect(page.locator("#labels-note")).to_contain_text("4 labels for 2 queries and 3 keys")


def test_typed_labels_stay_for_another_head_or_variant(open_page: Open, server: Server) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    field, variant = page.get_by_label("Token labels"), page.get_by_label("Variant", exact=True)
    variant.select_option("linear_layer")  # brings an example of its own
    expect(page.get_by_label("Example")).to_have_value("linear-layer")
    expect(field).to_have_value("Your journey starts with one step")
    choose_example(opened, "words")
    field.fill("a b c d e f")
    for name in ("taylor", "linear_layer"):
        variant.select_option(name)
        expect(page.locator("#status")).to_contain_text(f"{name}: 6 queries")
        expect(field).to_have_value("a b c d e f")
        wait_until_drawn(opened)
        assert list(read_weights(page)) == list("abcdef")
    choose_example(opened, "induction")
    expect(field).to_have_value(re.compile("^the cat saw"))
    field.fill(words := " ".join("abcdefghijklmnopqrs"))
    page.get_by_role("button", name="head 2").click()
    expect(field).to_have_value(words)
    assert list(read_weights(page)) == words.split()
