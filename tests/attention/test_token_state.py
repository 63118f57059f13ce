"""Requests with a state: the bits of the output do not depend on how a sequence is cut."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.attention import catalogue
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.executor import execute
from qkv.errors import InvalidContent
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.tensors import DTYPES, FLOATING, RawTensor
from qkv.wire.message import Message
from support.drawn_requests import GATES
from support.each import each
from support.engines import LIMITS
from support.examples import examples
from support.pretended_device import PretendedDevice, counts
from support.seen_weights import largest_weights
from support.state_requests import (
    BOTH,
    CASES,
    Arrays,
    Case,
    as_arguments,
    as_tensor,
    assert_same_bits,
    in_parts,
    part,
    run,
    state_of,
    tokens,
)
from support.variant_bounds import bounds_of, is_near

EPS: Final = float(np.finfo(np.float64).eps)
EPS_32: Final = float(np.finfo(np.float32).eps)
_THREE: Final = ("query", "key", "value")
D: Final = 4  # of the keys of `tokens`


def near(S: int) -> float:
    """Returns the largest difference of two sums over S tokens, as a part of the largest one.

    A token is added with the roundings of D products and of 4 others. No later one makes an error
    larger: keys have norm 1, and decays and betas are at most 1. EPS is a rounding of each side.
    """
    return S * (D + 4) * EPS


def assert_right(case: Case, inputs: Arrays, parameters: dict[str, Any], *outputs: Any) -> None:
    """Asserts that outputs are those of the reference within the roundings of the formula."""
    arguments, every = as_arguments(case, inputs), {**case.parameters, **parameters}
    truth = catalogue.find(case.variant).reference(**arguments, **every)
    bound = bounds_of(case.variant, arguments, every, truth)["output"]
    for found in outputs:
        assert is_near(as_tensor(found), truth.output, bound)


def test_every_variant_with_a_state_is_tested() -> None:
    with_state = {name for name, variant in catalogue.variants().items() if variant.state}
    assert {case.variant for case in CASES.values()} == with_state


@pytest.mark.slow
@examples(400)
@given(data=st.data())
def test_output_and_state_have_the_same_bits_however_the_sequence_is_cut(
    data: st.DataObject,
) -> None:
    """Every dtype and number of heads; numbers that grow late; gates wider than the rest."""
    draw = data.draw
    case, dtype = draw(st.sampled_from([*CASES.values()])), draw(st.sampled_from(FLOATING))
    G = draw(st.integers(1, 2))
    V = G * draw(st.integers(1, 2))
    heads = (V * draw(st.integers(1, 2)), G, V)
    S, chunk = draw(st.integers(1, 200)), draw(st.sampled_from((2, 16, 33, 64)))
    inputs = tokens(
        draw(st.integers(0, 2**31)), S, case, B=draw(st.integers(1, 2)), heads=heads,
        D=draw(st.sampled_from((1, 3, 16))), E=draw(st.sampled_from((1, 5, 16))),
        channels=draw(st.booleans()), dtype=dtype,
    )  # fmt: skip
    # keys of `linear` of size 8,000 would be features of 0
    grown, most = draw(st.sampled_from([(["value"], 9.0), (case.names, 4.0)]))
    rise = np.exp(draw(st.sampled_from((0.0, most))) * np.arange(S) / S)[:, None]
    for name in ["value"] if case.variant == "gated" else grown:
        inputs[name] = (inputs[name].astype(np.float64) * rise).astype(DTYPES[dtype])
    parameters: dict[str, Any] = {"chunk": chunk}
    if case.variant == "gated":
        gates = GATES[case.parameters["rule"]]
        if dtype != "float64" and draw(st.booleans()):
            inputs |= {n: inputs[n].astype(np.float32) for n in gates}
        parameters["normalize_qk"] = draw(st.booleans())
    whole = run(case, inputs, parameters=parameters, outputs=BOTH)
    cuts = sorted({0, S, *draw(st.lists(st.integers(1, S), max_size=6))})
    assert_same_bits(in_parts(case, inputs, cuts, parameters=parameters), whole)
    # the path without a state is the other side of the same bound
    plain = run(case, inputs, parameters=parameters, outputs=["output"])["output"]
    assert_right(case, inputs, parameters, plain, whole["output"])


@each("name", [*CASES])
@each("dtype", FLOATING)
def test_decoding_token_by_token_has_the_bits_of_the_whole(name: str, dtype: str) -> None:
    """Chunks end after 64 and 128 tokens; the tail's tensors always have 63 rows."""
    case = CASES[name]
    inputs = tokens(0, 140, case, dtype=dtype)
    whole = run(case, inputs, outputs=BOTH)
    assert_same_bits(in_parts(case, inputs, [*range(141)]), whole)
    assert whole["state.tail_value"].shape == (1, 2, 63, 3)
    assert whole["state.tail_length"].tolist() == [140 - 128]
    assert not whole["state.tail_value"][:, :, 12:].any()
    assert whole["state.sums"].dtype == np.float64


