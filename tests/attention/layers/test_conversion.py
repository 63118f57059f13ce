"""Conversion between layouts: no number changes, and misfits are rejected by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.examples import examples
from support.known_requests import DTYPES, EPS, FLOATING, Array, as_array, as_json, assert_problem
from support.service import Server

ROLES = ("query", "key", "value")
State = dict[str, Array]


def post(server: Server, state: dict[str, Any], source: str, target: str, **fields: Any) -> Any:
    encoding = fields.pop("form", "base64")
    tensors = {
        n: as_json(a, encoding) if isinstance(a, np.ndarray) else a for n, a in state.items()
    }
    document = {"from": source, "to": target, "tensors": tensors} | fields
    response = server.http.post("/v1/convert", json=document)
    if response.status_code != 200:
        assert_problem(response, response.status_code, document)
    return response


def converted(
    server: Server, state: State, source: str, target: str, **fields: Any
) -> tuple[State, dict[str, Any]]:
    response = post(server, state, source, target, **fields)
    assert response.status_code == 200, response.text
    reply = response.json()
    assert reply.keys() == {
        "from", "to", "prefix", "ignored", "rotary_order", "layer", "tensors", "check"
    }  # fmt: skip
    assert (reply["prefix"], reply["ignored"], reply["rotary_order"]) == ("", [], None)
    assert reply["layer"]["layout"] == target
    assert (reply["from"], reply["to"]) == (source, target)
    return {n: as_array(t) for n, t in reply["tensors"].items()}, reply["check"]


def v2(
    dtype: str = "float32", bias: tuple[str, ...] = (), width: int = 5, out: int = 6, seed: int = 0
) -> State:
    """Returns W_*.weight (out, width) and the named roles' biases; all numbers differ by role."""
    draw = np.random.default_rng(seed)
    state = {}
    for role in ROLES:
        state[f"W_{role}.weight"] = draw.normal(size=(out, width)).astype(DTYPES[dtype])
        if role in bias:
            state[f"W_{role}.bias"] = draw.normal(size=out).astype(DTYPES[dtype])
    return state


def v1(dtype: str = "float32", width: int = 5, out: int = 6) -> State:
    state = v2(dtype, width=width, out=out)
    return {n.removesuffix(".weight"): np.ascontiguousarray(w.T) for n, w in state.items()}


def same_bits(one: State, other: State) -> bool:
    seen = [[(n, a.dtype.name, a.shape, a.tobytes()) for n, a in s.items()] for s in (one, other)]
    return seen[0] == seen[1]


def is_tiny(check: dict[str, Any]) -> bool:
    """Returns True if the outputs of both layers differ by rounding only.

    Both layers run in float64. The bound is for some hundred terms and scores up to a few hundred.
    """
    bound: float = EPS["float64"] * 1e5 * check["largest_absolute_output"]
    return 0.0 <= float(check["largest_absolute_difference"]) <= bound


@pytest.mark.parametrize("dtype", FLOATING)
def test_round_trip_keeps_every_bit(server: Server, dtype: str) -> None:
    state = v2(dtype)
    there, check = converted(server, state, "v2", "v1")
    assert same_bits(there, {n.removesuffix(".weight"): w.T for n, w in state.items()})
    assert is_tiny(check)
    back, check = converted(server, there, "v1", "v2")
    assert same_bits(back, state)
    assert is_tiny(check)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_lists_have_the_requested_dtype(server: Server, dtype: str) -> None:
    state = v2(dtype)
    there, _ = converted(server, state, "v2", "v1", form="lists", dtype=dtype)
    assert [a.astype(DTYPES[dtype]).tobytes() for a in there.values()] == [
        w.T.tobytes() for w in state.values()
    ]
    exact, _ = converted(server, state, "v2", "v1", form="lists", dtype=dtype, encoding="base64")
    assert {a.dtype for a in exact.values()} == {DTYPES[dtype]}


def test_response_has_the_encoding_of_the_request(server: Server) -> None:
    for form, encoding, expected_type in (
        ("lists", None, list), ("base64", None, dict),
        ("lists", "base64", dict), ("base64", "lists", list),
    ):  # fmt: skip
        response = post(server, v2(), "v2", "v1", form=form, encoding=encoding).json()
        assert all(isinstance(t, expected_type) for t in response["tensors"].values())


