"""Each variant's `attend` and `steps` against its definition in plain numpy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from definitions.heads import DEFINITIONS, define
from definitions.linformer import projection
from qkv.attention.catalogue import variants
from qkv.attention.step import STEPS
from qkv.attention.variant import Variant
from support.drawn_requests import requests
from support.each import each
from support.examples import examples
from support.paths import ROOT
from support.state_requests import BOTH, CASES, run, state_of, tokens
from support.variant_bounds import is_near
from support.variant_calls import VARIANTS

EPS: Final = float(np.finfo(np.float64).eps)
_PROJECTIONS: Final = ("key_projection_RN", "value_projection_RN")
every_variant = pytest.mark.parametrize("name", sorted(DEFINITIONS))


def test_every_variant_has_a_definition_of_numpy_alone() -> None:
    assert DEFINITIONS.keys() == {n for n, v in variants().items() if v.call is not None}
    for name in DEFINITIONS:
        lines = (ROOT / f"tests/definitions/{name}.py").read_text().splitlines()
        imports = [x for x in lines if x.startswith(("import ", "from "))]
        assert imports == [
            "from __future__ import annotations", "from typing import Any", "import numpy as np",
        ]  # fmt: skip


def defined(variant: Variant, call: dict[str, Any]) -> Any:
    """Returns the outputs of a call by its definition, as float64 tensors."""
    names, known = {i.argument: n for n, i in variant.inputs.items()}, dict(call)
    if variant.name == "linformer":
        seed, rank = known.pop("seed", 0), known.pop("rank", None)
        key, sent = call["key_BGSD"], [known.get(n) for n in _PROJECTIONS]
        R = next((len(p) for p in sent if p is not None), rank or min(key.shape[2], 256))
        for i, n in enumerate(_PROJECTIONS):
            drawn = torch.from_numpy(projection(i, R, key.shape[2], seed)).to(key.dtype)
            known[n] = drawn if known.get(n) is None else known[n]
    tensors = {names[n]: known.pop(n) for n in [*known] if n in names}
    inputs = {n: (x.double() if x.is_floating_point() else x).numpy() for n, x in tensors.items()}
    with np.errstate(all="ignore"):
        found = define(variant.name, inputs, **known)
    return SimpleNamespace(**{n: torch.from_numpy(x) for n, x in found.items()})


@examples(40)
@given(data=st.data())
@every_variant
def test_attend_and_steps_are_the_definition(name: str, data: st.DataObject) -> None:
    """Draws every dtype and parameter, masks, and lengths with garbage in the padding."""
    variant = VARIANTS[name]
    request = data.draw(requests(variant))
    call = request.arguments()
    truth = defined(variant, call)
    bounds = request.bounds(truth)
    found = variant.attend(**call, outputs=frozenset(variant.outputs))
    for n in bounds:
        assert is_near(getattr(found, n), getattr(truth, n), bounds[n]), n
    steps = variant.compute_steps(**wide(variant, call))
    for n in {"output", "weights"} & bounds.keys():
        if n == "output" or not call.get("dropout"):  # which has a step of its own
            assert is_near(steps[STEPS + n], getattr(truth, n), bounds[n]), n


def wide(variant: Variant, call: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `compute_steps` of one request."""
    found = {
        n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for n, x in variant.random_inputs(call).items()
    }
    if variant.takes_plane:
        B, H = found["query_BHLD"].shape[:2]
        found["plane_BH"] = torch.arange(B * H).view(B, H)
    return found