@each("name", [*CASES])
def test_numbers_that_rise_far_above_the_earlier_ones_change_no_bit(name: str) -> None:
    """Keys of a later token exceed the earlier ones by 1e4 and more, and fall again."""
    case = CASES[name]
    inputs = tokens(1, 60, case)
    for tensor in {"key", "value"} & {*case.names} if case.variant != "gated" else {"value"}:
        inputs[tensor][:, :, 20:30] *= 1e4
        inputs[tensor][:, :, 40:50] *= 1e8
    if case.variant == "linear":
        inputs["key"] = np.abs(inputs["key"])
    parameters = {"chunk": 16}
    whole = run(case, inputs, parameters=parameters, outputs=BOTH)
    cuts = [0, 3, 19, 20, 21, 29, 40, 45, 60]
    assert_same_bits(in_parts(case, inputs, cuts, parameters=parameters), whole)
    assert_right(case, inputs, parameters, whole["output"])


@each("name", [*CASES])
def test_sequences_of_a_batch_have_lengths_of_their_own(name: str) -> None:
    """Each one has the bits of its own tokens alone; what is behind them is zero, or NaN."""
    case, parameters = CASES[name], {"chunk": 16}
    inputs = tokens(1, 60, case, B=3)
    state: Arrays = {}
    taken = np.zeros(3, np.int64)
    parts: list[list[Any]] = [[], [], []]
    for lengths in ([20, 0, 3], [0, 0, 1], [5, 40, 20], [11, 1, 0]):
        longest = max(*lengths, 1)
        new = {n: np.full((3, 2, longest, *x.shape[3:]), np.nan) for n, x in inputs.items()}
        for b, length in enumerate(lengths):
            for n, x in inputs.items():
                new[n][b, :, :length] = x[b, :, taken[b] : taken[b] + length]
        found = run(
            case, {**new, **state, "key_lengths": np.array(lengths)}, parameters=parameters,
            outputs=BOTH,
        )  # fmt: skip
        for b, length in enumerate(lengths):
            parts[b].append(found["output"][b, :, :length])
            assert not found["output"][b, :, length:].any()
        if not any(lengths):
            assert_same_bits(state_of(found), state)
        state, taken = state_of(found), taken + lengths
    for b, count in enumerate(taken):
        padded = {n: np.zeros_like(x) for n, x in inputs.items()}  # the bits are those of 3 items
        for n, x in inputs.items():
            padded[n][b, :, :count] = x[b, :, :count]
        alone = run(case, part(padded, 0, int(count)), parameters=parameters, outputs=BOTH)
        assert np.concatenate(parts[b], 1).tobytes() == alone["output"][b].tobytes()
        for n, x in state.items():
            assert x[b].tobytes() == alone[n][b].tobytes(), n


@each("name", [*CASES])
@each("form", ["exact", "compact"])
def test_no_new_token_leaves_the_state_as_it_was(name: str, form: str) -> None:
    case = CASES[name]
    inputs = tokens(1, 20, case, B=2)
    fields: dict[str, Any] = {"parameters": {"chunk": 16, "state": form}, "outputs": BOTH}
    state = state_of(run(case, inputs, **fields))
    found = run(case, {**inputs, **state, "key_lengths": np.zeros(2, np.int64)}, **fields)
    assert not found["output"].any()
    assert_same_bits(state_of(found), state)


@each("name", [*CASES])
@each("form", ["exact", "compact"])
@each("same_tail", [True, False])
def test_tokens_may_be_none(name: str, form: str, same_tail: bool) -> None:
    """Of an axis of size 0, as of lengths of 0; also where the tails have several lengths."""
    case, parameters = CASES[name], {"chunk": 16, "state": form}
    inputs = tokens(1, 20, case, B=2)
    lengths = {"key_lengths": np.array([20, 20 if same_tail else 7])}
    state = state_of(run(case, {**inputs, **lengths}, parameters=parameters, outputs=BOTH))
    found = run(case, {**part(inputs, 0, 0), **state}, parameters=parameters, outputs=BOTH)
    assert found["output"].shape == (2, 2, 0, 3)
    assert_same_bits(state_of(found), state)


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


