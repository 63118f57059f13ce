"""Tests of the playground in Chromium, through Ray's proxy."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv import Client
from support.browser import Open, read_weights, wait_until_drawn


def test_page_draws_an_example_and_redraws_it_with_a_parameter(
    ray_url: str, open_page: Open
) -> None:
    opened = open_page(ray_url)
    page = wait_until_drawn(opened)
    assert read_weights(page)["journey"] == [0.1385, 0.2379, 0.2333, 0.1240, 0.1082, 0.1581]
    page.evaluate("() => { document.getElementById('status').textContent = ''; }")
    page.get_by_label("softcap", exact=True).fill("0.1")
    drawn = read_weights(wait_until_drawn(opened))
    request = opened.posted("/v1/attention/softmax")[-1]
    assert request["parameters"]["softcap"] == 0.1
    inputs: dict[str, Any] = {
        name: np.array(rows, np.float32) for name, rows in request["inputs"].items()
    }
    with Client(ray_url) as client:
        weights = client.attend("softmax", **inputs, **request["parameters"]).weights
    assert drawn["journey"] != [0.1385, 0.2379, 0.2333, 0.1240, 0.1082, 0.1581]
    np.testing.assert_allclose(list(drawn.values()), weights, atol=0.51e-4)
