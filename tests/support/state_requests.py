"""Requests with a state for tests: random tokens of each variant that has one, cut anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from qkv import local
from qkv.attention import catalogue
from qkv.tensors import DTYPES, RawTensor
from qkv.wire.message import Message
from support.drawn_requests import GATES

Arrays = dict[str, Any]
BOTH: Final = ["output", "state"]


class Case(NamedTuple):
    """A variant, the parameters that its state needs, and the names of its tensors."""

    variant: str
    parameters: Mapping[str, Any]
    names: Sequence[str]

    def __repr__(self) -> str:
        return " ".join([self.variant, *map(str, self.parameters.values())])


_THREE: Final = ("query", "key", "value")
_CAUSAL: Final = {"causal": True}
CASES: Final = {
    repr(case): case
    for case in (
        *(Case("gated", {"rule": rule}, (*_THREE, *gates)) for rule, gates in GATES.items()),
        Case("linear", _CAUSAL, _THREE),
        Case("linear", _CAUSAL | {"normalize": False}, _THREE),
        Case("efficient", _CAUSAL, _THREE),
        Case("taylor", _CAUSAL, _THREE),
        Case("mean", {}, ("value",)),
        Case("mean", {"normalize": False}, ("value",)),
    )
}
"""The variants that have a state, by a name for the tests."""


def tokens(
    seed: int, S: int, case: Case, *, B: int = 1, heads: tuple[int, int, int] = (2, 2, 2),
    D: int = 4, E: int = 3, channels: bool = False, dtype: str = "float64",
) -> Arrays:  # fmt: skip
    """Returns random tokens: negative decays, betas below 1, keys of norm 1.

    `heads` are those of queries, keys and values; all variants but `gated` have as many of values
    as of keys.
    """
    random, (J, G, V) = np.random.default_rng(seed), heads
    key = random.normal(size=(B, G, S, D))
    found = {
        "query": random.normal(size=(B, J, S, D)),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": random.normal(size=(B, V if case.variant == "gated" else G, S, E)),
        "log_decay": -np.abs(random.normal(size=(B, max(G, V), S, *([D] * channels)))),
        "beta": random.random((B, max(G, V), S)),
    }
    return {n: found[n].astype(DTYPES[dtype]) for n in case.names}


def run(
    case: Case,
    inputs: Arrays,
    group: str = "attend",
    parameters: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Arrays:
    """Runs a request in this process; returns its tensors."""
    tensors = {n: RawTensor.from_numpy(x) for n, x in inputs.items()}
    fields["parameters"] = {**case.parameters, **(parameters or {})}
    reply = getattr(local, group)(case.variant, Message(fields, tensors))
    return {n: x.numpy() for n, x in reply.tensors.items()}


def part(inputs: Arrays, start: int, stop: int) -> Arrays:
    """Returns some of the tokens."""
    return {n: np.ascontiguousarray(x[:, :, start:stop]) for n, x in inputs.items()}


def state_of(tensors: Arrays) -> Arrays:
    """Returns the tensors of the state in a response."""
    return {n: x for n, x in tensors.items() if n.startswith("state.")}


def state_for(case: Case, **changes: Any) -> Arrays:
    """Returns the state of 20 tokens, in chunks of 16."""
    parameters = {"chunk": 16, **changes}
    return state_of(run(case, tokens(7, 20, case), parameters=parameters, outputs=BOTH))


def in_parts(case: Case, inputs: Arrays, cuts: Sequence[int], **fields: Any) -> Arrays:
    """Runs the tokens between the cuts, each with the state of those before; joins the outputs."""
    state: Arrays = {}
    outputs = []
    for start, stop in pairwise(cuts):
        found = run(case, {**part(inputs, start, stop), **state}, outputs=BOTH, **fields)
        outputs.append(found["output"])
        state = state_of(found)
    return {"output": np.concatenate(outputs, 2), **state}


def as_tensor(array: Any) -> torch.Tensor:
    """Returns an array of any dtype as a tensor."""
    wide = torch.from_numpy(array.astype(np.float64))
    return wide.to(getattr(torch, array.dtype.name))


def as_arguments(case: Case, inputs: Arrays) -> dict[str, Any]:
    """Returns the arguments of `attend`."""
    specs = catalogue.find(case.variant).inputs
    found = {specs[n].argument: as_tensor(x) for n, x in inputs.items()}
    if (decay := found.get("log_decay_BTSZ")) is not None and decay.ndim == 3:
        found["log_decay_BTSZ"] = decay[..., None]
    return found


def assert_same_bits(found: Arrays, expected: Arrays) -> None:
    """Asserts that all tensors are the same, -0 and NaN included."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name
