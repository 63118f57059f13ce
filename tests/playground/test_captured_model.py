"""Tests captured models in the playground, in Chromium: figures of their heads as maps."""

from __future__ import annotations

import csv
import json
import re
import struct
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from playwright.sync_api import Page, expect
from safetensors.torch import save_file

from qkv.models.attention_call import AttentionCall
from qkv.models.calls import Calls
from support.accessibility import looks, problems
from support.browser import (
    Open,
    WatchedPage,
    choose_example,
    expect_shown,
    open_narrow,
    paste,
    read_weights,
    record_slices,
    save,
    wait_until_drawn,
)
from support.processes import wait_until
from support.service import Server

VARIANTS: Final = ("efficient", "linear", "sigmoid", "taylor")
LAYER: Final = "model.layers.{}.self_attn"
MAP: Final = "#map [role=application]"
D: Final = 8
ATOL: Final = 32 * 2.0**-23  # of figures below 4: eps of float32 times D times 4
Call = dict[str, Any]


def call_of(layer: int, length: int, *, batch: int = 1, seed: int = 0, **fields: Any) -> Call:
    """Returns a call of four query heads and two key heads: its facts, and `tensors`."""
    draw = torch.Generator().manual_seed(seed)
    sizes = {"query": 4, "key": 2, "value": 2, "output": 4}
    tensors = {
        name: torch.randn(batch, heads, length, D, generator=draw) for name, heads in sizes.items()
    }
    facts = {
        "layer": LAYER.format(layer), "causal": True, "query_offset": 0, "window": None,
        "scale": 0.5, "softcap": None, "heads": [0, 1, 2, 3], "items": list(range(batch)),
        "dropout": 0.0,
    }  # fmt: skip
    return facts | fields | {"tensors": tensors | fields.get("tensors", {})}


def saved(path: Path, calls: Iterable[Call], tokens: list[list[str]] | None = None) -> Calls:
    """Saves calls as a capture does, and returns them."""
    captured = Calls()
    for index, call in enumerate(calls):
        fields = {"mask": None, "sinks": None} | call | call["tensors"]
        del fields["tensors"]
        captured.append(AttentionCall(index=index, **fields))
    captured.save(path, tokens=tokens)
    return captured


def write_calls(path: Path, calls: Iterable[Call]) -> Path:
    """Writes calls to a file as they are, such as with a mask that says no more than `causal`."""
    listed = list(calls)
    tensors = {f"calls.{i}.{n}": x for i, c in enumerate(listed) for n, x in c["tensors"].items()}
    facts = [{name: x for name, x in call.items() if name != "tensors"} for call in listed]
    save_file(tensors, path, metadata={"qkv_calls": json.dumps(facts)})
    return path


@pytest.fixture
def calls() -> list[Call]:
    """Two layers; the first has two calls, one of them with two sequences."""
    return [call_of(0, 9, batch=2, seed=1), call_of(1, 7, seed=2), call_of(0, 5, seed=3)]


def figures_of(server: Server, call: Call) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Returns the service's figures of each sequence, by head and variant."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for item in range(len(call["items"])):
        names = ("query", "key", "value")
        body = {
            "inputs": {name: call["tensors"][name][item : item + 1].tolist() for name in names},
            "anchor": {"variant": "softmax", "parameters": {"causal": True, "scale": 0.5}},
            "variants": [
                {"variant": name, "parameters": {"causal": True, **also}}
                for name, also in zip(VARIANTS, ({}, {}, {"scale": 0.5}, {}), strict=True)
            ],
            "repeats": 1,
            "per_head": True,
        }
        response = server.http.post("/v1/compare", json=body).json()
        for entry in response["variants"]:
            heads = zip(call["heads"], entry["heads"], response["anchor"]["heads"], strict=True)
            for head, own, anchor in heads:
                merged = own | {"baseline_entropy": anchor["weights"]["entropy"]["mean"]}
                found.setdefault((head, entry["variant"]), []).append(merged)
    return found


def open_calls(opened: WatchedPage, path: Path) -> Page:
    """Uploads a file, and waits for its section and for all requests about its first head."""
    page = wait_until_drawn(opened)
    page.get_by_label("Upload").set_input_files(str(path))
    page.locator("#captured").wait_for()
    expect(page.locator("#example-about")).to_contain_text(f"from {path.name}.")
    wait_until_drawn(opened)
    page.wait_for_load_state("networkidle")
    return page


def compare(page: Page, count: int) -> None:
    page.get_by_role("button", name="Compare heads").click()
    expect(page.locator("#captured [role=status]")).to_have_text(
        f"Compared with softmax on {count} call{'s' * (count > 1)}."
    )


