"""Tests loaded layers in the playground, in Chromium: a list of them, and requests by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from playwright.sync_api import expect

from qkv import Client
from support import small_checkpoints
from support.browser import Open, open_narrow, read_weights, wait_until_drawn
from support.known_requests import as_array
from support.service import Server, running_server
from support.small_checkpoints import HEADS, LLAMA, WIDTH

ROWS = 16
NAME = "llama.model.layers.1"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("checkpoints")
    bert = small_checkpoints.bert(folder / "bert", dtype=torch.bfloat16)
    llama = small_checkpoints.llama(folder / "llama", LLAMA)
    with running_server(checkpoints=f"bert={bert},llama={llama}") as server:
        yield server


@pytest.mark.representative
def test_chosen_layer_gives_the_weights_of_the_client(open_page: Open, loaded: Server) -> None:
    opened = open_narrow(open_page, loaded.url)
    page = opened.page
    choice = page.get_by_label("Loaded layer")
    names = [
        f"{model}.{i}" for model in ("bert.encoder.layer", "llama.model.layers") for i in (0, 1)
    ]
    expect(choice.locator("option")).to_have_text(["None", *names])
    choice.select_option(NAME)
    wait_until_drawn(opened)
    expect(page.locator("#status")).to_contain_text(f"{HEADS} heads")
    expect(page.get_by_label("causal", exact=True)).to_be_checked()
    expect(page.locator("#loaded-layer-about")).to_contain_text(f"{HEADS} heads, width {WIDTH}")
    body = next(b for b in opened.posted("/v1/attention/softmax") if "layer" in b)
    assert body["layer"] == {"name": NAME, "heads": HEADS}
    assert list(body["inputs"]) == ["x"]
    x = as_array(body["inputs"]["x"])
    assert x.shape == (ROWS, WIDTH)
    with Client(loaded.url) as client:
        run = client.attend("softmax", x=x, layer=NAME)
    np.testing.assert_allclose(
        np.array(list(read_weights(page).values())), run.weights[0], rtol=0, atol=0.51e-4
    )
    choice.select_option("bert.encoder.layer.0")
    wait_until_drawn(opened)
    expect(page.get_by_label("causal", exact=True)).not_to_be_checked()
    choice.select_option("")
    wait_until_drawn(opened)
    assert "layer" not in opened.posted("/v1/attention/softmax")[-1]


def test_loaded_layer_survives_a_reload_undo_and_own_hidden_states(
    open_page: Open, loaded: Server, tmp_path: Path
) -> None:
    opened = open_narrow(open_page, loaded.url)
    page = opened.page
    choice = page.get_by_label("Loaded layer")
    choice.select_option(NAME)
    wait_until_drawn(opened)
    page.wait_for_url(lambda address: "layer=" in address)
    shown = read_weights(page)
    page.reload()
    wait_until_drawn(opened)
    expect(choice).to_have_value(NAME)
    assert read_weights(page) == shown
    page.get_by_label("Variant", exact=True).select_option("linear")
    wait_until_drawn(opened)
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_label("Variant", exact=True)).to_have_value("softmax")
    wait_until_drawn(opened)
    expect(choice).to_have_value(NAME)
    assert read_weights(page) == shown

    # hidden states of the user keep the layer, and replace those that the page drew before
    states = np.random.default_rng(0).normal(size=(5, WIDTH)).astype(np.float32)
    np.save(tmp_path / "states.npy", states)
    page.locator("#upload").set_input_files(str(tmp_path / "states.npy"))
    expect(page.locator("#output-about")).to_have_text(f"5 × {WIDTH}")
    expect(page.get_by_label("Loaded layer")).to_have_value(NAME)
    body = opened.posted("/v1/attention/softmax")[-1]
    assert body["layer"]["name"] == NAME
