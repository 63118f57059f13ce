"""Tests the playground's times and its code to copy, in Chromium; runs that code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from playwright.sync_api import expect

from support.browser import Open, WatchedPage, read_weights, wait_until_drawn
from support.service import Server


def test_times_of_each_request_are_shown(open_page: Open, server: Server) -> None:
    page = wait_until_drawn(open_page(server.url))
    calls = page.locator("#timing ol > li")
    expect(calls.first).to_contain_text(
        re.compile(r"queue .*transfer .*compute .*batch size \d+ · cpu", re.S)
    )
    before = calls.count()
    page.get_by_role("button", name="Run").click()
    wait_until_drawn(WatchedPage(page))
    assert calls.count() >= min(before + 1, 5)


def test_copied_curl_command_returns_the_shown_weights(open_page: Open, server: Server) -> None:
    page = wait_until_drawn(open_page(server.url))
    page.get_by_role("button", name="Copy", exact=True).click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    command = page.evaluate("() => navigator.clipboard.readText()")
    result = subprocess.run(["bash"], input=command, capture_output=True, text=True, check=False)
    assert not result.stderr
    weights = json.loads(result.stdout)["outputs"]["weights"]
    np.testing.assert_allclose(weights, list(read_weights(page).values()), rtol=0, atol=0.51e-4)


def test_copied_program_prints_the_shown_weights(
    open_page: Open, server: Server, tmp_path: Path
) -> None:
    page = wait_until_drawn(open_page(server.url))
    page.get_by_role("button", name="Python").click()
    page.get_by_role("button", name="Copy", exact=True).click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    program = tmp_path / "copied.py"
    program.write_text(page.evaluate("() => navigator.clipboard.readText()"))
    result = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert not result.stderr
    assert "weights\n(6, 6)\n[[0.209" in result.stdout


def test_comparison_can_be_copied(open_page: Open, server: Server) -> None:
    page = wait_until_drawn(open_page(server.url))
    page.get_by_label("Code for").select_option("comparison")
    code = page.locator("#request code")
    expect(code).to_contain_text("/v1/compare")
    page.get_by_role("button", name="Python").click()
    expect(code).to_contain_text("comparison.table()")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("#comparison table")).to_be_visible()
    expect(code).to_contain_text("client.compare(")
