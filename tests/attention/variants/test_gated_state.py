"""The state of `gated`: the bits of the output do not depend on how a sequence is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.attention import catalogue
from qkv.attention.common.gated_state import State
from qkv.attention.variants import gated
from qkv.engine import local
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.executor import execute
from qkv.errors import InvalidContent
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.tensors import DTYPES, FLOATING, RawTensor
from qkv.wire.message import Message
from support.batch_jobs import LIMITS
from support.each import each
from support.examples import examples
from support.pretended_device import PretendedDevice, counts
from support.variant_bounds import bounds_of, is_near

Arrays = dict[str, Any]
GATES: Final = {
    "linear": (), "gated": ("log_decay",), "delta": ("beta",), "gated_delta": ("log_decay", "beta"),
}  # fmt: skip
BOTH: Final = ["output", "state"]
EPS: Final = float(np.finfo(np.float64).eps)


def run(inputs: Arrays, group: str = "attend", **fields: Any) -> Arrays:
    """Runs a request in this process; returns its tensors."""
    tensors = {n: RawTensor.from_numpy(x) for n, x in inputs.items()}
    reply = getattr(local, group)("gated", Message(fields, tensors))
    return {n: x.numpy() for n, x in reply.tensors.items()}


def part(inputs: Arrays, start: int, stop: int) -> Arrays:
    """Returns some of the tokens."""
    return {n: np.ascontiguousarray(x[:, :, start:stop]) for n, x in inputs.items()}


def state_of(tensors: Arrays) -> Arrays:
    """Returns the tensors of the state in a response."""
    return {n: x for n, x in tensors.items() if n.startswith("state.")}


def in_parts(inputs: Arrays, cuts: Sequence[int], **fields: Any) -> Arrays:
    """Runs the tokens between the cuts, each with the state of those before; joins the outputs."""
    state: Arrays = {}
    outputs = []
    for start, stop in pairwise(cuts):
        found = run({**part(inputs, start, stop), **state}, outputs=BOTH, **fields)
        outputs.append(found["output"])
        state = state_of(found)
    return {"output": np.concatenate(outputs, 2), **state}


def as_tensor(array: Any) -> torch.Tensor:
    """Returns an array of any dtype as a tensor."""
    wide = torch.from_numpy(array.astype(np.float64))
    return wide.to(getattr(torch, array.dtype.name))


def as_arguments(inputs: Arrays) -> dict[str, Any]:
    """Returns the arguments of `attend`."""
    specs = catalogue.find("gated").inputs
    found = {specs[n].argument: as_tensor(x) for n, x in inputs.items()}
    if (decay := found.get("log_decay_BTSZ")) is not None and decay.ndim == 3:
        found["log_decay_BTSZ"] = decay[..., None]
    return found


def assert_same_bits(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def tokens(
    seed: int, S: int, rule: str, *, B: int = 1, heads: tuple[int, int, int] = (2, 2, 2),
    D: int = 4, E: int = 3, channels: bool = False, dtype: str = "float64",
) -> Arrays:  # fmt: skip
    """Returns random tokens: negative decays, betas below 1, keys of norm 1."""
    random, (J, G, V) = np.random.default_rng(seed), heads
    key = random.normal(size=(B, G, S, D))
    found = {
        "query": random.normal(size=(B, J, S, D)),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": random.normal(size=(B, V, S, E)),
        "log_decay": -np.abs(random.normal(size=(B, max(G, V), S, *([D] * channels)))),
        "beta": random.random((B, max(G, V), S)),
    }
    kept = ("query", "key", "value", *GATES[rule])
    return {n: found[n].astype(DTYPES[dtype]) for n in kept}


@examples(150)
@given(data=st.data())
def test_output_and_state_have_the_same_bits_however_the_sequence_is_cut(
    data: st.DataObject,
) -> None:
    """Every dtype, rule and number of heads; values that grow late; gates wider than the rest."""
    draw = data.draw
    rule, dtype = draw(st.sampled_from([*GATES])), draw(st.sampled_from(FLOATING))
    G = draw(st.integers(1, 2))
    V = G * draw(st.integers(1, 2))
    heads = (V * draw(st.integers(1, 2)), G, V)
    S, chunk = draw(st.integers(1, 200)), draw(st.sampled_from((2, 16, 33, 64)))
    inputs = tokens(
        draw(st.integers(0, 2**31)), S, rule, B=draw(st.integers(1, 2)), heads=heads,
        D=draw(st.sampled_from((1, 3, 16))), E=draw(st.sampled_from((1, 5, 16))),
        channels=draw(st.booleans()), dtype=dtype,
    )  # fmt: skip
    rise = np.exp(draw(st.sampled_from((0.0, 9.0))) * np.arange(S) / S)[:, None]
    inputs["value"] = (inputs["value"].astype(np.float64) * rise).astype(DTYPES[dtype])
    if dtype != "float64" and draw(st.booleans()):
        inputs |= {n: inputs[n].astype(np.float32) for n in GATES[rule]}
    parameters: dict[str, Any] = {"rule": rule, "chunk": chunk}
    parameters["normalize_qk"] = draw(st.booleans())
    whole = run(inputs, parameters=parameters, outputs=BOTH)
    cuts = sorted({0, S, *draw(st.lists(st.integers(1, S), max_size=6))})
    assert_same_bits(in_parts(inputs, cuts, parameters=parameters), whole)
    # the path without a state is the other side of the same bound
    plain = run(inputs, parameters=parameters, outputs=["output"])["output"]
    arguments = as_arguments(inputs)
    truth = gated.reference(**arguments, **parameters)
    bound = bounds_of("gated", arguments, parameters, truth)["output"]
    assert truth.output is not None
    for found in (plain, whole["output"]):
        assert is_near(as_tensor(found), truth.output, bound)


@each("dtype", FLOATING)
def test_decoding_token_by_token_has_the_bits_of_the_whole(dtype: str) -> None:
    """Chunks end after 64 and 128 tokens; the tail's tensors always have 63 rows."""
    inputs = tokens(0, 140, "gated_delta", dtype=dtype)
    parameters = {"rule": "gated_delta"}
    whole = run(inputs, parameters=parameters, outputs=BOTH)
    assert_same_bits(in_parts(inputs, [*range(141)], parameters=parameters), whole)
    assert whole["state.tail_key"].shape == (1, 2, 63, 4)
    assert whole["state.tail_length"].tolist() == [140 - 128]
    assert not whole["state.tail_key"][:, :, 12:].any()
    assert whole["state.sums"].dtype == np.float64


