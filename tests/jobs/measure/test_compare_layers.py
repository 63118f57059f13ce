"""Comparisons through layers of real models."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.compare_requests import post
from support.known_requests import as_json, assert_problem
from support.service import Server


def body(variants: list[Any], sinks: bool = False, **layer: Any) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    names = [f"{role}_proj.weight" for role in "qkv"]
    tensors = {name: draw.normal(size=(8, 8)).astype(np.float32) for name in names}
    if sinks:
        tensors["sinks"] = np.ones(2, np.float32)
    state = {name: as_json(array, "base64") for name, array in tensors.items()}
    x = as_json(draw.normal(size=(1, 5, 8)).astype(np.float32), "base64")
    fields = {"layout": "llama", "heads": 2, "tensors": state} | layer
    return {"inputs": {"x": x}, "variants": variants, "layer": fields, "repeats": 1}


def test_rotary_queries_at_other_positions_are_not_compared(server: Server) -> None:
    other = {"variant": "softmax", "parameters": {"query_offset": 2}}
    problem = assert_problem(post(server, body([other], rope={})), 422)
    assert "query_offset is 2, expected 0" in problem["detail"]
    assert post(server, body([other])).status_code == 200


def test_weights_with_sinks_have_no_entropy(server: Server) -> None:
    other = {"variant": "softmax", "parameters": {"scale": 1.0}}
    plain, found = (post(server, body([other], sinks)).json() for sinks in (False, True))
    assert plain["variants"][0]["weights"]["entropy"] is not None
    assert found["variants"][0]["weights"]["entropy"] is None
    assert found["variants"][0]["weights"]["kl_divergence"] is None