@each("name", [*CASES])
@each("sums", ["float64", "float32"])
def test_compact_state_continues_within_the_roundings(name: str, sums: str) -> None:
    """Also if its sums are float32."""
    case = CASES[name]
    inputs = tokens(2, 150, case, channels=True)
    parameters = {"state": "compact"}
    whole = run(case, inputs, parameters=parameters, outputs=BOTH)
    assert not any(n.startswith("state.tail") for n in whole)
    first = run(case, part(inputs, 0, 100), parameters=parameters, outputs=BOTH)
    state = {**state_of(first), "state.sums": first["state.sums"].astype(sums)}
    rest = run(case, {**part(inputs, 100, 150), **state}, parameters=parameters, outputs=BOTH)
    # a row reads D of the sums, after their rounding to float32
    close = near(150) + (0 if sums == "float64" else (D + 1) * EPS_32)
    size = max(1.0, float(np.abs(whole["state.sums"]).max()))
    np.testing.assert_allclose(rest["output"], whole["output"][:, :, 100:], rtol=close, atol=close)
    np.testing.assert_allclose(rest["state.sums"], whole["state.sums"], rtol=0, atol=close * size)
    # an exact state continues as a compact one
    exact = state_of(run(case, part(inputs, 0, 100), outputs=BOTH))
    mixed = run(case, {**part(inputs, 100, 150), **exact}, parameters=parameters, outputs=BOTH)
    close = near(150) * size
    np.testing.assert_allclose(mixed["state.sums"], whole["state.sums"], rtol=0, atol=close)


def sums_from_elsewhere(case: Case, inputs: Arrays) -> Any:
    """Returns sums of the features of keys and of values and ones, as a textbook writes them."""
    value = inputs["value"]
    key: Any = inputs.get("key", value)
    ones = np.ones_like(value[..., :1])
    features: Any = {
        "gated": key,
        "linear": np.where(key > 0, key + 1, np.exp(np.minimum(key, 0))),
        "efficient": np.exp(key),
        "taylor": np.concatenate([ones, key], -1),  # keys have norm 1
        "mean": ones,
    }[case.variant]
    written = value if case.variant == "gated" else np.concatenate([value, ones], -1)
    return features.swapaxes(-1, -2) @ written


@each("name", [name for name in CASES if "delta" not in name and "gated gated" not in name])
def test_sums_may_come_alone_and_from_elsewhere(name: str) -> None:
    case = CASES[name]
    inputs = tokens(2, 90, case)
    whole = run(case, inputs, outputs=BOTH)
    alone = {"state.sums": sums_from_elsewhere(case, part(inputs, 0, 50))}
    rest = run(case, {**part(inputs, 50, 90), **alone}, outputs=["output"])
    close = near(90)
    np.testing.assert_allclose(rest["output"], whole["output"][:, :, 50:], rtol=close, atol=close)


@each("name", [*CASES])
@each("heads", [(2, 2, 2), (4, 2, 1), (2, 2, 4)])
def test_weights_are_those_of_the_new_tokens(name: str, heads: tuple[int, int, int]) -> None:
    """In every form, also behind a tail. What they leave of a row is what the state gives."""
    case, cut, parameters = CASES[name], 41, {"chunk": 16}
    if case.variant != "gated" and heads[2] > heads[1]:
        heads = (4, 2, 2)
    inputs = tokens(3, 90, case, heads=heads, B=2)
    state = state_of(run(case, part(inputs, 0, cut), parameters=parameters, outputs=BOTH))
    rest = {**part(inputs, cut, 90), **state}
    found = run(case, rest, parameters=parameters, outputs=["output", "weights"])["weights"]
    whole = run(case, inputs, parameters=parameters, outputs=["weights"])["weights"]
    close = near(90)
    np.testing.assert_allclose(found, whole[:, :, cut:, cut:], rtol=close, atol=close)
    forms: dict[str, Any] = {
        "rows": ({"rows": [3, 40]}, lambda A: A[:, :, [3, 40]]),
        "pool": ({"pool": 1}, lambda A: A.sum(-1).mean(-1)[..., None, None]),
        "top_k": ({"top_k": 1}, lambda A: largest_weights(A, 1)),
    }
    for form, expected in forms.values():
        some = run(case, rest, parameters=parameters, weights=form, outputs=["weights"])
        np.testing.assert_allclose(some["weights"], expected(found), rtol=close, atol=close)


