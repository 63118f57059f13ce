"""Tests tensors that users upload or paste into the playground, in Chromium."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Final

import numpy as np
import safetensors.numpy
from playwright.sync_api import FilePayload, Page, expect

from support.browser import (
    Open,
    WatchedPage,
    answer,
    choose_example,
    expect_shown,
    open_narrow,
    read_weights,
    wait_until_drawn,
)
from support.service import Server

RNG: Final = np.random.default_rng(3)
QUERY, KEY, VALUE = (RNG.standard_normal((5, 4)).astype(np.float32) for _ in range(3))
TENSORS: Final = {"query": QUERY, "key": KEY, "value": VALUE}


def payload(name: str, data: bytes) -> FilePayload:
    return {"name": name, "mimeType": "application/octet-stream", "buffer": data}


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def softmax(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    scores = query.astype(np.float64) @ key.T.astype(np.float64) / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


UPLOADS: Final = {
    "npy": [payload(f"{name}.npy", npy(array)) for name, array in TENSORS.items()],
    "fortran": [payload(f"{n}.npy", npy(np.asfortranarray(a))) for n, a in TENSORS.items()],
    "safetensors": [payload("all.safetensors", safetensors.numpy.save(TENSORS))],
    "json": [payload("x.json", json.dumps({n: a.tolist() for n, a in TENSORS.items()}).encode())],
}


def test_uploaded_files_are_drawn(open_page: Open, server: Server) -> None:
    opened = open_narrow(open_page, server.url)
    for kind, files in UPLOADS.items():
        page = choose_example(opened, "words")
        page.get_by_label("Upload").set_input_files(files)
        expect(page.locator("#status")).to_have_text(re.compile("5 queries, 5 keys"))
        expect(page.get_by_label("Example")).to_have_value("")
        shown = np.array(list(read_weights(page).values()))
        np.testing.assert_allclose(shown, softmax(QUERY, KEY), rtol=0, atol=0.51e-4, err_msg=kind)


def test_files_with_one_tensor_are_combined(open_page: Open, server: Server) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    body_count, needed = len(opened.bodies), page.locator("#tensors .needed .name")
    alert = page.locator("#alert")
    upload = page.get_by_label("Upload")
    upload.set_input_files(UPLOADS["npy"][0])
    expect(needed).to_have_text(["key", "value"])  # the example's tensors are removed
    expect(alert).to_have_text("softmax requires key and value: upload them too.", ignore_case=True)
    page.get_by_label("causal", exact=True).check()
    upload.set_input_files(UPLOADS["npy"][1])
    expect(needed).to_have_text(["value"])
    assert len(opened.bodies) == body_count  # no incomplete request is sent
    upload.set_input_files(UPLOADS["npy"][2])
    expect(needed).to_have_count(0)
    expect(page.locator("#status")).to_have_text(re.compile("5 queries, 5 keys"))
    expect(alert).to_be_hidden()
    mask = np.tri(5, dtype=bool)[::-1].T.copy()
    with page.expect_request(lambda r: '"mask"' in (r.post_data or "")) as sent:
        upload.set_input_files([payload("mask.npy", npy(mask))])
    assert (sent.value.post_data_json or {})["parameters"] == {"causal": True}  # kept
    expect(page.locator("#tensors .name")).to_have_text(["query", "key", "value", "mask"])
    page.get_by_role("button", name="Remove key", exact=True).click()
    expect(needed).to_have_text(["key"])


def test_files_with_other_names_are_combined_by_role_or_first_letter(
    open_page: Open, server: Server
) -> None:
    opened = open_narrow(open_page, server.url)
    for names in (("a", "b", "c"), ("Q_proj", "k1", "V")):
        page = choose_example(opened, "words")
        for name, array in zip(names, TENSORS.values(), strict=True):
            page.get_by_label("Upload").set_input_files([payload(f"{name}.npy", npy(array))])
            if name == "a":  # a single tensor has all three roles until the user selects one
                page.get_by_label("Role of a").select_option("query")
            expect(page.locator("#tensors .name").first).to_have_text(names[0])
        for name, role in zip(names, TENSORS, strict=True):
            expect(page.get_by_label(f"Role of {name}")).to_have_value(role)
        expect(page.locator("#tensors .needed")).to_have_count(0)
        expect(page.locator("#status")).to_have_text(re.compile("5 queries, 5 keys"))
        wait_until_drawn(opened)
        shown = np.array(list(read_weights(page).values()))
        np.testing.assert_allclose(shown, softmax(QUERY, KEY), rtol=0, atol=0.51e-4)


def test_page_asks_before_it_replaces_a_tensor_of_the_user(open_page: Open, server: Server) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    upload, names = page.get_by_label("Upload"), page.locator("#tensors .name")
    question = page.get_by_role("group", name=re.compile("you brought"))
    upload.set_input_files(UPLOADS["npy"])
    expect(names).to_have_text(["query", "key", "value"])  # in place of an example: no question
    other = [payload("a.npy", npy(QUERY[:3]))]
    upload.set_input_files(other)
    expect(question).to_be_focused()
    expect(question).to_contain_text("a would replace query, key and value, which you brought.")
    page.get_by_label("causal", exact=True).check()  # the page goes on meanwhile
    wait_until_drawn(opened)
    expect(page.locator("#status")).to_contain_text("5 queries")
    answer(page, "Cancel")
    expect(names).to_have_text(["query", "key", "value"])
    upload.set_input_files(other)
    answer(page, "Keep both")
    expect(names).to_have_text(["query", "key", "value", "a"])
    expect(page.get_by_label("Role of a")).to_have_value("unused")
    page.get_by_role("button", name="Remove a", exact=True).click()
    upload.set_input_files(other)
    answer(page, "Replace")
    expect(page.locator("#status")).to_have_text(re.compile("3 queries, 3 keys"))
    expect(names).to_have_text(["a"])
    upload.set_input_files(UPLOADS["safetensors"])  # has all roles of a
    answer(page, "Replace")
    expect(names).to_have_text(["key", "query", "value"])
    upload.set_input_files(other)
    question.wait_for()
    page.get_by_label("Example").select_option("words")  # then the question is void
    expect(question).to_be_hidden()
    expect(names).to_have_text(["words"])

    # files are added in the order in which they are chosen
    page.evaluate(
        """text => {
            const drop = (name, content) => {
                const dataTransfer = new DataTransfer();
                dataTransfer.items.add(new File([content], name));
                const event = new DragEvent("drop", {dataTransfer, cancelable: true});
                document.querySelector("#request-form").dispatchEvent(event);
            };
            drop("large.json", text + " ".repeat(3e7)); // takes longer to read
            drop("small.json", "[[1, 0], [0, 1], [1, 1], [2, 0]]");
        }""",
        '{"query": [[1, 0], [0, 1]], "key": [[1, 0], [0, 1]], "value": [[1, 2], [3, 4]]}',
    )
    answer(page, "Replace")
    expect(page.locator("#status")).to_have_text(re.compile("4 queries, 4 keys"))


def test_pasted_tensors_and_a_table_of_a_german_spreadsheet_are_drawn(
    open_page: Open, server: Server
) -> None:
    """Excel writes Windows-1252, and decimal commas."""
    opened = open_narrow(open_page, server.url)
    page = opened.page
    page.get_by_role("button", name="Paste").click()
    text = page.get_by_label("Tensors or request")
    expect(text).to_be_focused()
    text.fill('[[1, 2], [3, "four"]]')
    page.get_by_role("button", name="Use these").click()
    message = '[1][1] is "four": expected a number, "NaN", "Infinity", "-Infinity", true or false.'
    expect(text).to_have_accessible_description(re.compile(f"{re.escape(message)}$"))
    text.fill(json.dumps(QUERY.tolist()))
    page.get_by_role("button", name="Use these").click()
    expect(page.locator("#status")).to_have_text(re.compile("5 queries, 5 keys"))
    expect(page.locator("#paste-error")).to_be_hidden()
    expect(page.get_by_label("Role of tensor")).to_have_value("query, key, value")
    shown = np.array(list(read_weights(page).values()))
    np.testing.assert_allclose(shown, softmax(QUERY, QUERY), rtol=0, atol=0.51e-4)
    choose_example(opened, "words")
    table = "Straße;0,5;1\nÄpfel;2;0,25\n".encode("cp1252")
    page.get_by_label("Upload").set_input_files([payload("tabelle.csv", table)])
    expect(page.get_by_label("Token labels")).to_have_value("Straße Äpfel")
    expect(page.locator("#row")).to_contain_text("Äpfel")
    page.get_by_role("button", name="Edit tabelle").click()
    expect(page.get_by_label("tabelle, Äpfel, 1")).to_have_value("0.25")


def test_errors_are_beside_the_upload_and_the_tensor_whose_role_can_change(
    open_page: Open, server: Server
) -> None:
    opened = open_narrow(open_page, server.url)
    opened.expect_status(422)
    page = opened.page
    for name, data, message in (
        ("cut.npy", npy(QUERY)[:-3], "cut.npy: this .npy has 77 bytes of data"),
        ("x.npz", b"PK\x03\x04", "x.npz: this archive is cut off"),
        ("words.json", b'{"query": ["Your"]}', 'words.json: query: [0] is "Your"'),
    ):
        page.get_by_label("Upload").set_input_files([payload(name, data)])
        expect_shown(page.locator("#inputs-error"), message)
        expect(page.get_by_label("Example")).to_have_value("words")  # unchanged
    page.get_by_label("Upload").set_input_files(UPLOADS["npy"])
    # the message disappears before the files are read
    expect(page.locator("#tensors .name")).to_have_text(["query", "key", "value"])
    expect(page.locator("#inputs-error")).to_be_hidden()
    choose_example(opened, "words")
    wrong = {"query": QUERY, "key": KEY[:, :3], "value": VALUE}
    page.get_by_label("Upload").set_input_files(
        [payload("all.safetensors", safetensors.numpy.save(wrong))]
    )
    expect(page.locator("#tensors li.wrong")).to_contain_text("D=")
    expect_shown(page.locator("#alert"), "D=")
    page.get_by_label("Example").select_option("words")
    expect(page.locator("#alert")).to_be_hidden()
    mask = (np.arange(25).reshape(5, 5) % 3 > 0).tolist()
    text = json.dumps({n: a.tolist() for n, a in TENSORS.items()} | {"allowed": mask})
    page.get_by_label("Upload").set_input_files([payload("x.json", text.encode())])
    expect(page.locator("#status")).to_have_text(re.compile("5 queries"))
    with page.expect_request(lambda r: "mask" in (r.post_data or "")):
        page.get_by_label("Role of allowed").select_option("mask")
    expect(page.locator("#alert")).to_be_hidden()
    wait_until_drawn(opened)
    shown = np.array(list(read_weights(page).values()))
    assert ((shown == 0) == ~np.array(mask)).all()
    page.get_by_role("button", name="Remove value").click()
    expect_shown(page.locator("#alert"), "value")


def uploaded(opened: WatchedPage, **arrays: np.ndarray) -> Page:
    """Uploads tensors in place of an example; returns the page when it has drawn them."""
    page = choose_example(opened, "words")
    page.evaluate("() => (document.getElementById('status').textContent = '')")
    data = safetensors.numpy.save({n: np.ascontiguousarray(a) for n, a in arrays.items()})
    page.get_by_label("Upload").set_input_files([payload("all.safetensors", data)])
    return wait_until_drawn(opened)


def test_shape_and_mask_of_the_inputs_decide_what_is_shown(open_page: Open, server: Server) -> None:
    opened = open_page(server.url)  # a status of 422 would fail the test
    page = uploaded(opened, query=QUERY[:1], key=KEY, value=VALUE)  # a single query
    expect(page.locator("#row").get_by_role("heading")).to_have_text("query 0")
    expect(page.locator("#status")).to_have_text(re.compile("^softmax: 1 query, 5 keys; "))
    weights = softmax(QUERY[:1], KEY)[0]
    first = page.locator("#row tbody tr").first
    expect(first).to_contain_text(f"key {weights.argmax()}")
    expect(first).to_contain_text(f"{weights.max():.4f}")

    mask = np.tri(5, dtype=bool)  # variants without a mask are not compared
    page = uploaded(opened, query=QUERY, key=KEY, value=VALUE, mask=mask)
    expect(page.locator("#comparison").get_by_role("rowheader")).to_have_count(2)
    compared = page.get_by_role("group", name="Variants to compare").get_by_role("checkbox")
    expect(compared).to_have_count(1)
    expect(page.locator("#comparison")).to_contain_text("sigmoid")
    expect(page.locator("#comparison [role=alert]")).to_be_hidden()

    heads = np.stack([QUERY, KEY, VALUE])[None].repeat(2, 0)  # batch items and heads have names
    page = uploaded(opened, query=heads, key=heads, value=heads)
    expect(page.locator("#status")).to_contain_text("5 keys, 2 items of 3 heads;")
    page.get_by_role("button", name="item 1, head 2").wait_for()
    page = uploaded(opened, query=heads[0], key=heads[0], value=heads[0])
    expect(page.locator("#status")).to_contain_text("5 keys, 3 items;")

    page = uploaded(opened, query=QUERY[:3], key=KEY, value=VALUE)
    page.locator("#difference figure").wait_for()
    page.get_by_label("Variant", exact=True).select_option("mean")  # 5 by 5: maps of other shapes
    expect(page.locator("#status")).to_have_text(re.compile("^mean:"))
    expect(page.locator("#difference figure")).to_be_hidden()


def test_names_and_labels_are_not_parsed_as_html_and_possibly_swapped_axes_are_reported(
    open_page: Open, server: Server
) -> None:
    opened = open_narrow(open_page, server.url)
    name = "<img src=/playground/none onerror=alert(1)>"
    page = uploaded(opened, **{name: QUERY, "key": KEY, "value": VALUE, "query": QUERY})
    page.get_by_label("Token labels").fill("<b>a</b> <i>b</i> c d e")
    expect(page.locator("#row").get_by_role("heading")).to_have_text(re.compile("<i>b</i>"))
    expect(page.locator("#tensors")).to_contain_text(name)
    assert page.locator("#tensors img, #row i, #row b").count() == 0
    for shape, reported in (((7, 3, 4), 3), ((3, 7, 4), 0), ((1, 8, 1, 4), 0), ((7, 3, 4), 3)):
        page = uploaded(opened, **dict.fromkeys(TENSORS, RNG.standard_normal(shape)))
        expect(page.locator("#tensors .swapped")).to_have_count(reported)
    expect(page.locator("#tensors .swapped").first).to_contain_text("7 heads of 3 positions")


def test_large_request_is_saved_or_uses_the_uploaded_files(
    open_page: Open, server: Server, tmp_path: Path
) -> None:
    page = wait_until_drawn(open_page(server.url))
    save = page.get_by_role("button", name="Save request.json")
    expect(save).to_be_hidden()
    arrays = {n: RNG.standard_normal((300, 16)).astype(np.float32) for n in TENSORS}
    page.get_by_label("Upload").set_input_files(
        [payload(f"{name}.npy", npy(array)) for name, array in arrays.items()]
    )
    with page.expect_download() as download:
        save.click()
    download.value.save_as(tmp_path / download.value.suggested_filename)
    inputs = json.loads((tmp_path / "request.json").read_text())["inputs"]
    assert base64.b64decode(inputs["key"]["data"]) == arrays["key"].tobytes()
    code = page.locator("#request code")
    expect(code).to_contain_text("--json @request.json")
    page.get_by_role("button", name="Python", exact=True).click()
    expect(code).to_contain_text('query=np.load("query.npy")')
    expect(page.locator("#request .hint")).to_have_text(
        "Run this in a folder with query.npy, key.npy, value.npy."
    )
    expect(save).to_be_hidden()