def test_sequences_of_a_batch_have_lengths_of_their_own() -> None:
    """Each one has the bits of its own tokens alone; what is behind them is zero, or NaN."""
    parameters = {"rule": "gated_delta", "chunk": 16}
    inputs = tokens(1, 60, "gated_delta", B=3)
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
            {**new, **state, "key_lengths": np.array(lengths)}, parameters=parameters, outputs=BOTH
        )
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
        alone = run(part(padded, 0, int(count)), parameters=parameters, outputs=BOTH)
        assert np.concatenate(parts[b], 1).tobytes() == alone["output"][b].tobytes()
        for n, x in state.items():
            assert x[b].tobytes() == alone[n][b].tobytes(), n


def test_no_new_token_leaves_the_state_as_it_was() -> None:
    parameters = {"rule": "gated_delta", "chunk": 16}
    inputs = tokens(1, 20, "gated_delta", B=2)
    for form in ("exact", "compact"):
        fields: dict[str, Any] = {"parameters": {**parameters, "state": form}, "outputs": BOTH}
        state = state_of(run(inputs, **fields))
        found = run({**inputs, **state, "key_lengths": np.zeros(2, np.int64)}, **fields)
        assert not found["output"].any()
        assert_same_bits(state_of(found), state)


@each("form", ["exact", "compact"])
@each("same_tail", [True, False])
def test_tokens_may_be_none(form: str, same_tail: bool) -> None:
    """Of an axis of size 0, as of lengths of 0; also where the tails have several lengths."""
    inputs = tokens(1, 20, "gated_delta", B=2)
    parameters = {"rule": "gated_delta", "chunk": 16, "state": form}
    lengths = {"key_lengths": np.array([20, 20 if same_tail else 7])}
    state = state_of(run({**inputs, **lengths}, parameters=parameters, outputs=BOTH))
    found = run({**part(inputs, 0, 0), **state}, parameters=parameters, outputs=BOTH)
    assert found["output"].shape == (2, 2, 0, 3)
    assert_same_bits(state_of(found), state)


