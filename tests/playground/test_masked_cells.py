"""Tests that the playground tells masked cells, which have no weight, from weights of zero."""

from __future__ import annotations

import json
from typing import Final

import pytest
from playwright.sync_api import Page, expect

from support.browser import Open, open_narrow, paste, wait_until_drawn
from support.service import Server

REQUEST: Final = {
    "inputs": {
        "query": [[[[1000, 0], [0, 0], [0, 0]]]],
        "key": [[[[1, 0], [-1, 0], [0, 1], [0, 0]]]],
        "value": [[[[1], [2], [3], [4]]]],
        "mask": [[[[True, True, True, True], [False, True, True, True], [True, True, True, True]]]],
        "key_lengths": [3],
    },
    "parameters": {"causal": True, "query_offset": 1},
}
CELLS: Final = [  # the second weight underflows to 0
    ["1.0000", "0.0000", "masked", "masked"],
    ["masked", "0.5000", "0.5000", "masked"],
    ["0.3333", "0.3333", "0.3333", "masked"],
]


def read_cells(page: Page) -> list[list[str]]:
    """Returns the texts of the table of weights, without names and entropy."""
    rows: list[list[str]] = page.locator("#table tbody tr").evaluate_all(
        "rows => rows.map((row) => [...row.cells].slice(1, -1).map((cell) => cell.innerText))"
    )
    return rows


@pytest.mark.representative
def test_masked_cells_are_named(open_page: Open, server: Server) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    page.get_by_text("Weights as a table").click()
    expect(page.locator("#map .hatch")).to_have_count(0)  # the example masks nothing
    paste(page, json.dumps(REQUEST))
    wait_until_drawn(opened)
    assert read_cells(page) == CELLS
    page.locator("#map .hatch").wait_for()
    page.locator("#map [role=application]").focus()
    page.keyboard.press("Home")
    for weight in ("1", "0", "masked"):
        expect(page.locator("#map .readout strong")).to_have_text(weight)
        page.keyboard.press("ArrowRight")
    expect(page.locator("#announcements")).to_have_text("query 0 to key 3: masked")


def test_signed_weights_have_no_entropy_and_masked_cells_follow_window_and_pooling(
    open_page: Open, server: Server
) -> None:
    """`gated` hides later keys by its rule."""
    page = wait_until_drawn(
        opened := open_page(server.url, width=390, path="/#example=words&variant=gated&row=1")
    )
    page.locator("#map .hatch").wait_for()
    expect(page.locator("#row td")).to_have_count(4)
    expect(page.locator("#row td").nth(1)).to_be_hidden()
    expect(page.locator("#row dl")).to_be_hidden()
    page.get_by_text("Weights as a table").click()
    expect(page.get_by_role("columnheader", name="Entropy")).to_have_count(0)

    # masked cells follow the window and the pooling
    fragment = (
        "example=local&variant=softmax&parameters.causal=true&parameters.window=[8,null]&pool=16"
    )
    page.goto(f"{server.url}/#{fragment}")
    wait_until_drawn(opened)
    expect(page.locator("#table tbody tr")).to_have_count(16)
    seen = [["masked" != text for text in row] for row in read_cells(page)]
    # a cell has 4 queries and 4 keys: 8 keys back are in the two cells before and the third one
    assert seen == [[row - 2 <= col <= row for col in range(16)] for row in range(16)]