@each("name", [*CASES])
def test_weights_of_a_state_are_not_stochastic(name: str) -> None:
    case = CASES[name]
    variant = catalogue.find(case.variant)
    parameters = variant.parse(dict(case.parameters))
    kind = "signed" if case.variant == "gated" else "unnormalised"
    assert variant.weights_are(parameters, ["value", "state.sums"]) == kind


@each("name", [*CASES])
def test_reference_takes_a_state(name: str) -> None:
    """With a tail, and without one."""
    case, parameters = CASES[name], {"chunk": 16}
    inputs = tokens(4, 60, case, heads=(4, 2, 2))
    whole, close = run(case, inputs, "reference", parameters=parameters), near(60)
    for form in ("exact", "compact"):
        options = {**parameters, "state": form}
        first = run(case, part(inputs, 0, 39), parameters=options, outputs=BOTH)
        rest = {**part(inputs, 39, 60), **state_of(first)}
        truth, later = run(case, rest, "reference", parameters=options), whole["output"][:, :, 39:]
        np.testing.assert_allclose(truth["output"], later, rtol=close, atol=close)
        found = run(case, rest, parameters=options, outputs=["output", "weights"])
        np.testing.assert_allclose(found["weights"], truth["weights"], rtol=close, atol=close)


@each("name", [*CASES])
@each("channels", [False, True])
def test_gradients_are_chained_by_those_of_the_sums(name: str, channels: bool) -> None:
    case, cut = CASES[name], 41
    inputs = tokens(5, 90, case, channels=channels, heads=(4, 2, 2))
    heads = 2 if case.variant == "mean" else 4
    grad = np.random.default_rng(6).normal(size=(1, heads, 90, 3))
    whole = run(case, {**inputs, "grad_output": grad}, "gradients")
    compact: dict[str, Any] = {"parameters": {"state": "compact"}}
    first, second = part(inputs, 0, cut), part(inputs, cut, 90)
    state = state_of(run(case, first, outputs=BOTH, **compact))
    behind = run(
        case, {**second, **state, "grad_output": np.ascontiguousarray(grad[:, :, cut:])},
        "gradients", **compact,
    )  # fmt: skip
    assert {*behind} == {*inputs, "state.sums"}
    before = run(
        case,
        {
            **first,
            "grad_output": np.ascontiguousarray(grad[:, :, :cut]),
            "grad_state.sums": behind["state.sums"],
        },
        "gradients",
        **compact,
    )
    for tensor in inputs:
        joined = np.concatenate([before[tensor], behind[tensor]], 2)
        close = near(90) * max(1.0, np.abs(whole[tensor]).max())
        np.testing.assert_allclose(joined, whole[tensor], rtol=0, atol=close, err_msg=tensor)


def state_for(case: Case, **changes: Any) -> Arrays:
    """Returns the state of 20 tokens."""
    parameters = {"chunk": 16, **changes}
    return state_of(run(case, tokens(7, 20, case), parameters=parameters, outputs=BOTH))


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
def test_ranks_of_a_state_are_those_of_the_first_tensor(name: str) -> None:
    """Heads and batch are omitted as in the query; lengths are a list at any rank."""
    case = CASES[name]
    inputs = {n: x[0, 0] for n, x in tokens(9, 40, case, heads=(1, 1, 1)).items()}
    fields: dict[str, Any] = {"parameters": {"chunk": 16}, "outputs": BOTH}
    whole = run(case, inputs, **fields)
    first = run(case, {n: x[:21].copy() for n, x in inputs.items()}, **fields)
    assert first["state.sums"].ndim == 2
    assert first["state.tail_length"].tolist() == [5]
    rest = {n: x[21:].copy() for n, x in inputs.items()}
    found = run(case, {**rest, **state_of(first)}, **fields)
    output = np.concatenate([first["output"], found["output"]])
    assert output.tobytes() == whole["output"].tobytes()
    assert_same_bits(state_of(found), state_of(whole))


@each("name", [*CASES])
def test_padding_of_a_tail_changes_nothing(name: str) -> None:
    """Whatever a client writes behind the tail's length."""
    case = CASES[name]
    inputs, state = tokens(8, 5, case), state_for(case)
    fields: dict[str, Any] = {"parameters": {"chunk": 16}, "outputs": BOTH}
    dirty = {n: x.copy() for n, x in state.items()}
    for tensor, array in dirty.items():
        if tensor.startswith("state.tail_") and array.ndim > 1:
            array[:, :, 4:] = np.nan
    assert_same_bits(
        run(case, {**inputs, **dirty}, **fields), run(case, {**inputs, **state}, **fields)
    )