def test_nothing_but_output_and_state_is_returned_of_no_tokens() -> None:
    inputs = tokens(1, 20, "linear")
    fields: dict[str, Any] = {"parameters": {"chunk": 16}}
    state, none = state_of(run(inputs, outputs=BOTH, **fields)), part(inputs, 0, 0)
    for outputs in (["weights"], ["output", "state_weights"], None):
        with pytest.raises(InvalidContent, match="query is empty: got S=0, expected 1 or more for"):
            run({**none, **state}, outputs=outputs, **fields)
    with pytest.raises(InvalidContent, match=r"query is empty: got S=0, expected 1 or more$"):
        run(none, outputs=BOTH, **fields)
    gradients = {**none, "state.sums": state["state.sums"], "grad_output": none["value"]}
    with pytest.raises(InvalidContent, match="expected 1 or more for gradients"):
        run(gradients, "gradients", **fields)
    with pytest.raises(InvalidContent, match=r"state\.sums is empty: got D=0, expected 1 or"):
        run({**inputs, "state.sums": np.ones((1, 2, 0, 3))}, outputs=BOTH, **fields)


@each("rule", [*GATES])
@each("sums", ["float64", "float32"])
def test_compact_state_continues_within_the_roundings(rule: str, sums: str) -> None:
    """The sums may come alone, from elsewhere, and in float32."""
    inputs = tokens(2, 150, rule, channels=True)
    parameters = {"rule": rule, "state": "compact"}
    whole = run(inputs, parameters=parameters, outputs=BOTH)
    assert [*state_of(whole)] == ["state.version", "state.sums"]
    first = run(part(inputs, 0, 100), parameters=parameters, outputs=BOTH)
    alone = {"state.sums": first["state.sums"].astype(sums)}
    for state in (state_of(first), alone) if sums == "float64" else (alone,):
        rest = run({**part(inputs, 100, 150), **state}, parameters=parameters, outputs=BOTH)
        close = 1e4 * EPS if sums == "float64" else 1e2 * float(np.finfo(np.float32).eps)
        np.testing.assert_allclose(rest["output"], whole["output"][:, :, 100:], atol=close)
        np.testing.assert_allclose(rest["state.sums"], whole["state.sums"], atol=close)
    # an exact state continues as a compact one, and the other way
    exact = run(part(inputs, 0, 100), parameters={"rule": rule}, outputs=BOTH)
    mixed = run({**part(inputs, 100, 150), **state_of(exact)}, parameters=parameters, outputs=BOTH)
    np.testing.assert_allclose(mixed["state.sums"], whole["state.sums"], atol=1e4 * EPS)


