"""Notes of a comparison, also through layers: figures without meaning, facts about the weights."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from support.compare_requests import INPUTS, compare, post, random_inputs, variant_entry
from support.known_requests import as_json, assert_problem
from support.service import Server


def test_random_tensors_make_an_empty_comparison() -> None:
    numbers = np.random.default_rng(0)
    inputs = {n: numbers.normal(size=(1, 2, 256, 64)).astype("f4") for n in INPUTS}
    response = compare(inputs, variants=["linear", "taylor", "efficient"])
    (note,) = response["notes"]
    assert note.startswith("Near uniform on these inputs: linear, taylor and efficient. ")
    near_mean = compare(inputs | {"query": inputs["query"] * 0.01}, variants=["taylor"])
    assert any("comparison is empty" in note for note in near_mean["notes"])
    distinct = {n: np.eye(16, dtype="f4")[None, None] * 8 for n in INPUTS}
    assert compare(distinct, variants=["linear"])["notes"] == []


def test_figures_without_meaning_are_null_and_noted() -> None:
    inputs = random_inputs()
    names = [
        variant_entry("linformer"),
        variant_entry("linear", normalize=False),
        variant_entry("mean"),
    ]
    response = compare(inputs, variants=[*names, variant_entry("softmax", causal=True)])
    signed, sums, mean, causal = (entry["weights"] for entry in response["variants"])
    notes = response["notes"]
    for weights, kind in ((signed, "signed"), (sums, "unnormalised")):
        assert weights["kl_divergence"] is weights["js_divergence"] is weights["entropy"] is None
        assert weights["total_variation"] is not None
        assert any(f"are {kind}: they have no entropy" in note for note in notes)
    assert causal["kl_divergence"] is None
    assert causal["js_divergence"]["worst"] <= math.log(2)
    assert any("the KL divergence is infinite: mean and softmax." in note for note in notes)
    assert any(note.startswith("Causal although the baseline is not") for note in notes)
    assert any("no projections for linformer" in note for note in notes)
    even = compare(inputs, variants=[variant_entry("mean", causal=False)])
    assert even["variants"][0]["weights"]["rank_correlation"] is None
    assert any("no order" in note for note in even["notes"])
    assert mean["rank_correlation"] is not None  # it sees some keys and not others


def test_numbers_that_are_not_finite_are_noted() -> None:
    inputs = random_inputs()
    inputs["value"][0, 0, 0, 0] = np.inf
    response = compare(inputs, variants=["linear"])
    (entry,) = response["variants"]
    nothing = {"relative_error": None, "largest_error": None, "cosine": None}
    assert entry["output"] == response["anchor"]["output"] == nothing
    assert (
        "The output of softmax and linear, or the output it is compared with, is not finite."
        in response["notes"]
    )
    inputs = random_inputs()
    inputs["query"][0, 0, 0, 0] = np.nan
    json.dumps(compare(inputs, variants=["linear"]), allow_nan=False)


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e200, 1.7e308, 0.0])
def test_outputs_of_any_size(size: float) -> None:
    inputs = random_inputs("float64")
    inputs["value"] = np.full_like(inputs["value"], size)
    (entry,) = compare(inputs, variants=["linear"])["variants"]
    if size:
        assert entry["output"]["cosine"] == pytest.approx(1.0)
        assert entry["output"]["relative_error"] < 1e-2
    else:
        assert entry["output"] == {"relative_error": None, "largest_error": 0.0, "cosine": None}


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