def read_csv(page: Page) -> list[dict[str, str]]:
    path = save(page, "the list of heads", "CSV")
    assert path.name == "calls-heads-beside-softmax.csv"
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_maps(page: Page) -> dict[str, list[list[str]]]:
    """Returns the cells of the tables of the maps, by their captions."""
    if not page.locator("#captured details[open]").count():
        page.get_by_text("Maps as tables").click()
    tables = page.get_by_role("region", name="Tables of the maps").get_by_role("table")
    tables.first.wait_for()
    found: dict[str, list[list[str]]] = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("#captured details table")].map(
            (table) => [table.caption.textContent, [...table.tBodies[0].rows].map(
                (row) => [...row.cells].slice(1).map((cell) => cell.textContent))]))"""
    )
    return found


READERS: Final = {
    "relative_error": ("output", "relative_error"),
    "cosine": ("output", "cosine"),
    "total_variation": ("weights", "total_variation", "mean"),
    "js_divergence": ("weights", "js_divergence", "mean"),
    "rank_correlation": ("weights", "rank_correlation", "mean"),
    "entropy": ("weights", "entropy", "mean"),
    "baseline_entropy": ("baseline_entropy",),
}


def read_figure(head: dict[str, Any], path: tuple[str, ...]) -> float | None:
    """Returns a figure of a head; None if it is undefined."""
    found: Any = head
    for name in path:
        found = None if found is None else found[name]
    return found  # type: ignore[no-any-return]


def check_rows(
    rows: list[dict[str, str]], server: Server, calls: list[Call]
) -> dict[tuple[str, int, str], dict[str, str]]:
    """Compares rows with the means of the service's figures; returns them by their head."""
    expected: dict[tuple[str, int, str], list[tuple[int, dict[str, Any]]]] = {}
    for call in calls:
        length = call["tensors"]["query"].shape[2]
        for (head, variant), found in figures_of(server, call).items():
            own = expected.setdefault((call["layer"], head, variant), [])
            own += [(length, each) for each in found]
    named = {(row["layer"], int(row["head"]), row["variant"]): row for row in rows}
    assert named.keys() == expected.keys()
    for key, every in expected.items():
        lengths = [length for length, _ in every]
        for name, path in READERS.items():
            values = [value for _, each in every if (value := read_figure(each, path)) is not None]
            if not values:  # such as the divergence of sigmoid, whose rows do not sum to 1
                assert not named[key][name]
                continue
            mean = np.average(values, weights=lengths)
            # the variants round in float32, and a call with other heads may sum in another order
            assert float(named[key][name]) == pytest.approx(mean, rel=0, abs=ATOL), (key, name)
        assert int(named[key]["queries"]) == sum(lengths)
        assert not named[key]["problem"]
    return named


@pytest.mark.representative
def test_maps_have_the_figures_of_the_service(
    open_page: Open, server: Server, calls: list[Call], tmp_path: Path
) -> None:
    """A figure is the mean over all sequences of a layer, weighted by their queries."""
    path = tmp_path / "calls.safetensors"
    captured = saved(path, calls)
    opened = open_page(server.url, width=390)
    page = open_calls(opened, path)
    expect(page.locator("#captured-about")).to_have_text(
        re.compile(r"^calls\.safetensors, .* KiB: 2 layers of 4 heads, 3 calls\.$")
    )
    before = len(opened.requests)
    compare(page, 3)
    assert opened.requests[before:] == ["/v1/compare"] * 3  # one for each call
    listed_rows = read_csv(page)
    rows = check_rows(listed_rows, server, calls)
    by_client = list(csv.DictReader(StringIO(captured.compare(VARIANTS, progress=False).csv())))
    assert [list(row) for row in by_client] == [list(row) for row in listed_rows]
    for ours, other in zip(listed_rows, by_client, strict=True):
        for name, text in other.items():
            is_figure = name in READERS and text
            expected = pytest.approx(float(text), rel=0, abs=ATOL) if is_figure else text
            if name not in ("largest_error", "kl_divergence"):  # not bounded by 4
                assert (float(ours[name]) if is_figure else ours[name]) == expected, name
    listed = page.locator("#captured .sortable tbody tr")
    expect(listed).to_have_count(20)
    page.get_by_role("button", name="Show all 32 rows").click()
    expect(listed).to_have_count(32)
    expect(listed.nth(20).get_by_role("button")).to_be_focused()
    maps = read_maps(page)
    assert list(maps) == [f"Relative error of {name}" for name in VARIANTS]
    for variant in VARIANTS:
        shown = [
            [f"{float(rows[LAYER.format(n), h, variant]['relative_error']):.4f}" for h in range(4)]
            for n in range(2)
        ]
        assert maps[f"Relative error of {variant}"] == shown