def extreme(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns inputs for which a plain formula overflows, underflows or divides 0 by 0."""
    random = np.random.default_rng(5)
    query, key, value = (random.normal(size=(2, 2, n, 4)) for n in (5, 7, 7))
    far: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        # products of phi are e^-1400
        "linear": ({"query": query - 700, "key": key - 700, "value": value * 1e200}, {}),
        "efficient": ({"query": query * 1e4, "key": key + 1e3 * np.arange(7)[:, None],
                       "value": value * 1e200}, {"causal": True}),
        # keys that are opposed to their query, but for 1e-6, and sizes that no square has
        "taylor": ({"query": query[:, :, :1] * 1e200, "key": -query[:, :, :1] + 1e-6 * key,
                    "value": value}, {}),
        "softmax": ({"query": query * 1e3, "key": key * 1e3, "value": value * 1e300,
                     "mask": np.array([0, -1e30, 0, -np.inf, 0, 0, -1e300])[None, None, None]}, {}),
        "sigmoid": ({"query": query * 1e3, "key": key * 1e3, "value": value}, {"window": (0, 0)}),
        "linformer": ({"query": query * 30, "key": key * 30, "value": value * 1e200,
                       "key_projection": random.normal(size=(3, 9)),
                       "value_projection": random.normal(size=(3, 9))}, {}),
        "mean": ({"value": np.abs(value) * 5e307}, {}),
        "linear_layer": ({"x": np.array([[1e300, -1e308, 0], [0, 0, 0], [1e-300, 1, 3]]),
                          "weight": random.normal(size=(4, 3)) * 1e-10}, {}),
        "gated": ({"query": key, "key": key, "value": value * 1e200,
                   "log_decay": -700 * random.random((2, 2, 7, 4)),
                   "beta": random.random((2, 2, 7))},
                  {"rule": "gated_delta", "normalize_qk": True}),
    }  # fmt: skip
    return far[name]


@every_variant
def test_extremes_are_the_definition(name: str) -> None:
    variant = VARIANTS[name]
    inputs, parameters = extreme(name)
    tensors = {variant.inputs[n].argument: torch.from_numpy(x) for n, x in inputs.items()}
    truth = defined(variant, tensors | parameters)
    attended = variant.attend(**tensors, **parameters, outputs=frozenset({"output", "weights"}))
    for found in (attended, variant.reference(**tensors, **parameters)):
        for n in ("output", "weights"):
            assert getattr(truth, n).isfinite().all()
            size = float(getattr(truth, n).abs().max())
            # a score of 1e6 has an error of 1e-10, and so has its exponential
            close = 1e-9 if name in ("softmax", "sigmoid", "efficient", "taylor") else 1e-13
            torch.testing.assert_close(
                getattr(found, n), getattr(truth, n), rtol=close, atol=close * size
            )


@each("name", [*CASES])
@each("lengths", [None, [9, 0, 4]])
def test_output_behind_a_state_is_the_definition(name: str, lengths: list[int] | None) -> None:
    case = CASES[name]
    inputs = tokens(3, 40, case, B=3, heads=(4, 2, 2))
    before = {n: x[:, :, :31] for n, x in inputs.items()}
    after = {n: np.ascontiguousarray(x[:, :, 31:]) for n, x in inputs.items()}
    if lengths is not None:
        after["key_lengths"] = np.array(lengths)
    state = state_of(run(case, before, parameters={"chunk": 16}, outputs=BOTH))
    assert state["state.tail_length"].tolist() == [15, 15, 15]
    attended = run(case, after | state, parameters={"chunk": 16}, outputs=["output", "weights"])
    stepped = run(case, after | state, "reference", parameters={"chunk": 16})
    truth = define(case.variant, after | state, **case.parameters)
    for n in truth.keys() & stepped.keys():
        for found in (attended, stepped) if n in attended else (stepped,):
            np.testing.assert_allclose(
                found[n], truth[n], rtol=1e3 * EPS, atol=1e3 * EPS, err_msg=n
            )


@each("name", [*CASES])
def test_extremes_behind_a_state_are_the_definition(name: str) -> None:
    """Keys of `linear` and `efficient` rise or are far below 0, and other numbers are huge."""
    case = CASES[name]
    inputs, place = tokens(4, 40, case, B=2, heads=(4, 2, 2)), np.arange(40)[:, None]
    inputs["value"] *= 1e200
    if case.variant == "linear":
        inputs |= {n: 50 * inputs[n] - 300 for n in ("query", "key")}
    elif case.variant == "efficient":
        inputs["key"] += 100 * place
    elif case.variant == "taylor":
        inputs |= {n: inputs[n] * 1e200 for n in ("query", "key")}
    elif "log_decay" in inputs:
        inputs["log_decay"] *= 300
    before = {n: x[:, :, :25] for n, x in inputs.items()}
    after = {n: np.ascontiguousarray(x[:, :, 25:]) for n, x in inputs.items()}
    options = {"chunk": 16}
    state = state_of(run(case, before, parameters=options, outputs=BOTH))
    attended = run(case, after | state, parameters=options, outputs=["output", "weights"])
    stepped = run(case, after | state, "reference", parameters=options)
    truth = define(case.variant, after | state, **case.parameters)
    for found in (attended, stepped):
        for n in ("output", "weights"):
            size = np.abs(truth[n]).max()
            assert np.isfinite(size)
            np.testing.assert_allclose(found[n], truth[n], rtol=1e-12, atol=1e-12 * size, err_msg=n)
