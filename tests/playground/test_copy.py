"""Tests the playground's times, and the code of a comparison to copy, in Chromium."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from support.browser import Open, wait_until_drawn
from support.service import Server


def test_times_of_each_request_are_shown_and_the_code_of_a_comparison(
    open_page: Open, server: Server
) -> None:
    opened = open_page(server.url)
    page = wait_until_drawn(opened)
    calls = page.locator("#timing ol > li")
    expect(calls.first).to_contain_text(
        re.compile(r"queue .*transfer .*compute .*batch size \d+ · cpu", re.S)
    )
    before = calls.count()
    page.get_by_role("button", name="Run").click()
    wait_until_drawn(opened)
    assert calls.count() >= min(before + 1, 5)

    # the code of a comparison can be copied
    page.get_by_label("Code for").select_option("comparison")
    code = page.locator("#request code")
    expect(code).to_contain_text("/v1/compare")
    page.get_by_role("button", name="Python").click()
    expect(code).to_contain_text("comparison.table()")
    page.get_by_role("button", name="Compare").click()
    page.locator("#comparison table").wait_for()
    expect(code).to_contain_text("client.compare(")
