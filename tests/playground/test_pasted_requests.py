"""Tests requests that users paste or upload into the playground, in Chromium."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import numpy as np
from playwright.sync_api import expect

from support.browser import (
    Open,
    answer,
    choose_example,
    expect_shown,
    open_narrow,
    paste,
    read_weights,
    wait_until_drawn,
)
from support.service import Server

TWO: Final = [[1.0, 0.0], [0.0, 1.0]]
THREE: Final = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
INPUTS: Final = {"query": TWO, "key": THREE, "value": THREE}
LAYER: Final = {
    "layout": "v2",
    "tensors": {f"W_{role}.weight": [[1, 2], [3, 5]] for role in ("query", "key", "value")},
}


def curl(variant: str, body: dict[str, Any]) -> str:
    return f"curl -sS 'http://localhost:8000/v1/attention/{variant}' --json '{json.dumps(body)}'"


def test_pasted_or_uploaded_body_applies_its_parameters_and_its_layer(
    open_page: Open, server: Server
) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    paste(page, json.dumps({"inputs": INPUTS, "parameters": {"causal": True, "scale": 0.25}}))
    wait_until_drawn(opened)
    expect(page.get_by_label("causal", exact=True)).to_be_checked()
    expect(page.get_by_label("scale", exact=True)).to_have_value("0.25")
    body = [b for b in opened.posted("/v1/attention/softmax") if "weights" not in b][-1]
    assert body["parameters"] == {"causal": True, "scale": 0.25}
    about = page.locator("#example-about")
    expect(about).to_contain_text("Applied: causal true, scale 0.25.")
    expect(about).to_contain_text("The request names no variant; the page keeps softmax.")
    response = server.http.post("/v1/attention/softmax", json=body | {"encoding": "lists"}).json()
    shown = list(read_weights(page).values())
    np.testing.assert_allclose(shown, response["outputs"]["weights"], rtol=0, atol=0.51e-4)

    choose_example(opened, "words")
    data = json.dumps({"inputs": INPUTS, "parameters": {"softcap": 3}}).encode()
    page.get_by_label("Upload").set_input_files(
        {"name": "request.json", "mimeType": "application/json", "buffer": data}
    )
    expect(page.get_by_label("softcap", exact=True)).to_have_value("3")
    expect(page.locator("#example-about")).to_contain_text("Applied: softcap 3.")

    # a layer projects the input
    choose_example(opened, "words")
    paste(page, json.dumps({"inputs": {"x": THREE}, "layer": LAYER}))
    wait_until_drawn(opened)
    expect(page.locator("#tensors")).to_contain_text("W_query.weight 2 × 2")
    body = [b for b in opened.posted("/v1/attention/softmax") if "weights" not in b][-1]
    assert body["layer"] == LAYER
    assert body["inputs"] == {"x": THREE}


def test_pasted_body_applies_its_pooled_weights_and_a_curl_command_its_variant(
    open_page: Open, server: Server
) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    rows = [[i / 40, 1.0] for i in range(40)]
    inputs = dict.fromkeys(("query", "key", "value"), rows)
    paste(page, json.dumps({"inputs": inputs, "weights": {"pool": 8}}))
    expect(page.locator("#map")).to_contain_text("mean over 5 queries of the mass on 5 keys")
    forms = [body.get("weights") for body in opened.posted("/v1/attention/softmax")]
    assert {"pool": 8} in forms
    choose_example(opened, "words")
    expect(page.locator("#map")).not_to_contain_text("Pooled")

    parameters = {"causal": True, "scale": 2}
    paste(page, curl("linear", {"inputs": INPUTS, "parameters": parameters, "encoding": "lists"}))
    expect(page.locator("#status")).to_have_text(re.compile("^linear: 2 queries, 3 keys"))
    expect(page.get_by_label("Variant", exact=True)).to_have_value("linear")
    expect(page.get_by_label("causal", exact=True)).to_be_checked()
    expect(page.locator("#example-about")).to_have_text(
        "Applied: variant linear, causal true. "
        "Ignored: scale (linear has no such parameter), encoding (the page chooses the encoding)."
    )
    expect(page.locator("#announcements")).to_contain_text("Ignored: scale")
    choose_example(opened, "words")  # an example resets the parameters and the note
    expect(page.get_by_label("causal", exact=True)).not_to_be_checked()
    expect(page.locator("#example-about")).not_to_contain_text("Ignored")


def test_copied_command_can_be_pasted_again(open_page: Open, server: Server) -> None:
    opened = open_page(server.url)
    page = choose_example(opened, "linear-layer")
    page.get_by_role("button", name="Copy", exact=True).click()
    page.get_by_role("button", name="Copied").wait_for()
    command = page.evaluate("() => navigator.clipboard.readText()")
    before = read_weights(page)
    choose_example(opened, "words")
    paste(page, command)
    expect(page.locator("#status")).to_have_text(re.compile("^linear_layer: "))
    wait_until_drawn(opened)
    assert list(read_weights(page).values()) == list(before.values())


NOTES: Final[list[tuple[dict[str, Any], str]]] = [
    ({"outputs": ["output"]}, "Ignored: outputs (the page requests the output and the weights)"),
    ({"weights": "full"}, "Applied: full weights."),
    ({"weights": {"top_k": 2}}, 'Ignored: weights {"top_k":2} (the page does not show this form)'),
    ({"dtype": "float64"}, "Applied: dtype float64."),
    ({"variant": "none"}, "Ignored: variant none (the service has no such variant)."),
    ({"anchor": "linear", "variants": ["taylor"]}, "Ignored: variants (select variants below"),
    ({"colour": 1}, "Ignored: colour (the page has no such control)."),
    ({"layer": 5}, "Ignored: layer (expected an object with a name or with tensors)."),
    ({"weights": {"rows": [1, 0]}}, "Applied: row 1. Ignored: 1 more rows"),
]


def test_other_fields_of_a_request_are_applied_or_listed_and_unusable_texts_reported(
    open_page: Open, server: Server
) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    unpin = page.get_by_role("button", name="Unpin this row")
    unpin.click()  # the example starts with a pinned row
    for at, (fields, note) in enumerate(NOTES):
        paste(page, json.dumps({"inputs": INPUTS} | fields))
        if at:
            answer(page, "Replace")
        wait_until_drawn(opened)
        expect(page.locator("#example-about")).to_contain_text(note)
        expect(page.locator("#alert")).to_be_hidden()
        body = [b for b in opened.bodies if b[0].startswith("/v1/attention/")][-1][1]
        assert body.get("dtype") == fields.get("dtype")
        expect(unpin).to_have_count(int("rows" in str(fields)))

    # a text that is no request is reported in the dialog
    page.get_by_role("button", name="Paste").click()
    for text, message in UNUSABLE.items():
        page.get_by_label("Tensors or request").fill(text)
        page.get_by_role("button", name="Use these").click()
        expect_shown(page.locator("#paste-error"), message)
        page.get_by_role("dialog").wait_for()
        expect(page.get_by_label("Tensors or request")).to_be_focused()


UNUSABLE: Final = {
    "curl http://localhost/livez": "This curl command has no body",
    "curl http://a/v1/attention/softmax --json @request.json": "is in request.json: upload",
    json.dumps({"variants": ["mean"], "lengths": [4]}): "This request has no inputs",
    json.dumps({"inputs": [{"name": "query", "datatype": "FP32", "shape": [1]}]}): (
        "Open Inference Protocol"
    ),
    "{oh": "This is not JSON",
    "": "The text is empty.",
}


def test_your_own_opens_the_paste_dialog(open_page: Open, server: Server) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    example = page.get_by_label("Example")
    dialog = page.get_by_role("dialog", name="Your own tensors")
    for width in (390, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        choose_example(opened, "words")
        example.select_option("Your own…")
        dialog.wait_for()
        expect(dialog.get_by_label("Tensors or request")).to_be_focused()
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(example).to_have_value("words")  # a cancelled dialog changes nothing
        example.select_option("Your own…")
        with page.expect_file_chooser() as chooser:
            dialog.get_by_role("button", name="Upload files").click()
        assert chooser.value.is_multiple()
        expect(example).to_have_value("words")
        example.select_option("Your own…")
        dialog.get_by_label("Tensors or request").fill(json.dumps(THREE))
        dialog.get_by_role("button", name="Use these").click()
        expect(page.locator("#status")).to_have_text(re.compile("3 queries, 3 keys"))
        expect(example).to_have_value("")
        wait_until_drawn(opened)
