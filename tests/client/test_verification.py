"""`verify` of the clients: the verdict on a function, on inputs that the service draws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from qkv import Client, QkvError, Verdict
from support.clients import client as client
from support.clients import in_asyncio
from support.drawn_cases import softmax
from support.known_requests import Array
from support.service import Server


def right(query: Array, key: Array, value: Array, **keywords: Any) -> Array:
    return softmax({"query": query, "key": key, "value": value, **keywords})


def test_right_function_passes(client: Client) -> None:
    for options in ({}, {"family": "mask"}, {"dtype": "bfloat16"}, {"sizes": {"B": 1, "L": 3}}):
        verdict = client.verify(right, "softmax", **options)
        assert isinstance(verdict, Verdict)
        assert verdict.passed
        assert (verdict.result, verdict.diagnosis) == ("output", ())
        assert len(verdict.worst_index) == 4
        assert 0 <= verdict.units <= 1
        assert verdict.results["output"]["passed"] is True


def test_wrong_function_fails_and_its_bug_is_named(client: Client) -> None:
    def wrong(query: Array, key: Array, value: Array, causal: bool) -> Array:
        assert causal is True
        return right(query, key, value)

    verdict = client.verify(wrong, "softmax", causal=True)
    assert (verdict.passed, verdict.diagnosis) == (False, ("causal-missing",))
    assert verdict.error > verdict.budget
    assert abs(verdict.got - verdict.expected) == pytest.approx(verdict.error)


def test_seed_of_a_verdict_draws_the_same_inputs(client: Client) -> None:
    drawn: list[Array] = []

    def keep(query: Array, key: Array, value: Array) -> Array:
        drawn.append(query)
        return right(query, key, value)

    case = client.verify(keep, "softmax").case
    assert client.verify(keep, "softmax", seed=case["seed"]).case == case
    client.verify(keep, "softmax")
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


def test_function_of_torch_returns_gradients(client: Client) -> None:
    def in_torch(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad_output: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        leaves = [x.requires_grad_() for x in (query, key, value)]
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        gradients = torch.autograd.grad(output, leaves, grad_output)
        names = ("grad_query", "grad_key", "grad_value")
        return {"output": output, **dict(zip(names, gradients, strict=True))}

    verdict = client.verify(in_torch, "softmax", like=torch.empty(0), gradients=True)
    assert verdict.passed
    assert verdict.results.keys() == {"output", "grad_query", "grad_key", "grad_value"}


def test_numbers_that_are_not_finite_are_numbers(client: Client) -> None:
    def broken(query: Array, key: Array, value: Array) -> Array:
        return right(query, key, value) * np.nan

    verdict = client.verify(broken, "softmax")
    assert not verdict.passed
    assert math.isnan(verdict.got)
    assert math.isinf(verdict.error)
    assert verdict.cosine is None


def test_async_client_awaits_the_function(server: Server, client: Client) -> None:
    async def later(query: Array, key: Array, value: Array) -> Array:
        return right(query, key, value)

    expected = client.verify(right, "softmax", seed=1)
    assert in_asyncio(server.url, lambda c: c.verify(later, "softmax", seed=1)) == expected
    assert in_asyncio(server.url, lambda c: c.verify(right, "softmax", seed=1)) == expected


def test_errors_name_what_is_wrong(client: Client) -> None:
    for options, word in (
        ({"family": "nope"}, "family"),
        ({"nope": 1}, "nope"),
        ({"sizes": {"B": 10**9}}, "too large"),
    ):
        with pytest.raises(QkvError, match=word):
            client.verify(right, "softmax", **options)
    with pytest.raises(QkvError, match="output is no array"):
        client.verify(lambda **_: [1.0], "softmax")
    with pytest.raises(QkvError, match=r"outputs\.output"):
        client.verify(lambda query, **_: query.astype("f8"), "softmax")


def test_recurrence_with_a_state_is_judged(client: Client) -> None:
    """Inputs and results have the names of a run, so the service judges its own answer."""

    def attend(**arguments: Any) -> Any:
        state = {"state.sums": arguments.pop("state.sums")}
        return client.attend("gated", **arguments, state=state).output

    options: dict[str, Any] = {"rule": "gated_delta", "family": "state", "sizes": {"H": 2}}
    verdict = client.verify(attend, "gated", **options)
    assert verdict.passed
    verdict = client.verify(lambda **x: attend(**x) * 8, "gated", **options)
    assert not verdict.passed
