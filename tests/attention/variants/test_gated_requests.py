"""Requests for `gated`: which inputs, heads, ranks and dtypes fit, and forms of its weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qkv import local
from qkv.attention.variants import gated
from qkv.errors import InvalidContent
from qkv.tensors import DTYPES, RawTensor
from qkv.wire.message import Message
from support.each import each
from support.references import reference_of
from support.seen_weights import largest_weights
from support.small_blocks import small_blocks


def arrays(**shapes: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    """Returns random arrays in float64; decays are negative, and betas below 1."""
    random = np.random.default_rng(0)
    found = {n: random.normal(size=shape) for n, shape in shapes.items()}
    for name in found.keys() & {"log_decay", "beta"}:
        found[name] = -np.abs(found[name]) if name == "log_decay" else 1 / (1 + found[name] ** 2)
    return found


def attend(inputs: dict[str, Any], **fields: Any) -> dict[str, NDArray[Any]]:
    """Runs a request in this process; returns its tensors."""
    tensors = {n: RawTensor.from_numpy(x) for n, x in inputs.items()}
    tensors = local.attend("gated", Message(fields, tensors)).tensors
    return {n: x.numpy() for n, x in tensors.items()}


@pytest.mark.parametrize(
    ("parameters", "shapes", "detail"),
    [
        ({}, {"beta": (1, 2, 5)}, "beta is not used: got the rule linear, expected delta or gated"),
        ({"rule": "delta"}, {"log_decay": (1, 2, 5), "beta": (1, 2, 5)}, "log_decay is not used"),
        ({"rule": "gated"}, {}, "gated needs log_decay for the rule gated: missing from inputs"),
        ({"rule": "gated_delta"}, {"log_decay": (1, 2, 5)}, "gated needs beta for the rule gated_"),
        ({"rule": "delta"}, {"beta": (1, 4, 5)}, "beta has the wrong number of heads: got 4, exp"),
        ({"rule": "gated"}, {"log_decay": (1, 2, 5, 2)}, "wrong number of channels: got 2, exp"),
        ({"rule": "gated"}, {"log_decay": (2, 5)}, "log_decay has the wrong number of axes"),
        ({}, {"query": (1, 3, 5, 3)}, "key has the wrong number of heads: got 2 beside 3 of query"),
        ({}, {"value": (1, 3, 5, 3)}, "the wrong number of heads: got 2 beside 2 of query, 2 of k"),
        ({"causal": True}, {}, "gated refuses 'causal'"),
        ({"chunk": 1}, {}, "parameter 'chunk' is invalid"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    parameters: dict[str, Any], shapes: dict[str, tuple[int, ...]], detail: str
) -> None:
    every = {"query": (1, 2, 5, 3), "key": (1, 2, 5, 3), "value": (1, 2, 5, 4)} | shapes
    with pytest.raises(InvalidContent) as caught:
        attend(arrays(**every), parameters=parameters)
    assert detail in caught.value.detail


@each("rank", [2, 3, 4])
@each("channels", [(), (3,)])
def test_gates_omit_the_axes_that_the_query_omits(rank: int, channels: tuple[int, ...]) -> None:
    """A log decay of the query's rank is per channel, and of one axis less per head."""
    lead = (1, 2)[: rank - 2] if rank == 4 else (2,) * (rank - 2)
    inputs = arrays(
        query=(*lead, 5, 3), key=(*lead, 5, 3), value=(*lead, 5, 4),
        log_decay=(*lead, 5, *channels), beta=(*lead, 5),
    )  # fmt: skip
    found = attend(inputs, parameters={"rule": "gated_delta"})
    full: dict[str, Any] = {n: torch.from_numpy(x) for n, x in inputs.items()}
    if rank == 3:  # without the heads
        full = {n: x[:, None] for n, x in full.items()}
    elif rank == 2:
        full = {n: x[None, None] for n, x in full.items()}
    if not channels:
        full["log_decay"] = full["log_decay"][..., None]
    truth = reference_of(gated.Call(*full.values(), rule="gated_delta"))
    for name in ("output", "weights"):
        expected = getattr(truth, name).numpy()
        np.testing.assert_allclose(
            found[name], expected.reshape(found[name].shape), rtol=0, atol=1e-13
        )


@pytest.mark.parametrize(
    ("dtype", "gate", "fits"),
    [
        ("bfloat16", "float32", True), ("float16", "float64", True), ("float32", "float64", True),
        ("float16", "float16", True), ("float32", "float16", False),
        ("float16", "bfloat16", False), ("float64", "float32", False),
    ],
)  # fmt: skip
def test_gates_may_be_wider_than_the_other_tensors(dtype: str, gate: str, fits: bool) -> None:
    inputs = arrays(query=(2, 5, 3), key=(2, 5, 3), value=(2, 5, 4), log_decay=(2, 5))
    cast = {n: x.astype(DTYPES[gate if n == "log_decay" else dtype]) for n, x in inputs.items()}
    if fits:
        assert attend(cast, parameters={"rule": "gated"})["output"].dtype == DTYPES[dtype]
        return
    with pytest.raises(InvalidContent, match=f"log_decay has the wrong dtype: got {gate}, exp"):
        attend(cast, parameters={"rule": "gated"})


@each("heads", [(4, 2, 1), (2, 2, 4)])
@each("form", ["stats", {"top_k": 2}, {"rows": [70, 3, 4]}, {"pool": 5}])
def test_forms_of_the_weights_are_those_of_the_whole_matrix(
    heads: tuple[int, int, int], form: Any
) -> None:
    """Also where blocks cut the heads: each block has whole groups that share keys and values."""
    J, G, V = heads
    shapes = {"query": (2, J, 71, 3), "key": (2, G, 71, 3), "value": (2, V, 71, 4)}
    gates = {"log_decay": (2, max(G, V), 71, 3), "beta": (2, max(G, V), 71)}
    inputs, parameters = arrays(**shapes, **gates), {"rule": "gated_delta", "normalize_qk": True}
    whole = attend(inputs, parameters=parameters)["weights"]
    with small_blocks(600):
        found = attend(inputs, parameters=parameters, weights=form)
    if form == "stats":
        np.testing.assert_allclose(found["received"], whole.sum(-2), rtol=0, atol=1e-12)
        largest = largest_weights(whole, 1)[..., 0]
        assert (largest < 0).any()
        np.testing.assert_allclose(found["largest"], largest, rtol=0, atol=1e-12)
        index = found["largest_index"][..., None]
        np.testing.assert_allclose(
            np.take_along_axis(whole, index, -1)[..., 0], largest, atol=1e-12
        )
    elif "rows" in form:
        np.testing.assert_allclose(found["weights"], whole[:, :, form["rows"]], rtol=0, atol=1e-12)
    elif "top_k" in form:
        np.testing.assert_allclose(found["weights"], largest_weights(whole, 2), rtol=0, atol=1e-12)
        assert ((found["indices"] < 0) == (found["weights"] == 0)).all()
    else:
        bins = np.arange(71) * 5 // 71
        member = (bins[:, None] == np.arange(5)).astype(float)
        expected = (member.T @ whole @ member) / member.sum(0)[:, None]
        np.testing.assert_allclose(found["weights"], expected, rtol=0, atol=1e-12)