@each("rule", [*GATES])
@each("heads", [(2, 2, 2), (4, 2, 1), (2, 2, 4)])
def test_output_is_weights_at_value_and_state_weights_at_state(
    rule: str, heads: tuple[int, int, int]
) -> None:
    """Both are those of the new tokens, also behind a tail; the state is the compact one."""
    inputs, cut = tokens(3, 90, rule, heads=heads), 41
    parameters = {"rule": rule, "chunk": 16}
    exact = state_of(run(part(inputs, 0, cut), parameters=parameters, outputs=BOTH))
    compact = run(
        part(inputs, 0, cut), parameters={**parameters, "state": "compact"}, outputs=BOTH
    )["state.sums"]
    named = ["output", "weights", "state_weights"]
    found = run({**part(inputs, cut, 90), **exact}, parameters=parameters, outputs=named)
    H = max(heads)
    value = inputs["value"][:, :, cut:].repeat(H // heads[2], 1)
    state = compact.repeat(H // compact.shape[1], 1)
    output = found["weights"] @ value + found["state_weights"] @ state
    np.testing.assert_allclose(output, found["output"], atol=1e3 * EPS)
    rows = run(
        {**part(inputs, cut, 90), **exact}, parameters=parameters, weights={"rows": [3]},
        outputs=["weights"],
    )  # fmt: skip
    np.testing.assert_allclose(rows["weights"], found["weights"][:, :, 3:4], atol=1e2 * EPS)
    pooled = run(
        {**part(inputs, cut, 90), **exact}, parameters=parameters, weights={"pool": 1},
        outputs=["weights"],
    )  # fmt: skip
    mean = found["weights"].sum(-1).mean(-1)[..., None, None]
    np.testing.assert_allclose(pooled["weights"], mean, atol=1e2 * EPS)


@each("rule", [*GATES])
@each("normalize", [False, True])
def test_reference_takes_a_state(rule: str, normalize: bool) -> None:
    inputs = tokens(4, 60, rule)
    parameters = {"rule": rule, "chunk": 16, "normalize_qk": normalize}
    state = state_of(run(part(inputs, 0, 39), parameters=parameters, outputs=BOTH))
    truth = run({**part(inputs, 39, 60), **state}, "reference", parameters=parameters)
    whole = run(inputs, "reference", parameters=parameters)["output"]
    np.testing.assert_allclose(truth["output"], whole[:, :, 39:], atol=1e3 * EPS)


@each("rule", [*GATES])
@each("channels", [False, True])
def test_gradients_are_chained_by_those_of_the_sums(rule: str, channels: bool) -> None:
    inputs, cut = tokens(5, 90, rule, channels=channels), 41
    grad = np.random.default_rng(6).normal(size=(1, 2, 90, 3))
    parameters = {"rule": rule}
    whole = run({**inputs, "grad_output": grad}, "gradients", parameters=parameters)
    compact = {**parameters, "state": "compact"}
    first, second = part(inputs, 0, cut), part(inputs, cut, 90)
    sums = run(first, parameters=compact, outputs=BOTH)["state.sums"]
    behind = run(
        {**second, "state.sums": sums, "grad_output": np.ascontiguousarray(grad[:, :, cut:])},
        "gradients",
        parameters=compact,
    )
    before = run(
        {
            **first,
            "grad_output": np.ascontiguousarray(grad[:, :, :cut]),
            "grad_state.sums": behind["state.sums"],
        },
        "gradients",
        parameters=compact,
    )
    for name in inputs:
        joined = np.concatenate([before[name], behind[name]], 2)
        np.testing.assert_allclose(joined, whole[name], atol=1e4 * EPS, err_msg=name)


def state_for(**changes: Any) -> Arrays:
    """Returns the state of 20 tokens."""
    parameters = {"rule": "gated_delta", "chunk": 16, **changes}
    inputs = tokens(7, 20, str(parameters["rule"]))
    return state_of(run(inputs, parameters=parameters, outputs=BOTH))


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"scale": 2.0}, "state.version belongs to another scale: got null, expected 2.0"),
        ({"normalize_qk": True}, "belongs to another normalize_qk: got false, expected true"),
        (
            {"chunk": 17},
            "state.tail_key has the wrong number of tokens: got 15, expected chunk - 1",
        ),
        ({"rule": "delta"}, "state.tail_log_decay is not part of this state"),
    ],
)
def test_state_of_other_parameters_is_refused_by_name(changes: dict[str, Any], detail: str) -> None:
    parameters = {"rule": "gated_delta", "chunk": 16, **changes}
    inputs = tokens(8, 5, str(parameters["rule"]))
    with pytest.raises(InvalidContent) as caught:
        run({**inputs, **state_for()}, parameters=parameters)
    assert detail in caught.value.detail


def test_compact_state_of_another_rule_or_chunk_is_refused_by_name() -> None:
    state = state_for(state="compact")
    for changes, detail in (
        ({"rule": "delta"}, 'belongs to another rule: got "gated_delta", expected "delta" as'),
        ({"chunk": 17}, "belongs to another chunk: got 16, expected 17"),
    ):
        parameters = {"rule": "gated_delta", "chunk": 16, **changes}
        with pytest.raises(InvalidContent) as caught:
            run({**tokens(8, 5, str(parameters["rule"])), **state}, parameters=parameters)
        assert detail in caught.value.detail


def _changed(name: str, array: Any) -> Any:
    return lambda state: state | {name: array(state[name])}