@each("name", [*CASES])
def test_state_of_attend_has_the_types_of_its_annotations(name: str) -> None:
    case = CASES[name]
    variant = catalogue.find(case.variant)
    arguments = as_arguments(case, tokens(8, 20, case, dtype="float32"))
    found = variant.attend(
        **arguments, **case.parameters, chunk=16, outputs=frozenset({"state"})
    ).state
    assert variant.state is not None
    assert isinstance(found, variant.state.kind)
    assert found.sums.dtype == torch.float64
    value = arguments[variant.inputs["value"].argument]
    assert torch.equal(found.tail_value[:, :, :4], value[:, :, 16:])


@each("name", [*CASES])
def test_jobs_with_a_state_are_stacked_on_a_device(name: str) -> None:
    """One call serves sequences of several clients, and waits for the device once."""
    case = CASES[name]
    fields: dict[str, Any] = {"parameters": {"chunk": 16}, "outputs": BOTH}
    states = [state_of(run(case, tokens(n, 9 + 10 * n, case), **fields)) for n in range(3)]
    fields["parameters"] |= case.parameters
    jobs = []
    for n, state in enumerate(states):
        arrays = {**tokens(10 + n, 7, case), **state}
        raw = {tensor: RawTensor.from_numpy(x) for tensor, x in arrays.items()}
        jobs.append(Job.new(Plan, case.variant, Message(fields, raw), LIMITS))
    assert len({job.batch_key for job in jobs}) == 1
    device = PretendedDevice()
    together = execute(jobs, device, stack=True)
    assert counts["sync"] == 1
    for job, found in zip(jobs, together, strict=True):
        (alone,) = execute([job], device, stack=True)
        assert found.call_size == 3
        for tensor, raw_output in alone.outputs.items():
            one, other = raw_output.numpy(), found.outputs[tensor].numpy()
            np.testing.assert_allclose(other, one, rtol=0, atol=1e2 * EPS, err_msg=tensor)


@each("name", [*CASES])
def test_jobs_of_no_tokens_are_stacked_on_a_device(name: str) -> None:
    """Also with tails of several lengths."""
    case = CASES[name]
    fields: dict[str, Any] = {"parameters": {"chunk": 16}, "outputs": BOTH}
    none = part(tokens(0, 1, case), 0, 0)
    states = [state_of(run(case, tokens(n, n, case), **fields)) for n in (9, 21)]
    fields["parameters"] |= case.parameters
    jobs = []
    for state in states:
        raw = {tensor: RawTensor.from_numpy(x) for tensor, x in {**none, **state}.items()}
        jobs.append(Job.new(Plan, case.variant, Message(fields, raw), LIMITS))
    results = execute(jobs, PretendedDevice(), stack=True)
    for state, result in zip(states, results, strict=True):
        found = {tensor: output.numpy() for tensor, output in result.outputs.items()}
        assert found["output"].shape == (1, 2, 0, 3)
        assert_same_bits(state_of(found), state)


@each("name", [*CASES])
def test_bits_do_not_depend_on_the_threads_that_a_large_job_may_take(name: str) -> None:
    """The whole sequence is large enough for several threads; its last part is not."""
    case = CASES[name]
    inputs = tokens(11, 1500, case, heads=(4, 4, 4), D=64, E=64, dtype="float32")
    fields: dict[str, Any] = {"parameters": dict(case.parameters), "outputs": BOTH}

    def execute_with(threads: int, arrays: Arrays) -> Arrays:
        raw = {tensor: RawTensor.from_numpy(x) for tensor, x in arrays.items()}
        job = Job.new(Plan, case.variant, Message(fields, raw), LIMITS)
        (result,) = execute([job], CpuDevice(), stack=False, threads=threads)
        return {tensor: x.numpy() for tensor, x in result.outputs.items()}

    whole = execute_with(2, inputs)
    first = execute_with(1, part(inputs, 0, 1490))
    rest = execute_with(2, {**part(inputs, 1490, 1500), **state_of(first)})
    joined = np.concatenate([first["output"], rest["output"]], 2)
    assert_same_bits({"output": joined, **state_of(rest)}, whole)