def test_figure_is_chosen_and_read_by_keyboard(
    open_page: Open, server: Server, calls: list[Call], tmp_path: Path
) -> None:
    page = open_calls(
        open_page(server.url, width=390), write_calls(tmp_path / "calls.safetensors", calls)
    )
    for name in ("efficient", "sigmoid", "linear"):
        page.locator(f"#heads-{name}").uncheck()
    compare(page, 3)
    page.get_by_label("Figure").select_option("Entropy")
    maps = read_maps(page)
    assert list(maps) == ["Entropy of softmax", "Entropy of taylor"]
    label = "Entropy of taylor: 2 layers by 4 heads. Arrow keys move. Enter: load the head below."
    surface = page.get_by_role("application", name=label)
    surface.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    own, anchor = (
        f"{float(maps[f'Entropy of {name}'][1][1]):.3g}" for name in ("taylor", "softmax")
    )
    expect(page.locator("#captured .head-readout")).to_have_text(
        f"{LAYER.format(1)}, head 1: softmax {anchor}, taylor {own}"
    )
    expect(page.locator("#announcements")).to_have_text(f"{LAYER.format(1)}, head 1, taylor {own}")
    page.get_by_label("Figure").select_option("Rank correlation")
    table = page.get_by_role("region", name="List of heads")
    column = table.get_by_role("columnheader", name="Rank correlation")
    expect(column).to_have_attribute("aria-sort", "descending")  # the closest first
    cells = "#captured .sortable tbody td:nth-child(7)"
    closest = [float(text) for text in page.locator(cells).all_inner_texts()]
    assert len(closest) == 8
    assert closest == sorted(closest, reverse=True)
    column.get_by_role("button").click()
    expect(column).to_have_attribute("aria-sort", "ascending")
    assert [float(text) for text in page.locator(cells).all_inner_texts()] == closest[::-1]


def test_stopped_comparison_stops_in_the_service_and_a_chosen_head_is_drawn(
    open_page: Open, server: Server, calls: list[Call], tmp_path: Path
) -> None:
    opened = open_page(server.url, width=390)
    page = open_calls(opened, write_calls(tmp_path / "calls.safetensors", calls))
    section = page.locator("#captured")
    page.get_by_role("button", name="Compare heads").wait_for()
    with server.hold():
        page.get_by_role("button", name="Compare heads").click()
        wait_until(lambda: server.queued_count > 0)
        section.get_by_role("progressbar").wait_for()
        expect(section.get_by_role("status")).to_have_text(f"Call 1 of 3: {LAYER.format(0)}")
        section.get_by_role("button", name="Stop").click()
        expect(section.get_by_role("status")).to_have_text("Stopped after 0 of 3 calls.")
    wait_until(lambda: server.queued_count == 0)
    expect(section.get_by_role("progressbar")).to_be_hidden()
    expect(section.get_by_role("alert")).to_be_hidden()
    compare(page, 3)
    page.get_by_role("application", name="Relative error of linear").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    expect(page.locator("#example-about")).to_have_text(
        f"{LAYER.format(1)}, head 2, from calls.safetensors."
    )
    expect(page.locator("#weights")).to_be_focused()
    expect(page.locator("#status")).to_have_text(re.compile("^softmax: 7 queries, 7 keys;"))
    wait_until_drawn(opened)
    query, key = (calls[1]["tensors"][name][0].double() for name in ("query", "key"))
    scores = 0.5 * query[2] @ key[1].T  # query heads 2 and 3 read key head 1
    scores = scores.masked_fill(~torch.ones(7, 7).tril().bool(), -torch.inf)
    shown = np.array(list(read_weights(page).values()))
    np.testing.assert_allclose(shown, scores.softmax(-1), rtol=0, atol=0.51e-4)
    first = page.get_by_role("button", name=f"Load {LAYER.format(0)}, head 0").first
    first.click()
    expect(page.locator("#example-about")).to_contain_text("head 0, the first of 2 calls")
    expect(page.locator("#status")).to_have_text(re.compile("9 queries, 9 keys, 2 items"))