def _without(*names: str) -> Any:
    return lambda state: {n: x for n, x in state.items() if n not in names}


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (_without("state.sums"), "state.sums is missing from inputs"),
        (_without("state.version"), "state.version is missing from inputs"),
        (_without("state.tail_beta"), "state.tail_beta is missing from inputs"),
        (
            lambda state: {n: state[n] for n in ("state.version", "state.sums")},
            'state.version belongs to another form: got "exact", expected "compact"',
        ),
        (
            _changed("state.version", lambda x: x + 1),
            "belongs to another format: got 2, expected 1",
        ),
        (
            _changed("state.version", lambda x: x + (np.arange(8) == 1)),
            "belongs to another variant: got ",
        ),
        (_changed("state.tail_length", lambda x: x + 12), "tail_length is out of range: got 16"),
        (_changed("state.tail_length", lambda x: x - 5), "tail_length is out of range: got -1"),
        (
            _changed("state.tail_key", lambda x: x.astype("f4")),
            "state.tail_key has the wrong dtype",
        ),
        (_changed("state.tail_beta", lambda x: x.astype("f4")), "tail_beta has the wrong dtype"),
        (_changed("state.sums", lambda x: x.astype("f2")), "state.sums"),
        (_changed("state.sums", lambda x: x[:, :1].copy()), "state.sums has"),
        (_changed("state.sums", lambda x: x[..., :1].copy()), "state.sums has E=1"),
    ],
)
def test_state_that_is_not_whole_or_changed_is_refused_by_name(change: Any, detail: str) -> None:
    inputs = tokens(8, 5, "gated_delta")
    with pytest.raises(InvalidContent) as caught:
        run({**inputs, **change(state_for())}, parameters={"rule": "gated_delta", "chunk": 16})
    assert detail in caught.value.detail


def test_state_of_another_dtype_is_refused_by_name() -> None:
    """Also a compact one, whose sums are float64 for every dtype."""
    narrow = tokens(8, 5, "gated_delta", dtype="float32")
    fields: dict[str, Any] = {"parameters": {"rule": "gated_delta", "chunk": 16}}
    with pytest.raises(InvalidContent, match=r"state\.tail_key has the wrong dtype: got floa"):
        run({**narrow, **state_for()}, **fields)
    with pytest.raises(InvalidContent, match=r'dtype: got "float64", expected "float32" as the'):
        run({**narrow, **state_for(state="compact")}, **fields)


def test_part_of_a_state_is_not_returned() -> None:
    with pytest.raises(InvalidContent, match=r"outputs lacks state\.tail_length, without which"):
        run(tokens(8, 5, "linear"), outputs=["state.sums"])
    found = run(tokens(8, 5, "linear"), outputs=["state.sums"], parameters={"state": "compact"})
    assert [*found] == ["state.sums"]
    with pytest.raises(InvalidContent, match="gated has no output 'states': expected output, weig"):
        run(tokens(8, 5, "linear"), outputs=["states"])


def test_gradients_take_no_tail_and_a_gradient_that_fits() -> None:
    inputs = tokens(8, 5, "gated_delta") | {"grad_output": np.ones((1, 2, 5, 3))}
    fields: dict[str, Any] = {"parameters": {"rule": "gated_delta", "chunk": 16}}
    with pytest.raises(InvalidContent, match=r"state\.tail_length is not allowed: gradients take"):
        run({**inputs, **state_for()}, "gradients", **fields)
    with pytest.raises(InvalidContent, match=r"grad_state\.sums has the wrong shape: got \[1, 2\]"):
        run({**inputs, "grad_state.sums": np.ones((1, 2))}, "gradients", **fields)


def test_ranks_of_a_state_are_those_of_the_query() -> None:
    """Heads and batch are omitted as in the query; lengths are a list at any rank."""
    inputs = {n: x[0, 0] for n, x in tokens(9, 40, "gated_delta", heads=(1, 1, 1)).items()}
    fields: dict[str, Any] = {"parameters": {"rule": "gated_delta", "chunk": 16}, "outputs": BOTH}
    whole = run(inputs, **fields)
    first = run({n: x[:21].copy() for n, x in inputs.items()}, **fields)
    assert first["state.sums"].shape == (4, 3)
    assert first["state.tail_length"].tolist() == [5]
    rest = run({**{n: x[21:].copy() for n, x in inputs.items()}, **state_of(first)}, **fields)
    output = np.concatenate([first["output"], rest["output"]])
    assert output.tobytes() == whole["output"].tobytes()
    assert_same_bits(state_of(rest), state_of(whole))