@examples(60)
@given(st.data())
def test_conversion_keeps_any_bits(server: Server, data: st.DataObject) -> None:
    """Covers NaN, infinities and the smallest numbers."""
    dtype = DTYPES[data.draw(st.sampled_from(FLOATING))]
    width, out = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    size = width * out * dtype.itemsize
    state = {
        f"W_{role}": np.frombuffer(
            data.draw(st.binary(min_size=size, max_size=size)), dtype
        ).reshape(width, out)
        for role in ROLES
    }
    with np.errstate(invalid="ignore"):  # a signalling NaN warns
        assume(all(array.any() for array in state.values()))  # zeros are an error
    assert_bits_are_kept(server, state)


@pytest.mark.parametrize("dtype", FLOATING)
def test_conversion_keeps_signalling_nan(server: Server, dtype: str) -> None:
    size = DTYPES[dtype].itemsize
    quiet_bit = {8: 51, 4: 22, 2: 9 if dtype == "float16" else 6}[size]
    bits = int.from_bytes(np.array(np.inf, DTYPES[dtype]).tobytes(), "little") | 1
    assert not bits >> quiet_bit & 1
    odd = np.frombuffer(bits.to_bytes(size, "little") * 30, DTYPES[dtype]).reshape(5, 6)
    assert_bits_are_kept(server, v1(dtype) | {"W_value": odd})


def assert_bits_are_kept(server: Server, state: State) -> None:
    there, check = converted(server, state, "v1", "v2")
    assert same_bits(there, {f"{n}.weight": w.T for n, w in state.items()})
    for number in (check["largest_absolute_difference"], check["largest_absolute_output"]):
        assert isinstance(number, float) or number in ("NaN", "Infinity")
    assert same_bits(converted(server, there, "v2", "v1")[0], state)


@pytest.mark.parametrize(("key", "value"), [("W_key", "W_values"), ("W_keys", "W_value")])
def test_response_keeps_the_spelling_of_names(server: Server, key: str, value: str) -> None:
    names = ["W_query", key, value]
    state = dict(zip(names, v1().values(), strict=True))
    there, _ = converted(server, state, "v1", "v2")
    assert list(there) == [f"{n}.weight" for n in names]
    back, _ = converted(server, there, "v2", "v1")
    assert same_bits(back, state)
    biased = there | {f"{n}.bias": np.ones(6, np.float32) for n in names}
    augmented, _ = converted(server, biased, "v2", "v1", bias="augment")
    assert list(augmented) == names
    back, _ = converted(server, augmented, "v1", "v2", bias="augment")
    assert {n: a.tobytes() for n, a in back.items()} == {n: a.tobytes() for n, a in biased.items()}


@pytest.mark.parametrize("layout", ["v1", "v2"])
def test_layout_converts_to_itself(server: Server, layout: str) -> None:
    state = v1() if layout == "v1" else v2(bias=("query", "value"))
    same, check = converted(server, state, layout, layout)
    assert same_bits(same, state)
    assert is_tiny(check)


@pytest.mark.parametrize("biased", [("query",), ("key",), ("value",), ROLES])
def test_bias_is_rejected_for_v1(server: Server, biased: tuple[str, ...]) -> None:
    problem = post(server, v2(bias=biased), "v2", "v1").json()
    name = f"W_{biased[0]}.bias"
    assert name in problem["detail"]
    assert "augment" in problem["detail"]
    assert problem["pointer"] == f"/tensors/{name}"


def test_refusal_of_a_bias_says_what_was_got_and_what_to_do(server: Server) -> None:
    state: State = {"in_proj_weight": np.ones((12, 4)), "in_proj_bias": np.ones(12)}
    state["out_proj.weight"] = np.ones((4, 4))
    problem = post(server, state, "mha", "v1", heads=2).json()
    assert problem["detail"].startswith(
        "in_proj_bias has no place in v1: got query bias, expected a target that holds it: bert, "
    )
    assert 'Set "bias" to "augment" to store each bias as one more row' in problem["detail"]


