"""Tests the playground's comparisons in Chromium: difference maps, metrics and sweeps."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import safetensors.numpy
from playwright.sync_api import expect

from support.browser import Open, match_groups, paste, read_weights, wait_until_drawn
from support.processes import wait_until
from support.service import Server


def test_difference_map_subtracts_two_variants_whose_random_projections_are_named(
    open_page: Open, server: Server
) -> None:
    page = wait_until_drawn(open_page(server.url))
    note, compared = page.locator("#random-note"), page.locator("#difference .note")
    for one in (note, compared):
        expect(one).to_be_hidden()
    first = np.array(list(read_weights(page).values()))
    panel = page.locator("#difference")
    expect(panel.get_by_role("status")).to_contain_text("softmax has more weight")
    page.get_by_label("softmax minus", exact=True).select_option("taylor")
    expect(panel.get_by_role("status")).to_contain_text("orange where taylor has")
    summary = panel.get_by_role("status").inner_text()
    page.get_by_label("Variant", exact=True).select_option("taylor")
    expect(page.locator("#status")).to_have_text(re.compile("^taylor:"))
    second = np.array(list(read_weights(page).values()))
    apart = np.abs(first - second).sum(1) / 2
    mean, worst = match_groups(r"([\d.]+) on average, at most ([\d.]+) ", summary)
    assert float(mean) == pytest.approx(apart.mean(), abs=1e-3)
    assert float(worst) == pytest.approx(apart.max(), abs=1e-3)

    # random projections are named beside their maps
    page.get_by_label("taylor minus", exact=True).select_option("linformer")
    random = "key_projection and value_projection of linformer are random: the request has none."
    expect(compared).to_have_text(random)
    expect(note).to_be_hidden()
    page.get_by_label("Variant", exact=True).select_option("linformer")
    expect(note).to_have_text(random)
    side, surface = note.bounding_box(), page.locator("#map").bounding_box()
    assert side is not None
    assert surface is not None
    assert side["x"] >= surface["x"] + surface["width"]
    assert surface["y"] <= side["y"] < surface["y"] + surface["height"]

    # the colour scale of signed weights has negative values
    expect(page.locator("#kind")).to_have_text("signed")
    expect(page.locator("#map .legend span").first).to_have_text(re.compile("^−"))


def test_metrics_table_shows_every_variant_of_the_response_without_scrolling(
    open_page: Open, server: Server
) -> None:
    opened = open_page(server.url)
    page = wait_until_drawn(opened)
    area = page.get_by_role("region", name="Comparison")
    table = area.get_by_role("table")
    table.get_by_role("rowheader").last.wait_for()
    assert area.evaluate("area => area.scrollHeight - area.clientHeight") == 0
    last, box = table.get_by_role("rowheader").last.bounding_box(), area.bounding_box()
    assert last is not None
    assert box is not None
    assert last["y"] + last["height"] <= box["y"] + box["height"] + 1
    body = opened.posted("/v1/compare")[-1]
    response = server.http.post("/v1/compare", json=body).json()
    rows = 1 + len(response["variants"])  # the baseline is the first
    expect(table.get_by_role("rowheader")).to_have_count(rows)
    for entry in response["variants"]:
        row = table.get_by_role("row", name=re.compile(f"^{entry['variant']} "))
        error = row.get_by_role("cell").first.inner_text().replace("−", "-")
        assert float(error) == pytest.approx(entry["output"]["relative_error"], rel=1e-2)
    expect(page.locator("#comparison .notes li")).to_have_count(len(response["notes"]))
    page.get_by_label("mean", exact=True).first.uncheck()
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(table.get_by_role("rowheader")).to_have_count(rows - 1)
    page.get_by_label("Baseline").select_option("linear")
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(table.get_by_role("rowheader").first).to_contain_text("linear baseline")

    every = page.get_by_label("All rows")
    expect(every).to_be_hidden()  # few rows are always compared in full
    rows_of_two = [[1, 0], [0, 1]]
    many = {"query": rows_of_two * 513, "key": rows_of_two, "value": rows_of_two}
    paste(page, json.dumps(many))
    every.check()
    wait_until_drawn(opened)
    with page.expect_request("**/v1/compare") as request:
        page.get_by_role("button", name="Compare", exact=True).click()
    assert (request.value.post_data_json or {})["rows"] is None


def test_sweep_is_drawn_while_it_runs_and_that_of_the_next_token_each_way(
    open_page: Open, server: Server
) -> None:
    """Of the next token, softmax has two curves; the table says what each one keeps."""
    opened = open_page(server.url, width=390, path="/#open=length")
    page = wait_until_drawn(opened)
    sweep = page.locator("#sweep")
    sweep.get_by_label("Up to").select_option("1024")
    for label, value in (("Heads", "1"), ("Width", "8"), ("Repeats", "1")):
        sweep.get_by_label(label).fill(value)
    page.evaluate(
        """() => {
            window.counts = [];
            new MutationObserver(() => {
                const count = document.querySelectorAll("#chart [data-cell]").length;
                if (window.counts.at(-1) !== count) window.counts.push(count);
            }).observe(document.getElementById("chart"), { childList: true, subtree: true });
        }"""
    )
    sweep.get_by_role("button", name="Measure").click()
    expect(sweep.get_by_role("status")).to_contain_text(re.compile("^20 measurements"))
    counts = page.evaluate("() => window.counts")
    assert counts[-1] == 20
    assert len([n for n in counts if 0 < n < 20]) >= 3  # some before the end
    sweep.get_by_role("img", name="Time per call by length").wait_for()
    sweep.locator("summary").click()
    expect(sweep.get_by_role("table").get_by_role("row")).to_have_count(6)
    sweep.get_by_role("button", name="Measure").wait_for()
    body = opened.posted("/v1/sweep")[-1]
    assert (body["heads"], body["width"], body["repeats"]) == (1, 8, 1)
    assert body["lengths"] == [64, 128, 256, 512, 1024]

    # each way of the next token
    sweep.get_by_label("Time", exact=True).select_option("decode")
    sweep.get_by_label("Up to").select_option("512")
    sweep.get_by_role("button", name="Measure").click()
    table = sweep.get_by_role("table")
    table.get_by_role("columnheader", name="softmax, recompute").wait_for()
    expect(sweep.get_by_role("status")).to_contain_text(re.compile("^20 measurements"))
    assert opened.posted("/v1/sweep")[-1]["mode"] == "decode"
    for label in ("softmax, recompute", "softmax, cache", "linear, state"):
        table.get_by_role("columnheader", name=label).wait_for()
    expect(table).to_contain_text(f"keeps {2 * 65 * 8 * 4:,} bytes")


def test_stopped_sweep_stops_in_the_service(open_page: Open, server: Server) -> None:
    page = wait_until_drawn(open_page(server.url, width=390, path="/#open=length"))
    sweep = page.locator("#sweep")
    sweep.get_by_label("Up to").select_option("16384")
    sweep.get_by_label("Heads").fill("8")
    sweep.get_by_label("Repeats").fill("50")
    sweep.get_by_role("button", name="Measure").click()
    expect(page.locator("#chart [data-cell]").first).to_be_attached()
    sweep.get_by_role("button", name="Stop").click()
    expect(sweep.get_by_role("status")).to_have_text("Stopped.")
    sweep.get_by_role("button", name="Measure").wait_for()
    wait_until(lambda: server.queued_count == 0)
    count = page.locator("#chart [data-cell]").count()
    page.wait_for_timeout(500)
    assert page.locator("#chart [data-cell]").count() == count > 0


def test_figures_of_a_pooled_map_are_labelled_as_lower_bounds(
    open_page: Open, server: Server
) -> None:
    opened = open_page(server.url)
    page = wait_until_drawn(opened)
    rng = np.random.default_rng(5)
    arrays = {n: rng.standard_normal((1, 2, 600, 4), np.float32) for n in ("query", "key", "value")}
    data = safetensors.numpy.save(arrays)
    page.get_by_label("Upload").set_input_files(
        {"name": "all.safetensors", "mimeType": "application/octet-stream", "buffer": data}
    )
    summary = page.locator("#difference").get_by_role("status")
    expect(summary).to_contain_text(re.compile("pooled cells of head 0: .* lower bounds"))
    cell = "Pooled: a cell is the mean over 2 or 3 queries of the mass on 2 or 3 keys"
    for figure in ("#map", "#difference figure"):
        expect(page.locator(figure)).to_contain_text(cell)

    def fetch_weights(variant: str, weights: str | dict[str, int]) -> np.ndarray:
        inputs = opened.posted("/v1/attention/softmax")[-1]["inputs"]
        body = {"inputs": inputs, "weights": weights, "outputs": ["weights"], "encoding": "lists"}
        response = server.http.post(f"/v1/attention/{variant}", json=body).json()
        weights_BHPQ: np.ndarray = np.array(response["outputs"]["weights"])
        first: np.ndarray = weights_BHPQ[0, 0]
        return first

    pooled, true = (
        np.abs(fetch_weights("softmax", form) - fetch_weights("linear", form)).sum(-1) / 2
        for form in ({"pool": 256}, "full")
    )
    sizes = np.bincount(np.arange(600) * 256 // 600)
    mean, worst = map(
        float, match_groups(r"([\d.]+) on average, at most ([\d.]+) ", summary.inner_text())
    )
    assert mean == pytest.approx(pooled @ sizes / 600, abs=1e-3)
    assert worst == pytest.approx(pooled.max(), abs=1e-3)
    assert mean < true.mean() - 0.01  # the pooled figures are lower bounds
    assert worst < true.max() - 0.01
