"""Refusals of states: of another request, in parts, or where a variant has none."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from qkv.errors import InvalidContent
from qkv.jobs.plan import Plan
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.each import each
from support.engines import LIMITS
from support.state_requests import BOTH, CASES, Case, part, run, state_for, state_of, tokens

_THREE: Final = ("query", "key", "value")


def _changed(name: str, array: Any) -> Any:
    return lambda state: state | {name: array(state[name])}


def _without(*names: str) -> Any:
    return lambda state: {n: x for n, x in state.items() if n not in names}


@each("name", [*CASES])
@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (_without("state.sums"), "state.sums is missing from inputs"),
        (_without("state.version"), "state.version is missing from inputs"),
        (_without("state.tail_value"), "state.tail_value is missing from inputs"),
        (
            lambda s: {n: x for n, x in s.items() if not n.startswith("state.tail")},
            'state.version belongs to another form: got "exact", expected "compact"',
        ),
        (
            _changed("state.version", lambda x: x + 1),
            "belongs to another format: got 2, expected 1",
        ),
        (
            _changed("state.version", lambda x: x + (np.arange(x.shape[1]) == 1)),
            "belongs to another variant: got ",
        ),
        (_changed("state.tail_length", lambda x: x + 12), "tail_length is out of range: got 16"),
        (_changed("state.tail_length", lambda x: x - 5), "tail_length is out of range: got -1"),
        (
            _changed("state.tail_value", lambda x: x.astype("f4")),
            "state.tail_value has the wrong dtype",
        ),
        (_changed("state.sums", lambda x: x.astype("f2")), "state.sums"),
        (_changed("state.sums", lambda x: x[:, :1].copy()), "state.sums has"),
        (_changed("state.sums", lambda x: x[..., :1].copy()), "state.sums has "),
    ],
)
def test_state_that_is_not_whole_or_changed_is_refused_by_name(
    name: str, change: Any, detail: str
) -> None:
    case = CASES[name]
    with pytest.raises(InvalidContent) as caught:
        run(case, {**tokens(8, 5, case), **change(state_for(case))}, parameters={"chunk": 16})
    assert detail in caught.value.detail


@each("name", [*CASES])
def test_state_of_another_chunk_or_dtype_is_refused_by_name(name: str) -> None:
    """Also a compact one, whose sums are float64 for every dtype."""
    case, compact = CASES[name], {"state": "compact"}
    wide, narrow = tokens(8, 5, case), tokens(8, 5, case, dtype="float32")
    for inputs, state, parameters, detail in (
        (wide, state_for(case), {"chunk": 17}, "has the wrong number of tokens: got 15, expected"),
        (wide, state_for(case, **compact), {"chunk": 17}, "another chunk: got 16, expected 17"),
        (narrow, state_for(case), {"chunk": 16}, "has the wrong dtype: got float64, expected"),
        (
            narrow,
            state_for(case, **compact),
            {"chunk": 16},
            'another dtype: got "float64", expected "float32" as the request has',
        ),
    ):
        with pytest.raises(InvalidContent) as caught:
            run(case, {**inputs, **state}, parameters=parameters)
        assert detail in caught.value.detail


@pytest.mark.parametrize(
    ("variant", "parameters", "detail"),
    [
        ("linear", {"normalize": False}, "another normalize: got true, expected false"),
        ("taylor", {}, 'another variant: got "linear", expected "taylor" as the request has'),
    ],
)
def test_state_of_another_variant_or_parameter_is_refused_by_name(
    variant: str, parameters: dict[str, Any], detail: str
) -> None:
    """With the same number of parameters and tensors of the same shapes."""
    case = CASES["linear True"]
    if variant != case.variant:
        parameters, state = {**parameters, "chunk": 16}, state_for(case)
        state["state.version"] = state["state.version"][:, :7].copy()
        state["state.sums"] = np.pad(state["state.sums"], ((0, 0), (0, 0), (0, 1), (0, 0)))
    else:
        state = state_for(case)
    with pytest.raises(InvalidContent) as caught:
        run(
            Case(variant, {"causal": True}, case.names), {**tokens(8, 5, case), **state},
            parameters={"chunk": 16, **parameters},
        )  # fmt: skip
    assert detail in caught.value.detail


@pytest.mark.parametrize(
    ("variant", "parameters", "detail"),
    [
        ("linear", {}, "causal does not fit a state: got false, expected true"),
        ("efficient", {}, "causal does not fit a state: got false, expected true"),
        ("taylor", {"causal": True, "query_offset": 3}, "query_offset does not fit a state: got 3"),
        ("linear", {"causal": True, "query_offset": "end"}, 'got "end", expected 0'),
        ("mean", {"causal": False}, "causal does not fit a state: got false, expected true"),
        ("mean", {"method": "loop"}, 'method does not fit a state: got "loop", expected "cumsum"'),
        ("linformer", {}, "linformer has no output 'state'"),
        ("softmax", {"causal": True}, "softmax has no output 'state'"),
    ],
)
def test_state_is_refused_by_name_where_later_tokens_change_a_row(
    variant: str, parameters: dict[str, Any], detail: str
) -> None:
    inputs = tokens(8, 5, Case(variant, {}, ("value",) if variant == "mean" else _THREE))
    with pytest.raises(InvalidContent) as caught:
        run(Case(variant, parameters, ()), inputs, outputs=BOTH)
    assert detail in caught.value.detail


def test_state_needs_as_many_queries_as_keys() -> None:
    inputs = tokens(8, 5, CASES["linear True"])
    inputs["query"] = inputs["query"][:, :, :2].copy()
    with pytest.raises(InvalidContent, match="query does not fit a state: got 2 queries beside 5"):
        run(CASES["linear True"], inputs, outputs=BOTH)


@each("name", ["gated linear", "linear True", "efficient True", "taylor True"])
def test_layer_with_rotary_positions_has_no_state(name: str) -> None:
    case = CASES[name]
    random = np.random.default_rng(0)
    layer = {"heads": 2, "layout": "v2"}
    tensors = {f"W_{role}.weight": random.normal(size=(8, 6)) for role in _THREE}
    x = RawTensor.from_numpy(random.normal(size=(1, 5, 6)))
    fields: dict[str, Any] = {"parameters": dict(case.parameters), "outputs": BOTH}
    weights = {n: RawTensor.from_numpy(w) for n, w in tensors.items()}

    def plan(rope: dict[str, Any]) -> Plan:
        message = Message({**fields, "layer": {**layer, **rope}}, {"x": x}, weights)
        return Plan.from_message(case.variant, message, LIMITS)

    assert plan({}).has_state
    with pytest.raises(InvalidContent, match="rope does not fit a state: got a layer with pos"):
        plan({"rope": {}})


@each("name", [*CASES])
def test_part_of_a_state_is_not_returned(name: str) -> None:
    case = CASES[name]
    inputs = tokens(8, 5, case)
    with pytest.raises(InvalidContent, match=r"outputs lacks state\.[a-z_]+, without which"):
        run(case, inputs, outputs=["state.sums"])
    with pytest.raises(InvalidContent, match=f"{case.variant} has no output 'states': expected ou"):
        run(case, inputs, outputs=["states"])


@each("name", [*CASES])
def test_gradients_take_no_tail_and_a_gradient_that_fits(name: str) -> None:
    case, fields = CASES[name], {"parameters": {"chunk": 16}}
    inputs = tokens(8, 5, case) | {"grad_output": np.ones((1, 2, 5, 3))}
    with pytest.raises(InvalidContent, match=r"state\.tail_length is not allowed: gradients take"):
        run(case, {**inputs, **state_for(case)}, "gradients", **fields)
    with pytest.raises(InvalidContent, match=r"grad_state\.sums has the wrong shape: got \[1, 2\]"):
        run(case, {**inputs, "grad_state.sums": np.ones((1, 2))}, "gradients", **fields)


def test_gradients_of_sums_need_a_causal_request() -> None:
    inputs = tokens(8, 5, CASES["linear True"]) | {"grad_output": np.ones((1, 2, 5, 3))}
    inputs["grad_state.sums"] = np.ones((1, 2, 4, 4))
    with pytest.raises(InvalidContent, match="causal does not fit a state: got false"):
        run(Case("linear", {}, ()), inputs, "gradients")


@each("name", [*CASES])
def test_nothing_but_output_and_state_is_returned_of_no_tokens(name: str) -> None:
    case = CASES[name]
    fields: dict[str, Any] = {"parameters": {"chunk": 16}}
    inputs = tokens(1, 20, case)
    state, none = state_of(run(case, inputs, outputs=BOTH, **fields)), part(inputs, 0, 0)
    for more in (["weights"], ["output", "weights"], None):
        with pytest.raises(InvalidContent, match=r"is empty: got [LS]=0, expected 1 or more for"):
            run(case, {**none, **state}, outputs=more, **fields)
    with pytest.raises(InvalidContent, match=r"is empty: got [LS]=0, expected 1 or more$"):
        run(case, none, outputs=BOTH, **fields)
    gradients = {**none, "state.sums": state["state.sums"], "grad_output": none["value"]}
    with pytest.raises(InvalidContent, match="expected 1 or more for gradients"):
        run(case, gradients, "gradients", **fields)
    empty = {"state.sums": state["state.sums"][:, :, :0]}
    with pytest.raises(InvalidContent, match=r"state\.sums (is empty: got|has) [DF1]=0"):
        run(case, {**inputs, **empty}, outputs=BOTH, **fields)