@pytest.mark.parametrize(
    ("dtype", "biased"),
    [("float64", ()), ("float32", ROLES), ("float16", ("key",)), ("bfloat16", ROLES)],
)
def test_augmented_weights_hold_the_biases(
    server: Server, dtype: str, biased: tuple[str, ...]
) -> None:
    state = v2(dtype, biased)
    there, check = converted(server, state, "v2", "v1", bias="augment")
    assert is_tiny(check)
    for role in ROLES:
        weight = there[f"W_{role}"]
        assert weight[:-1].tobytes() == state[f"W_{role}.weight"].T.tobytes()
        bias = state.get(f"W_{role}.bias", np.zeros(6, DTYPES[dtype]))
        assert weight[-1].tobytes() == bias.tobytes()
    back, check = converted(server, there, "v1", "v2", bias="augment")
    assert is_tiny(check)
    for name, tensor in back.items():
        expected = state.get(name, np.zeros(6, DTYPES[dtype]))
        assert tensor.tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("heads", [None, 1, 3])
def test_augmented_layer_gives_the_output_of_the_biased_layer(
    server: Server, heads: int | None
) -> None:
    """The v1 layer takes x with a column of ones; /v1/attention runs both layers."""
    state = v2("float64", ROLES)
    there, _ = converted(server, state, "v2", "v1", bias="augment")
    x = np.random.default_rng(1).normal(size=(2, 7, 5))
    ones = np.concatenate([x, np.ones((2, 7, 1))], axis=-1)
    outputs = []
    for layout, tensors, embedding in (("v2", state, x), ("v1", there, ones)):
        document = {
            "inputs": {"x": as_json(embedding, "base64")},
            "layer": {
                "layout": layout,
                "heads": heads,
                "tensors": {n: as_json(a, "base64") for n, a in tensors.items()},
            },
            "parameters": {"causal": True},
        }
        response = server.http.post("/v1/attention/softmax", json=document)
        assert response.status_code == 200, response.text
        outputs.append({n: as_array(t) for n, t in response.json()["outputs"].items()})
    # a sum over M + 1 = 6, one over up to 6 and one over 7, of numbers of about 5 at most
    bound = EPS["float64"] * (6 + 6 + 7) * 5**4
    for name in ("output", "weights"):
        assert np.abs(outputs[0][name] - outputs[1][name]).max() <= bound