@pytest.mark.parametrize("has_tokens", [True, False])
def test_head_has_the_layer_head_and_tokens_of_the_model(
    open_page: Open, server: Server, tmp_path: Path, has_tokens: bool
) -> None:
    """Labels that the user types stay at the next head of the same sequences."""
    words = [["the", "cat", "sat"], ["a", "bird", "sang"]]
    calls = [call_of(n, 3, batch=2, heads=[4, 5, 6, 7], seed=n) for n in range(2)]
    path = tmp_path / "calls.safetensors"
    saved(path, calls, words if has_tokens else None)
    opened = open_narrow(open_page, server.url)
    page = open_calls(opened, path)
    compare(page, 2)
    page.get_by_role("button", name=f"Load {LAYER.format(1)}, head 7").first.click()
    place = page.locator("#place")
    expect(place).to_have_text(f"{LAYER.format(1)}, head 7, sequence 0")
    expect(page.locator(MAP)).to_have_attribute(
        "aria-label", re.compile(re.escape(f"{LAYER.format(1)}, head 7, sequence 0: 3 queries"))
    )
    labels = page.get_by_label("Token labels")
    expect(labels).to_have_value(" ".join(words[0]) if has_tokens else "")
    page.get_by_role("group", name="Sequences").get_by_role("button").nth(1).click()
    expect(place).to_have_text(f"{LAYER.format(1)}, head 7, sequence 1")
    expect(labels).to_have_value(" ".join(words[1]) if has_tokens else "")
    labels.fill("my own words")
    page.get_by_role("button", name=f"Load {LAYER.format(0)}, head 5").first.click()
    expect(place).to_have_text(f"{LAYER.format(0)}, head 5, sequence 0")
    wait_until_drawn(opened)
    expect(labels).to_have_value("my own words")
    assert list(read_weights(page)) == ["my", "own", "words"]
    page.reload()
    wait_until_drawn(opened)
    expect(place).to_have_text(f"{LAYER.format(0)}, head 5, sequence 0")
    expect(labels).to_have_value("my own words")
    choose_example(opened, "words")
    expect(place).to_be_hidden()


def test_call_without_figures_has_the_reason(
    open_page: Open, server: Server, tmp_path: Path
) -> None:
    """A variant may not see what the call sees, or the service may refuse the call."""
    draw = torch.Generator().manual_seed(4)
    mask = torch.rand(2, 1, 6, 6, generator=draw) > 0.3  # of each sequence, for all heads
    sinks = torch.randn(4, generator=draw)
    calls = [
        call_of(0, 6, batch=2, tensors={"sinks": sinks}),
        call_of(1, 6, batch=2, causal=False, tensors={"mask": mask}),
        call_of(2, 6, window=[2, None]),
        call_of(3, 6, softcap=-1.0),
    ]
    opened = open_page(server.url, width=390)
    opened.expect_status(422)
    page = open_calls(opened, write_calls(tmp_path / "calls.safetensors", calls))
    page.locator("#heads-efficient").uncheck()
    page.locator("#heads-taylor").uncheck()
    compare(page, 4)
    expect(page.locator("#captured .notes li")).to_have_text(
        [
            "linear takes no mask (no figures in 4 heads).",
            "linear takes no window (no figures in 4 heads).",
            re.compile(r"^linear: .*softcap.* -1.* \(no figures in 4 heads\)\.$"),
            re.compile(r"^sigmoid: .*softcap.* -1.* \(no figures in 4 heads\)\.$"),
        ]
    )
    maps = read_maps(page)
    missing = {
        name: [cells == ["\u2013"] * 4 for cells in maps[f"Relative error of {name}"]]
        for name in ("linear", "sigmoid")
    }
    assert missing == {
        "linear": [False, True, True, True],
        "sigmoid": [False, False, False, True],
    }


def test_call_above_the_limit_of_a_body_is_sent_in_parts(
    open_page: Open, server: Server, serve: Any, calls: list[Call], tmp_path: Path
) -> None:
    """The figures do not depend on the parts."""
    path = write_calls(tmp_path / "calls.safetensors", calls[:1])
    opened = open_page(serve(max_body_bytes=4000).url, width=390)
    opened.expect_status(413)
    page = open_calls(opened, path)
    before = len(opened.requests)
    compare(page, 1)
    assert opened.requests[before:] == ["/v1/compare"] * 3  # the call, and its halves
    check_rows(read_csv(page), server, calls[:1])