def test_padding_of_a_tail_changes_nothing() -> None:
    """Whatever a client writes behind the tail's length."""
    inputs, state = tokens(8, 5, "gated_delta"), state_for()
    fields: dict[str, Any] = {"parameters": {"rule": "gated_delta", "chunk": 16}, "outputs": BOTH}
    dirty = {n: x.copy() for n, x in state.items()}
    for name in ("state.tail_key", "state.tail_value", "state.tail_log_decay", "state.tail_beta"):
        dirty[name][:, :, 4:] = np.nan
    assert_same_bits(run({**inputs, **dirty}, **fields), run({**inputs, **state}, **fields))


def test_state_of_attend_has_the_types_of_its_annotations() -> None:
    query = torch.randn(1, 2, 20, 4)
    found = gated.attend(query, query, query, chunk=16, outputs=frozenset({"state"}))
    assert isinstance(found.state, State)
    assert found.state.sums is not None
    assert found.state.sums.dtype == torch.float64
    assert found.state.tail_key is not None
    assert torch.equal(found.state.tail_key[:, :, :4], query[:, :, 16:])


def test_jobs_with_a_state_are_stacked_on_a_device() -> None:
    """One call serves sequences of several clients, and waits for the device once."""
    fields: dict[str, Any] = {"parameters": {"rule": "gated_delta", "chunk": 16}, "outputs": BOTH}
    states = [state_of(run(tokens(n, 9 + 10 * n, "gated_delta"), **fields)) for n in range(3)]
    jobs = []
    for n, state in enumerate(states):
        arrays = {**tokens(10 + n, 7, "gated_delta"), **state}
        raw = {name: RawTensor.from_numpy(x) for name, x in arrays.items()}
        jobs.append(Job.new(Plan, "gated", Message(fields, raw), LIMITS))
    assert len({job.batch_key for job in jobs}) == 1
    before = counts["sync"]
    together = execute(jobs, PretendedDevice(), stack=True)
    assert counts["sync"] - before == 1
    for job, found in zip(jobs, together, strict=True):
        (alone,) = execute([job], PretendedDevice(), stack=True)
        assert found.call_size == 3
        for name, raw_output in alone.outputs.items():
            one, other = raw_output.numpy(), found.outputs[name].numpy()
            np.testing.assert_allclose(other, one, rtol=0, atol=1e2 * EPS, err_msg=name)


def test_jobs_of_no_tokens_are_stacked_on_a_device() -> None:
    """Also with tails of several lengths."""
    fields: dict[str, Any] = {"parameters": {"rule": "gated_delta", "chunk": 16}, "outputs": BOTH}
    none = part(tokens(0, 1, "gated_delta"), 0, 0)
    states = [state_of(run(tokens(n, n, "gated_delta"), **fields)) for n in (9, 21)]
    jobs = []
    for state in states:
        raw = {name: RawTensor.from_numpy(x) for name, x in {**none, **state}.items()}
        jobs.append(Job.new(Plan, "gated", Message(fields, raw), LIMITS))
    results = execute(jobs, PretendedDevice(), stack=True)
    for state, result in zip(states, results, strict=True):
        found = {name: raw_output.numpy() for name, raw_output in result.outputs.items()}
        assert found["output"].shape == (1, 2, 0, 3)
        assert_same_bits(state_of(found), state)


def test_bits_do_not_depend_on_the_threads_that_a_large_job_may_take() -> None:
    """The whole sequence is large enough for several threads; its last part is not."""
    inputs = tokens(11, 1500, "gated_delta", heads=(4, 4, 4), D=64, E=64, dtype="float32")
    fields: dict[str, Any] = {"parameters": {"rule": "gated_delta"}, "outputs": BOTH}

    def execute_with(threads: int, arrays: Arrays) -> Arrays:
        raw = {name: RawTensor.from_numpy(x) for name, x in arrays.items()}
        job = Job.new(Plan, "gated", Message(fields, raw), LIMITS)
        (result,) = execute([job], CpuDevice(), stack=False, threads=threads)
        return {name: x.numpy() for name, x in result.outputs.items()}

    whole = execute_with(2, inputs)
    first = execute_with(1, part(inputs, 0, 1490))
    rest = execute_with(2, {**part(inputs, 1490, 1500), **state_of(first)})
    joined = np.concatenate([first["output"], rest["output"]], 2)
    assert_same_bits({"output": joined, **state_of(rest)}, whole)