@pytest.mark.parametrize(
    ("heads", "key_out", "value_out"), [(1, 6, 4), (2, 6, 8), (3, 6, 6), (6, 2, 4), (2, 3, 7)]
)
def test_grouped_heads_and_different_widths(
    server: Server, heads: int, key_out: int, value_out: int
) -> None:
    """Key heads are grouped, values have another width, and embeddings have three widths."""
    draw = np.random.default_rng(heads)
    state = {
        "W_query": draw.normal(size=(4, 6)),
        "W_key": draw.normal(size=(3, key_out)),
        "W_value": draw.normal(size=(2, value_out)),
    }
    for bias in ("refuse", "augment"):
        there, check = converted(server, state, "v1", "v2", heads=heads, bias=bias)
        assert is_tiny(check)
        assert check["elements"] == 8 * heads * (value_out // (key_out // (6 // heads)))
        assert check["dtype"] == "float64"
        back, check = converted(server, there, "v2", "v1", heads=heads, bias=bias)
        assert same_bits(back, state)
        assert is_tiny(check)


def test_dtypes_may_differ_between_tensors(server: Server) -> None:
    """No number changes, also beside tensors of other dtypes."""
    state: State = {}
    for role, dtype in zip(ROLES, ("bfloat16", "float16", "float64"), strict=True):
        state |= {n: a for n, a in v2(dtype, (role,)).items() if role in n}
    back, check = converted(server, state, "v2", "v2")
    assert same_bits(back, state)
    assert is_tiny(check)
    there, _ = converted(server, {n: a for n, a in state.items() if "bias" not in n}, "v2", "v1")
    assert [a.dtype for a in there.values()] == [
        DTYPES[d] for d in ("bfloat16", "float16", "float64")
    ]
    folded, _ = converted(server, state, "v2", "v1", bias="augment")
    assert [a.dtype for a in folded.values()] == [a.dtype for a in there.values()]


@pytest.mark.parametrize(("weight", "bias"), [("bfloat16", "float16"), ("float32", "float64")])
def test_bias_of_another_dtype_is_folded_exactly_or_rejected(
    server: Server, weight: str, bias: str
) -> None:
    state = v2(weight) | {n: a for n, a in v2(bias, ("key",)).items() if n.endswith("bias")}
    response = post(server, state, "v2", "v1", bias="augment")
    if response.status_code == 200:
        row = as_array(response.json()["tensors"]["W_key"])[-1]
        assert np.array_equal(row.astype(float), state["W_key.bias"].astype(float))
    else:
        assert response.json()["pointer"].startswith("/tensors")
        assert "bias" in response.json()["detail"]


def base64_of(shape: list[int], dtype: str = "float32") -> Any:
    return as_json(np.ones(shape, DTYPES[dtype]), "base64")


WRONG: list[tuple[str, str, dict[str, Any], dict[str, Any], str, str]] = [
    # from, to, changed tensors (None: omitted), fields, a part of the detail, the pointer
    ("v1", "v2", {"W_key": None}, {}, "W_key or W_keys", "/tensors"),
    ("v2", "v1", {"W_value.weight": None}, {}, "W_value.weight", "/tensors"),
    ("v1", "v2", {"W_keys": base64_of([5, 6])}, {}, "'W_keys'", "/tensors"),
    ("v1", "v2", {"W_query.x": base64_of([5, 6])}, {}, "W_query.x", "/tensors/W_query.x"),
    ("v2", "v1", {"W_query": base64_of([5, 6])}, {}, "W_query does not", "/tensors/W_query"),
    ("v2", "v2", {"W_keys.bias": base64_of([6])}, {}, "'W_keys'", "/tensors"),
    ("v2", "v1", {"q_norm.a~/b": base64_of([6])}, {}, "a~/b", "/tensors/q_norm.a~0~1b"),
    ("v1", "v2", {"W_key": base64_of([6])}, {}, "[6]", "/tensors/W_key"),
    ("v1", "v2", {"W_key": base64_of([])}, {}, "[]", "/tensors/W_key"),
    ("v1", "v2", {"W_key": base64_of([5, 0])}, {}, "[5, 0]", "/tensors/W_key"),
    ("v1", "v2", {"W_key": base64_of([0, 6])}, {}, "[0, 6]", "/tensors/W_key"),
    ("v1", "v2", {"W_key": base64_of([5, 7])}, {}, "7 outputs", "/tensors"),
    ("v1", "v2", {"W_key": base64_of([5, 6], "int64")}, {}, "int64", "/tensors/W_key"),
    ("v1", "v2", {"W_key": base64_of([5, 6], "bool")}, {}, "bool", "/tensors/W_key"),
    ("v1", "v2", {"W_key": [[1e39] * 6]}, {}, "float32", "/tensors/W_key"),
    ("v2", "v2", {"W_key.bias": base64_of([5])}, {}, "got 5", "/tensors/W_key.bias"),
    ("v2", "v2", {"W_key.bias": base64_of([1, 6])}, {}, "[1, 6]", "/tensors/W_key.bias"),
    ("v2", "v1", {"W_key.bias": base64_of([6])}, {}, "W_key.bias", "/tensors/W_key.bias"),
    ("v1", "v2", {}, {"heads": 4}, "heads=4", "/heads"),
    ("v1", "v1", {}, {"bias": "augment"}, "v1 to v1", "/bias"),
    ("v2", "v2", {}, {"bias": "augment"}, "v2 to v2", "/bias"),
    ("v1", "v2", {"W_key": base64_of([1, 6])}, {"bias": "augment"}, "[1, 6]", "/tensors/W_key"),
]


@pytest.mark.parametrize(("source", "target", "changes", "fields", "detail", "pointer"), WRONG)
def test_invalid_conversion_is_rejected_by_name(
    server: Server,
    source: str,
    target: str,
    changes: dict[str, Any],
    fields: dict[str, Any],
    detail: str,
    pointer: str,
) -> None:
    state: dict[str, Any] = dict(v2() if source == "v2" else v1()) | changes
    state = {n: a for n, a in state.items() if a is not None}
    response = post(server, state, source, target, **fields)
    assert response.status_code == 422, response.text
    problem = response.json()
    assert detail in problem["detail"]
    assert problem["pointer"] == pointer