def test_only_the_header_and_the_needed_tensors_are_read_and_the_first_head_is_shown(
    open_page: Open, server: Server, calls: list[Call], tmp_path: Path
) -> None:
    path = write_calls(tmp_path / "calls.safetensors", calls)
    opened = open_narrow(open_page, server.url)
    page = opened.page
    record_slices(page)
    read = "() => window.slices.splice(0).reduce((a, b) => a + b, 0)"
    open_calls_of = page.get_by_label("Upload")
    open_calls_of.set_input_files(str(path))
    page.locator("#captured").wait_for()
    header = struct.unpack("<Q", path.read_bytes()[:8])[0]
    expect(page.locator("#example-about")).to_contain_text("head 0")
    head = 2 * 3 * 9 * D * 4  # of two sequences a head of the query, the key and the value
    assert page.evaluate(read) == 9 + 9 + header + head
    compare(page, 3)
    names = ("query", "key", "value")
    assert page.evaluate(read) == sum(c["tensors"][n].nbytes for c in calls for n in names)
    page.get_by_role("button", name=f"Load {LAYER.format(1)}, head 3").first.click()
    expect(page.locator("#example-about")).to_contain_text("head 3")
    assert page.evaluate(read) == 3 * 7 * D * 4  # a head of the query, the key and the value

    # the first head is shown in place of an example
    page.get_by_role("button", name="Close the captured model").click()
    choose_example(opened, "words")
    open_calls(opened, path)
    expect(page.get_by_label("Example")).to_have_value("")
    expect(page.locator("#place")).to_have_text(f"{LAYER.format(0)}, head 0, sequence 0")
    expect(page.locator("#status")).to_contain_text("9 queries, 9 keys")
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_label("Example")).to_have_value("words")
    paste(page, "[[1, 0], [0, 1]]")  # what the user brought stays
    expect(page.locator("#status")).to_contain_text("2 queries, 2 keys")
    page.get_by_role("button", name="Close the captured model").click()
    page.get_by_label("Upload").set_input_files(str(path))
    page.locator("#captured").wait_for()
    wait_until_drawn(opened)
    expect(page.locator("#status")).to_contain_text("2 queries, 2 keys")


def broken(path: Path, content: Any, **tensors: torch.Tensor) -> Path:
    save_file(tensors or {"calls.0.query": torch.zeros(1)}, path, {"qkv_calls": content})
    return path


def test_broken_file_has_a_readable_message(
    open_page: Open, server: Server, tmp_path: Path
) -> None:
    page = open_narrow(open_page, server.url).page
    path = tmp_path / "calls.safetensors"
    call = call_of(0, 3)
    fields = {name: value for name, value in call.items() if name != "tensors"}
    named = {f"calls.0.{name}": x for name, x in call["tensors"].items()}
    short = named | {"calls.0.key": torch.zeros(1, 2, 4, D)}
    whole = named | {"calls.0.value": torch.zeros(1, 2, 3, D, dtype=torch.int32)}
    wrong: list[tuple[str, dict[str, torch.Tensor], str]] = [
        ("{", {}, "calls.safetensors: the metadata qkv_calls is invalid: this is not JSON"),
        ("[]", {}, "expected a list with an object for each call"),
        ("[{}]", {}, "call 0 has no layer: expected its name"),
        (json.dumps([fields]), {}, "tensor calls.0.key is missing"),
        (json.dumps([fields]), short, "query, key and value of call 0 have shapes that do not fit"),
        (json.dumps([fields]), whole, "calls.0.value has an unsupported dtype: got I32"),
        (json.dumps([fields | {"heads": [0]}]), named, "expected the numbers of its 4 heads"),
    ]
    for content, tensors, message in wrong:
        broken(path, content, **tensors)
        page.get_by_label("Upload").set_input_files(str(path))
        expect_shown(page.locator("#inputs-error"), message)
        expect(page.locator("#captured")).to_be_hidden()
    write_calls(path, [call])
    path.write_bytes(path.read_bytes()[:-1])
    page.get_by_label("Upload").set_input_files(str(path))
    expect_shown(page.locator("#inputs-error"), "the file is damaged or cut off")
    write_calls(path, [call])
    page.locator("#checkpoint").set_input_files(str(path))  # the wrong button opens it too
    page.locator("#captured").wait_for()
    expect(page.locator("#inputs-error")).to_be_hidden()
    page.get_by_role("button", name="Close the captured model").click()
    expect(page.locator("#captured")).to_be_hidden()


def test_section_has_no_axe_violation_and_no_overflow(
    open_page: Open, server: Server, calls: list[Call], tmp_path: Path
) -> None:
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    masked = call_of(2, 5, causal=False, tensors={"mask": mask})
    path = write_calls(tmp_path / "calls.safetensors", [calls[1], masked])
    page = open_calls(open_page(server.url, width=390), path)
    for name in ("efficient", "taylor"):  # axe takes as long as the section
        page.locator(f"#heads-{name}").uncheck()
    compare(page, 2)
    read_maps(page)
    for look in looks(page):
        page.get_by_role("application").first.hover()
        assert problems(page, "#captured") == [], look
