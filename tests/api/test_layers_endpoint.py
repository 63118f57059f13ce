"""POST /v1/layers finds the attention layers of a model by names and shapes."""

from __future__ import annotations

from typing import Any, Final

import pytest

from qkv.api.endpoints.layers import MAX_BODY_BYTES
from qkv.jobs.layers import MAX_LIST_BYTES
from support.known_requests import assert_problem
from support.service import Server

PATH: Final = "/v1/layers"
GPT2: Final = {"c_attn.weight": [768, 2304], "c_attn.bias": [2304], "c_proj.weight": [768, 768]}
GROUPED: Final = {f"{n}_proj.weight": [o, 2048] for n, o in zip("qkvo", (2048, 512, 512, 2048))}  # noqa: B905
FUSED: Final = {"query_key_value.weight": [3072, 1024], "dense.weight": [1024, 1024]}
PHI: Final = {"qkv_proj.weight": [5120, 3072], "o_proj.weight": [3072, 3072]}


def listed(server: Server, **groups: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Returns the layers of tensors below prefixes, in which `_` stands for a dot."""
    shapes = {
        f"{prefix.replace('_', '.')}.{name}": shape
        for prefix, tensors in groups.items()
        for name, shape in tensors.items()
    }
    response = server.http.post(PATH, json={"shapes": shapes})
    assert response.status_code == 200, response.text
    layers: list[dict[str, Any]] = response.json()["layers"]
    return layers


def test_layers_of_a_model_have_layout_width_and_heads(server: Server) -> None:
    other = {"weight": [50257, 768]}
    first, second = listed(server, h_0_attn=GPT2, h_1_attn=GPT2, wte=other)
    assert (first["prefix"], second["prefix"]) == ("h.0.attn", "h.1.attn")
    assert first["shapes"] == GPT2
    (layout,) = first["layouts"]
    assert (layout["layout"], layout["width"], layout["rotary_order"]) == ("gpt2", 768, None)
    assert layout["alibi"] is False
    assert layout["heads"][0] == {"heads": 12, "kv_heads": 12, "width": 64}
    assert all(one["heads"] * one["width"] == 768 for one in layout["heads"])


@pytest.mark.parametrize(
    ("tensors", "layout", "heads"),
    [
        (GROUPED, "llama", (32, 8, 64)),
        (GROUPED | {"q_norm.weight": [128], "k_norm.weight": [128]}, "llama", (16, 4, 128)),
        (GROUPED | {"sinks": [8]}, "llama", (8, 2, 256)),
        (PHI, "phi3", (24, 8, 128)),
    ],
)
def test_grouped_heads_follow_from_the_widths(
    server: Server, tensors: dict[str, list[int]], layout: str, heads: tuple[int, int, int]
) -> None:
    (found,) = listed(server, model_attn=tensors)
    (one,) = found["layouts"]
    assert (one["layout"], tuple(one["heads"][0].values())) == (layout, heads)
    if "k_norm.weight" in tensors or "sinks" in tensors:
        assert len(one["heads"]) == 1


def test_ambiguous_layer_has_every_layout(server: Server) -> None:
    response = server.http.post(
        PATH, json={"shapes": {f"h.0.self_attention.{n}": s for n, s in FUSED.items()}}
    )
    (found,) = response.json()["layers"]
    assert [one["layout"] for one in found["layouts"]] == ["bloom", "falcon"]
    assert [one["alibi"] for one in found["layouts"]] == [True, "scaled"]
    assert found["layouts"][0]["heads"][0] == {"heads": 16, "kv_heads": 16, "width": 64}


@pytest.mark.parametrize(
    "shapes",
    [
        {"lm_head.weight": [8, 8]},
        {"a.q_proj.weight": [8, 8]},  # a key and a value are missing
        {f"a.{n}": [0, *shape[1:]] for n, shape in GROUPED.items()},
        {f"a.{n}": shape * 4 for n, shape in GROUPED.items()},
        {f"a.{n}": [2**28 - 1, 2**28 - 1, 2] for n in GROUPED},
    ],
)
def test_model_without_attention_has_no_layers(
    server: Server, shapes: dict[str, list[int]]
) -> None:
    response = server.http.post(PATH, json={"shapes": shapes})
    assert response.json()["layers"] == []


def test_sizes_of_any_size_are_read(server: Server) -> None:
    """Nothing of the size of a tensor is allocated."""
    size = 2**28 - 8
    (found,) = listed(server, a={f"{n}_proj.weight": [size, size] for n in "qkvo"})
    assert found["layouts"][0]["width"] == size
    shapes = {"a.query_key_value.weight": [3 * (2**24), 2**24]}
    assert server.http.post(PATH, json={"shapes": shapes}).status_code == 200


def test_response_names_the_limit_of_a_body(server: Server) -> None:
    response = server.http.post(PATH, json={"shapes": {"a": [1.0]}})
    assert response.json() == {"layers": [], "max_body_bytes": 256 * 2**20}


def test_body_with_too_many_or_long_names_is_rejected(server: Server) -> None:
    large = {"shapes": {"a" * MAX_BODY_BYTES: [1]}}
    assert_problem(server.http.post(PATH, json=large), 413)
    names = {"shapes": {str(i): [1] for i in range(65537)}}
    assert_problem(server.http.post(PATH, json=names), 422)
    assert_problem(server.http.post(PATH, json={"shapes": {"a" * 513: [1]}}), 422)


def test_too_many_layers_are_rejected(server: Server) -> None:
    shapes = {f"layers.{i}.qkv.weight": [12, 4] for i in range(4097)}
    problem = assert_problem(server.http.post(PATH, json={"shapes": shapes}), 422)
    assert "got 4097, expected at most 4096" in problem["detail"]
    assert problem["pointer"] == "/shapes"


@pytest.mark.slow
def test_list_of_too_many_bytes_is_rejected(server: Server) -> None:
    """Sizes with many divisors have many numbers of heads."""
    matrices = [f"{r}_proj" for r in "qkv"] + [f"w{r}" for r in "qkv"]
    matrices += [f"W_{role}" for role in ("query", "key", "value")]
    sizes = {f"{name}.weight": [5040, 5040] for name in matrices}
    sizes |= {"qkv.weight": [15120, 5040], "in_proj_weight": [15120, 5040]}
    shapes = {f"{i}.{name}": size for i in range(4000) for name, size in sizes.items()}
    problem = assert_problem(server.http.post(PATH, json={"shapes": shapes}), 413)
    assert problem["limit"] == MAX_LIST_BYTES
    assert "got more than 16777216 bytes for 4000 layers" in problem["detail"]


def test_name_that_fits_nested_layers_is_in_one_of_them(server: Server) -> None:
    shapes = {f"{'q_proj.' * n}{r}_proj.weight": [8, 8] for n in range(60) for r in "qkv"}
    found = server.http.post(PATH, json={"shapes": shapes}).json()["layers"]
    assert [len(layer["shapes"]) for layer in found] == [3] * 60


@pytest.mark.parametrize("rows", [8, 5])
def test_fused_matrix_without_rows_for_keys_is_no_layer(server: Server, rows: int) -> None:
    shapes = {"a.query_key_value.weight": [rows, 8], "a.dense.weight": [8, 8]}
    response = server.http.post(PATH, json={"shapes": shapes})
    assert response.json()["layers"] == []
