"""Requests with a state: the bits of the output do not depend on how a sequence is cut."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.attention import catalogue
from qkv.tensors import DTYPES, FLOATING
from support.drawn_requests import GATES
from support.each import each
from support.examples import examples
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
    state_for,
    state_of,
    tokens,
)
from support.variant_bounds import bounds_of, is_near

EPS: Final = float(np.finfo(np.float64).eps)
EPS_32: Final = float(np.finfo(np.float32).eps)
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
@examples(200)
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
    """Chunks end after 16 and 32 tokens; the tail's tensors always have 15 rows."""
    case, parameters = CASES[name], {"chunk": 16}
    inputs = tokens(0, 44, case, dtype=dtype)
    whole = run(case, inputs, parameters=parameters, outputs=BOTH)
    assert_same_bits(in_parts(case, inputs, [*range(45)], parameters=parameters), whole)
    assert whole["state.tail_value"].shape == (1, 2, 15, 3)
    assert whole["state.tail_length"].tolist() == [44 - 32]
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
@each("same_tail", [True, False])
def test_no_new_token_leaves_the_state_as_it_was(name: str, form: str, same_tail: bool) -> None:
    """With lengths of 0, or of an axis of size 0; also where the tails have several lengths."""
    case = CASES[name]
    inputs = tokens(1, 20, case, B=2)
    fields: dict[str, Any] = {"parameters": {"chunk": 16, "state": form}, "outputs": BOTH}
    lengths = {"key_lengths": np.array([20, 20 if same_tail else 7])}
    state = state_of(run(case, {**inputs, **lengths}, **fields))
    found = run(case, {**inputs, **state, "key_lengths": np.zeros(2, np.int64)}, **fields)
    assert not found["output"].any()
    assert_same_bits(state_of(found), state)
    found = run(case, {**part(inputs, 0, 0), **state}, **fields)
    assert found["output"].shape == (2, 2, 0, 3)
    assert_same_bits(state_of(found), state)


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
