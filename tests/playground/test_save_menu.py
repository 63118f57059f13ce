"""Tests what users keep of the playground: pictures, CSV, tensors and tables in the clipboard."""

from __future__ import annotations

import csv
import json
import re
import struct
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np
import pytest
import safetensors.numpy
from matplotlib.image import imread
from playwright.sync_api import Page, expect

from support.accessibility import LOOKS
from support.browser import (
    Open,
    choose_example,
    match_groups,
    open_narrow,
    paste,
    read_weights,
    save,
    wait_until_drawn,
)
from support.service import Server

SVG: Final = "{http://www.w3.org/2000/svg}"
WIDTH: Final = 3 * 680
"""Dots of a picture: 17 cm at 300 dots per inch."""


def read_csv(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def numbers_of(path: Path) -> np.ndarray:
    """Returns the numbers of a CSV file, without its line and its column of names."""
    return np.array([[float(cell) for cell in line[1:]] for line in read_csv(path)[1:]])


def rgb_of(path: Path) -> np.ndarray:
    """Returns the dots of a PNG (rows, columns, 3), from 0 to 255."""
    dots: np.ndarray = (255 * imread(path)[..., :3]).round().astype(np.uint8)
    return dots


def check_picture(path: Path, width: int | None = WIDTH) -> np.ndarray:
    """Checks that a picture has a white margin and a dark title; returns its dots."""
    dots = rgb_of(path)
    if width is not None:
        assert dots.shape[1] == width
    margin = 3 * 20
    for edge in (dots[:margin], dots[-margin:], dots[:, :margin], dots[:, -margin + 3 :]):
        assert (edge == 255).all()
    title = dots[margin : margin + 3 * 20, margin : margin + 3 * 100]
    assert title.min() < 60
    return dots


@pytest.mark.representative
def test_saved_map_has_its_title_its_cells_and_its_scale(open_page: Open, server: Server) -> None:
    page = wait_until_drawn(open_page(server.url, theme="dark", width=390))
    path = save(page, "the weights", "PNG")
    assert path.name == "weights-of-softmax-scale-1.png"
    dots = check_picture(path)
    assert b"pHYs" + struct.pack(">IIB", 11811, 11811, 1) in path.read_bytes()  # 300 dots per inch
    for colour in ([27, 31, 36], [89, 98, 109]):  # the title, the names
        assert (dots == colour).all(-1).any(), colour
    below = dots[-3 * 45 : -3 * 20]  # the scale: its shades from light to dark
    strip = below[len(below) // 2]
    shades = strip[(strip.astype(int).max(1) - strip.astype(int).min(1)) > 12]
    assert len(np.unique(shades, axis=0)) > 20


def test_pictures_do_not_depend_on_the_theme_or_the_window(open_page: Open, server: Server) -> None:
    whats = ("the weights", "the output", "the difference", "the row")
    pictures: dict[str, set[bytes]] = {what: set() for what in whats}
    opened = open_page(server.url, theme="dark", width=390, path="/#example=induction&open=output")
    page = wait_until_drawn(opened)
    page.get_by_role("heading", name="Compare").get_by_role("button").click()
    page.get_by_role("button", name="Save the difference").wait_for()
    for width, theme in LOOKS:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=theme)
        for what in whats:
            pictures[what].add(save(page, what, "PNG").read_bytes())
    assert {what: len(found) for what, found in pictures.items()} == dict.fromkeys(whats, 1)


def test_saved_numbers_are_those_of_the_page_and_their_names_no_formulas(
    open_page: Open, server: Server
) -> None:
    opened = open_page(server.url)
    page = wait_until_drawn(opened)
    page.get_by_label("softmax minus", exact=True).select_option("taylor")
    page.wait_for_load_state("networkidle")
    shown = np.array(list(read_weights(page).values()))
    rows = read_csv(path := save(page, "the weights", "CSV"))
    words = ["Your", "journey", "starts", "with", "one", "step"]
    assert rows[0] == ["query", *words]
    assert [name for name, *_ in rows[1:]] == words
    weights = numbers_of(path)
    np.testing.assert_allclose(weights, shown, rtol=0, atol=0.51e-4)
    body = opened.posted("/v1/attention/softmax")[0] | {"encoding": "lists"}
    outputs = server.http.post("/v1/attention/softmax", json=body).json()["outputs"]
    np.testing.assert_array_equal(weights, outputs["weights"])
    np.testing.assert_array_equal(numbers_of(save(page, "the output", "CSV")), outputs["output"])
    other = opened.posted("/v1/attention/taylor")[-1] | {"encoding": "lists"}
    taylor = server.http.post("/v1/attention/taylor", json=other).json()["outputs"]["weights"]
    difference = save(page, "the difference", "CSV")
    assert difference.name == "weights-of-softmax-minus-taylor.csv"
    np.testing.assert_allclose(numbers_of(difference), weights - taylor, rtol=0, atol=1e-15)
    keys = read_csv(save(page, "the row", "CSV"))
    assert keys[0] == ["key", "weight", "cumulative share"]
    order = np.argsort(-weights[1], kind="stable")
    assert [key for key, *_ in keys[1:]] == [words[at] for at in order]
    assert [float(weight) for _, weight, _ in keys[1:]] == weights[1][order].tolist()
    assert float(keys[-1][2]) == pytest.approx(1, abs=1e-12)

    # texts of saved and copied tables are no formulas
    labels = ['=HYPERLINK("http://x", 1)', "+1+1", "-1+1", "@SUM(1)", "\t=1", "-0.5"]
    page.get_by_label("Token labels").fill(json.dumps(labels))
    path = save(page, "the difference", "CSV")
    guarded = [*(f"'{label}" for label in labels[:-1]), "-0.5"]  # a number needs no guard
    assert read_csv(path)[0][1:] == guarded
    assert [name for name, *_ in read_csv(path)[1:]] == guarded
    assert numbers_of(path).min() < 0  # numbers stay numbers
    page.get_by_role("button", name="Save the difference").click()
    page.get_by_role("button", name="Copy table").click()
    expect(page.locator("#announcements")).to_have_text("Copied")
    names = [line.split("\t")[0] for line in clipboard(page, "text/plain").splitlines()]
    assert names[1:] == [name.replace("\t", " ") for name in guarded]
    cells = re.findall("<t[dh]>([^<]*)", clipboard(page, "text/html"))
    assert not [cell for cell in cells if re.match("[=+@\t]|-[^0-9]|-1[+]", cell)]

    # a saved table can be brought again
    labels = ["New York", 'a "b"', "c, d", "e;f", "=g", "\t@h"]
    page.get_by_label("Token labels").fill(json.dumps(labels))
    path = save(page, "the output", "CSV")
    page.get_by_label("Upload").set_input_files(str(path))
    expect(page.get_by_label("Example")).to_have_value("")
    wait_until_drawn(opened)
    assert json.loads(page.get_by_label("Token labels").input_value()) == labels
    expect(page.locator("#tensors .shape")).to_have_text("6 × 3")


def test_metrics_are_saved_as_shown_and_in_full(open_page: Open, server: Server) -> None:
    opened = open_page(server.url, width=390, path="/#open=compare")
    page = wait_until_drawn(opened)
    table = page.locator("#comparison table")
    expect(table.get_by_role("columnheader")).to_have_count(3 + 6)  # groups, and six columns
    rows = read_csv(save(page, "the metrics", "CSV"))
    response = server.http.post("/v1/compare", json=opened.posted("/v1/compare")[-1]).json()
    entries = [response["anchor"], *response["variants"]]
    named = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    assert [row["variant"] for row in named] == [entry["variant"] for entry in entries]
    assert len(rows[0]) == 16
    for row, entry in zip(named, entries, strict=True):
        assert float(row["Relative error"]) == entry["output"]["relative_error"]
        assert int(row["Flops"]) == entry["flops"]
        pair = entry["weights"].get("total_variation")
        saved_pair = [row["Total variation, mean"], row["Total variation, worst"]]
        assert saved_pair == ([str(pair["mean"]), str(pair["worst"])] if pair else ["", ""])
    check_picture(save(page, "the metrics", "PNG"), width=None)
    page.get_by_role("button", name="All columns").click()
    expect(table.get_by_role("columnheader")).to_have_count(3 + 12)
    page.wait_for_url(re.compile("metrics=all"))
    page.reload()
    wait_until_drawn(opened)
    expect(table.get_by_role("columnheader")).to_have_count(3 + 12)


def test_curves_are_saved_as_picture_drawing_and_numbers(open_page: Open, server: Server) -> None:
    page = wait_until_drawn(open_page(server.url, theme="dark", width=390, path="/#open=length"))
    sweep = page.locator("#sweep")
    expect(sweep.get_by_role("button", name="Save the times")).to_be_hidden()
    sweep.get_by_label("Up to").select_option("512")
    for label in ("Heads", "Width", "Repeats"):
        sweep.get_by_label(label).fill("2")
    sweep.get_by_role("button", name="Measure").click()
    expect(sweep.get_by_role("status")).to_contain_text("16 measurements")
    dots = check_picture(save(page, "the times", "PNG"))
    assert (dots == [15, 157, 138]).all(-1).sum() > 500  # the line of the third variant
    drawing = save(page, "the times", "SVG")
    root = ElementTree.parse(drawing).getroot()
    assert "var(" not in drawing.read_text()
    assert root.find(f"{SVG}rect").attrib["fill"] == "#ffffff"  # type: ignore[union-attr]
    title = "Time per call by length, 2 heads of width 2"
    assert root.find(f"{SVG}text").text == title  # type: ignore[union-attr]
    assert len([path for path in root.iter(f"{SVG}path") if "data-cell" in path.attrib]) == 16
    rows = read_csv(save(page, "the times", "CSV"))
    assert rows[0] == ["variant", "length", "median_ms", "least_ms", "most_ms", "problem"]
    sweep.locator("summary").click()
    cells = sweep.locator("tr", has=page.get_by_role("rowheader", name="64", exact=True))
    first = cells.get_by_role("cell").first.inner_text()
    median, least, most = map(float, match_groups(r"(\S+) \((\S+) to (\S+)\)", first))
    saved_times = [float(cell) for cell in rows[1][2:5]]
    assert rows[1][:2] == ["efficient", "64"]
    assert saved_times == pytest.approx([median, least, most], rel=5e-3)


def clipboard(page: Page, kind: str) -> str:
    text: str = page.evaluate(
        """async kind => {
            const [item] = await navigator.clipboard.read();
            return (await item.getType(kind)).text();
        }""",
        kind,
    )
    return text


def test_copied_table_is_for_spreadsheets_and_documents_and_saved_tensors_are_all(
    open_page: Open, server: Server
) -> None:
    opened = open_narrow(open_page, server.url, path="/#open=output")
    page = opened.page
    page.get_by_label("Token labels").fill("<b> journey starts with one step")
    menu = page.get_by_role("button", name="Save the weights")
    menu.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="PNG picture for print")).to_be_focused()
    page.keyboard.press("Escape")
    expect(menu).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Copy table").click()
    expect(page.locator("#announcements")).to_have_text("Copied")
    weights = list(read_weights(page).values())
    cells = [line.split("\t") for line in clipboard(page, "text/plain").splitlines()]
    assert cells[0] == ["query", "<b>", "journey", "starts", "with", "one", "step"]
    copied = np.array([[float(cell) for cell in line[1:]] for line in cells[1:]])
    np.testing.assert_allclose(copied, weights, rtol=0, atol=0.51e-4)
    assert max(len(cell) for line in cells[1:] for cell in line[1:]) <= 9
    html = clipboard(page, "text/html")
    assert html.count("<tr>") == 7
    assert "&lt;b&gt;" in html
    paste(page, clipboard(page, "text/plain"))  # as from a spreadsheet
    wait_until_drawn(opened)
    expect(page.locator("#tensors .shape")).to_have_text("6 × 6")

    # saved tensors are the inputs and the outputs
    choose_example(opened, "words")
    draw = np.random.default_rng(1)
    arrays: dict[str, np.ndarray] = {
        "mask": np.tri(5, dtype=bool),
        "query": draw.standard_normal((1, 2, 5, 4), np.float32),
        "key": draw.standard_normal((1, 2, 5, 4), np.float32),
        "value": draw.standard_normal((1, 2, 5, 3), np.float32),
    }
    file: Any = {"name": "all.safetensors", "mimeType": "application/octet-stream"}
    page.get_by_label("Upload").set_input_files(file | {"buffer": safetensors.numpy.save(arrays)})
    expect(page.locator("#status")).to_contain_text("5 queries, 5 keys, 2 heads")
    wait_until_drawn(opened)
    found = safetensors.numpy.load_file(save(page, "the output", "safetensors"))
    assert found.keys() == {*arrays, "weights", "output"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
    body = {
        "inputs": {name: array.tolist() for name, array in arrays.items()},
        "dtype": "float32",
        "encoding": "lists",
        "outputs": ["weights", "output"],
    }
    outputs = server.http.post("/v1/attention/softmax", json=body).json()["outputs"]
    for name in ("weights", "output"):
        np.testing.assert_array_equal(found[name], np.float32(outputs[name]), strict=True)


def test_menu_is_in_the_window(open_page: Open, server: Server) -> None:
    page = wait_until_drawn(open_page(server.url, width=390, path="/#open=output"))
    for width in (390, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        for what in ("the weights", "the row", "the output"):
            page.get_by_role("button", name=f"Save {what}").click()
            menu = page.get_by_role("group", name=f"Save {what}")
            expect(menu).to_be_in_viewport(ratio=1)
            page.keyboard.press("Escape")
            expect(menu).to_be_hidden()
