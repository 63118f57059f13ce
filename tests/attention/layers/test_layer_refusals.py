"""Layers and conversions that cannot be right are refused by name, before they run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.known_requests import as_json, assert_problem
from support.service import Server

State = dict[str, np.ndarray]


def drawn(**shapes: tuple[int, ...]) -> State:
    draw = np.random.default_rng(0)
    return {n.replace("__", "."): draw.normal(size=s).astype(np.float32) for n, s in shapes.items()}


VIT = drawn(qkv__weight=(24, 8), proj__weight=(8, 8))
LLAMA = drawn(
    q_proj__weight=(8, 8), k_proj__weight=(4, 8), v_proj__weight=(4, 8), o_proj__weight=(8, 8)
)
MHA = drawn(in_proj_weight=(24, 8), out_proj__weight=(8, 8))
BERT = drawn(self__query__weight=(8, 8), self__key__weight=(8, 8), self__value__weight=(8, 8))
FALCON = drawn(query_key_value__weight=(24, 8), dense__weight=(8, 8))


def encoded(state: State) -> dict[str, Any]:
    return {name: as_json(array, "base64") for name, array in state.items()}


def attend(server: Server, state: State, path: str = "attention", **layer: Any) -> Any:
    x = drawn(x=(1, 3, 8), grad_output=(1, 3, 8))
    inputs = encoded(x if path == "gradients" else {"x": x["x"]})
    body = {"inputs": inputs, "layer": {"layout": "auto", "tensors": encoded(state)} | layer}
    return server.http.post(f"/v1/{path}/softmax", json=body)


@pytest.mark.parametrize(
    ("state", "name"),
    [
        *((VIT, n) for n in ("q_bias", "v_bias", "logit_scale", "cpb_mlp.0.weight", "q_norm.w")),
        *((VIT, n) for n in ("q_norm.weight", "gate.weight", "norm.weight")),
        *((LLAMA, n) for n in ("sinks", "k_norm.weight", "q_layernorm.weight")),
        (MHA, "bias_k"),
        (BERT, "self.distance_embedding.weight"),
    ],
)
def test_tensor_that_changes_the_result_is_not_ignored(
    server: Server, state: State, name: str
) -> None:
    response = attend(server, state | {name: np.ones(7, np.float32)}, heads=4)
    assert name in assert_problem(response, 422)["detail"]


def test_empty_tensor_of_another_module_changes_nothing(server: Server) -> None:
    plain = attend(server, LLAMA, heads=4)
    response = attend(server, LLAMA | {"rotary_emb.cache": np.empty((0, 4), np.float32)}, heads=4)
    assert response.status_code == 200, response.text
    assert response.json()["outputs"] == plain.json()["outputs"]
    assert response.json()["layer"]["ignored"] == ["rotary_emb.cache"]


def test_grouped_heads_without_their_number_ask_for_it(server: Server) -> None:
    problem = assert_problem(attend(server, LLAMA), 422)
    assert problem["detail"].startswith("heads is missing")
    assert problem["pointer"] == "/layer/heads"


@pytest.mark.parametrize(
    ("layout", "alibi", "expected"), [("falcon", True, '"scaled"'), ("bloom", "scaled", "true")]
)
def test_biases_in_the_place_of_another_model_are_refused(
    server: Server, layout: str, alibi: Any, expected: str
) -> None:
    response = attend(server, FALCON, layout=layout, heads=2, alibi=alibi)
    problem = assert_problem(response, 422)
    assert f"expected {expected}" in problem["detail"]
    assert problem["pointer"] == "/layer/alibi"


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4, "beta_fast": 1e-320},
        {"rope_type": "linear", "factor": 1e-320},
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": 0},
    ],
)
def test_numbers_that_give_no_frequencies_are_refused(server: Server, scaling: Any) -> None:
    response = attend(server, LLAMA, heads=4, rope={"scaling": scaling})
    assert assert_problem(response, 422)["pointer"].startswith("/layer/rope")


@pytest.mark.parametrize("name", ["c_attn", "c_proj"])
def test_gradients_of_a_layer_whose_layout_adds_biases(server: Server, name: str) -> None:
    """gpt2 always writes biases; the gradients are those of the tensors in the request."""
    state = drawn(
        c_attn__weight=(8, 24), c_attn__bias=(24,), c_proj__weight=(8, 8), c_proj__bias=(8,)
    )
    del state[f"{name}.bias"]
    response = attend(server, state, "gradients", heads=2)
    assert response.status_code == 200, response.text
    assert response.json()["gradients"].keys() == {"x", *state}


def test_matrix_of_mha_is_square(server: Server) -> None:
    state = drawn(in_proj_weight=(24, 6))
    assert "expected (3 E, E)" in assert_problem(attend(server, state, heads=2), 422)["detail"]


@pytest.mark.parametrize("target", ["mha", "gpt2", "nanogpt", "vit", "phi3", "neox", "falcon"])
def test_values_of_another_width_have_no_place_in_one_matrix(server: Server, target: str) -> None:
    state = drawn(W_query=(8, 8), W_key=(8, 8), W_value=(8, 16))
    body = {"from": "v1", "to": target, "heads": 2, "tensors": encoded(state)}
    problem = assert_problem(server.http.post("/v1/convert", json=body), 422)
    assert "16" in problem["detail"]
    assert problem["pointer"] == "/tensors"


def test_query_inputs_beside_a_layer_have_gradients(server: Server) -> None:
    """The layer has no sinks of its own."""
    state = drawn(W_query=(8, 8), W_key=(8, 8), W_value=(8, 8))
    body = {
        "inputs": encoded(drawn(x=(1, 3, 8), grad_output=(1, 3, 8)))
        | {"sinks": [0.5, 1.0], "alibi_slopes": [0.5, 0.25]},
        "layer": {"layout": "v1", "heads": 2, "tensors": encoded(state)},
    }
    response = server.http.post("/v1/gradients/softmax", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["gradients"].keys() == {"x", "sinks", "alibi_slopes", *state}


def test_output_of_key_heads_does_not_fit_the_output_projection(server: Server) -> None:
    body = {
        "inputs": encoded({"x": drawn(x=(1, 3, 8))["x"]}),
        "layer": {"layout": "llama", "heads": 4, "tensors": encoded(LLAMA)},
    }
    problem = assert_problem(server.http.post("/v1/attention/mean", json=body), 422)
    assert "does not fit the output projection" in problem["detail"]


@pytest.mark.parametrize(
    ("rope", "pointer"),
    [
        ({"base": 1}, "/layer/rope/base"),
        ({"dims": 3}, "/layer/rope/dims"),
        ({"frequencies": []}, "/layer/rope/frequencies"),
        ({"frequencies": [1.0, "x"]}, "/layer/rope/frequencies/1"),
        ({"frequencies": [1.0] * 9}, "/layer/rope/frequencies"),
        ({"frequencies": [1.0], "base": 100.0}, "/layer/rope/base"),
        ({"frequencies": [1.0], "dims": 4}, "/layer/rope/dims"),
        (
            {"frequencies": [1.0], "scaling": {"rope_type": "linear", "factor": 2.0}},
            "/layer/rope/scaling",
        ),
        ({"amplitude": 0}, "/layer/rope/amplitude"),
        ({"scaling": {"rope_type": "linear"}}, "/layer/rope/scaling/factor"),
        ({"scaling": {"rope_type": "linear", "factor": 0}}, "/layer/rope/scaling/factor"),
        ({"nope": 1}, "/layer/rope/nope"),
    ],
)
def test_pointer_leads_into_the_fields_of_a_layer(server: Server, rope: Any, pointer: str) -> None:
    problem = assert_problem(attend(server, LLAMA, heads=4, rope=rope), 422)
    assert problem["pointer"] == pointer


def test_rotary_order_of_odd_heads_is_refused(server: Server) -> None:
    state = drawn(wq__weight=(3, 2), wk__weight=(3, 2), wv__weight=(3, 2))
    body = {"from": "meta", "to": "llama", "heads": 1, "tensors": encoded(state)}
    problem = assert_problem(server.http.post("/v1/convert", json=body), 422)
    assert problem["pointer"] == "/rope/dims"


def test_biases_of_any_layout_are_augmented_for_v1(server: Server) -> None:
    state = drawn(qkv__weight=(24, 8), qkv__bias=(24,))
    body = {"from": "vit", "to": "v1", "bias": "augment", "tensors": encoded(state)}
    response = server.http.post("/v1/convert", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["tensors"]["W_key"]["shape"] == [9, 8]
    check = response.json()["check"]
    assert check["largest_absolute_difference"] < 1e-12 * check["largest_absolute_output"]


def test_layer_of_a_named_layout_is_found_below_any_module(server: Server) -> None:
    state = {f"my.block.{name}": array for name, array in FALCON.items()}
    response = attend(server, state, layout="neox", heads=2)
    assert response.status_code == 200, response.text
    assert response.json()["layer"]["prefix"] == "my.block"


@pytest.mark.parametrize(
    ("layout", "weight"),
    [
        *(("nanogpt", "c_attn"), ("vit", "qkv"), ("phi3", "qkv_proj"), ("gpt2", "c_attn")),
        *(("neox", "query_key_value"), ("bloom", "query_key_value"), ("falcon", "query_key_value")),
    ],
)
def test_bias_of_a_fused_matrix_has_its_size(server: Server, layout: str, weight: str) -> None:
    rows = (8, 24) if layout == "gpt2" else (24, 8)
    state = drawn(**{f"{weight}__weight": rows, f"{weight}__bias": (17,)})
    response = attend(server, state, layout=layout, heads=2, kv_heads=2)
    assert f"{weight}.bias" in assert_problem(response, 422)["detail"]
    body = {"from": layout, "to": "v2", "heads": 2, "tensors": encoded(state)}
    assert_problem(server.http.post("/v1/convert", json=body), 422)
