"""Tests that the client returns arrays of the same kind as the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from qkv import Client, Run
from support.clients import (
    ROLES,
    as_numpy,
    ask,
    encoded,
    in_asyncio,
    numbers,
    same_run,
    torches,
)
from support.clients import client as client
from support.known_requests import FLOATING, Array, Case, random_case
from support.service import Server


@pytest.mark.parametrize("dtype", FLOATING)
def test_numpy_inputs_give_numpy_outputs(client: Client, dtype: str) -> None:
    inputs = numbers(dtype)
    run = client.attend("softmax", **inputs, causal=True, outputs=["output", "weights", "scores"])
    assert run.variant == "softmax"
    assert all(type(a) is np.ndarray for a in run.outputs.values())
    exact = "float64" if dtype == "float64" else "float32"
    dtypes = [a.dtype.name for a in (run.output, run.weights, run.scores)]
    assert dtypes == [dtype, exact, exact]
    Case(inputs, {"causal": True}, dtype).check(encoded(run.outputs))
    assert run.timing["batch_size"] == 1
    run.output[:] = 0  # it is writable


@pytest.mark.parametrize("dtype", FLOATING)
def test_torch_inputs_give_torch_outputs(client: Client, dtype: str) -> None:
    inputs = numbers(dtype)
    tensors = torches(inputs)
    tensors["query"].requires_grad_()
    run = client.attend("softmax", **tensors)
    assert all(type(t) is torch.Tensor for t in run.outputs.values())
    assert run.output.dtype == tensors["query"].dtype
    assert not run.output.requires_grad
    same = client.attend("softmax", **inputs)
    for name in ("output", "weights"):
        assert as_numpy(run.outputs[name]).tobytes() == same.outputs[name].tobytes()
    run.output.zero_()


@pytest.mark.parametrize("kind", range(10))
def test_both_clients_take_numpy_and_torch_of_every_kind(
    client: Client, server: Server, kind: int
) -> None:
    case = random_case(20_000 + kind, 0)
    if case.parameters.get("window"):  # a tuple is equivalent to a list
        case.parameters["window"] = tuple(case.parameters["window"])
    run = ask(client, case)
    case.check(encoded(run.outputs))
    of_numpy: dict[str, Any] = {"outputs": list(case.outputs)} | case.inputs | case.parameters
    of_torch = of_numpy | torches(case.inputs)
    same = in_asyncio(server.url, lambda c: c.attend("softmax", **of_numpy))
    assert type(same) is Run
    assert same_run(same, run)
    of_both_clients = (
        client.attend("softmax", **of_torch),
        in_asyncio(server.url, lambda c: c.attend("softmax", **of_torch)),
    )
    for again in of_both_clients:
        for name, array in run.outputs.items():
            assert as_numpy(again.outputs[name]).tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", FLOATING)
def test_arrays_need_not_be_contiguous(client: Client, dtype: str) -> None:
    dense = numbers(dtype)
    expected = client.attend("softmax", **dense).output.tobytes()

    def views(array: Array) -> Iterator[Array]:
        """Yields the same numbers in other memory layouts."""
        yield np.asfortranarray(array)
        yield array[..., ::-1].copy()[..., ::-1]
        yield np.repeat(array, 2, axis=-1)[..., ::2]
        yield array.transpose(3, 1, 0, 2).copy().transpose(2, 1, 3, 0)

    for some in zip(*(views(dense[n]) for n in ROLES), strict=True):
        odd = dict(zip(ROLES, some, strict=True))
        assert client.attend("softmax", **odd).output.tobytes() == expected
        if all(s >= 0 for a in some for s in a.strides):
            run = client.attend("softmax", **torches(odd))
            assert as_numpy(run.output).tobytes() == expected


def test_negative_views_and_unmasked_arrays_have_their_numbers(client: Client) -> None:
    for dtype in FLOATING:
        inputs = numbers(dtype)
        tensors = torches(inputs)
        expected = client.attend("softmax", **tensors).output
        negative: dict[str, Any] = {n: torch._neg_view(-x) for n, x in tensors.items()}
        assert all(x.is_neg() for x in negative.values())
        assert torch.equal(client.attend("softmax", **negative).output, expected)
        imaginary: dict[str, Any] = {n: torch.complex(x.double(), -x.double()).conj().imag
                     for n, x in tensors.items()}  # fmt: skip
        if dtype == "float64":
            assert torch.equal(client.attend("softmax", **imaginary).output, expected)
        rows: dict[str, Any] = {"query": [negative["query"][0, 0, 0]] * 2}
        plain: dict[str, Any] = {"query": [tensors["query"][0, 0, 0]] * 2}
        rest = {n: x[0, 0] for n, x in tensors.items() if n != "query"}
        same = [client.attend("softmax", **rest, **each).output for each in (rows, plain)]
        assert torch.equal(*same)
    arrays = numbers()
    unmasked: dict[str, Any] = {n: np.ma.masked_array(x, mask=False) for n, x in arrays.items()}
    run = client.attend("softmax", **unmasked)
    assert type(run.output) is np.ndarray
    assert run.output.tobytes() == client.attend("softmax", **arrays).output.tobytes()


def test_fields_may_have_numbers_of_numpy(client: Client) -> None:
    inputs = numbers()
    plain = client.attend("softmax", **inputs, weights={"top_k": 2}).weights
    odd = client.attend("softmax", **inputs, weights={"top_k": np.int64(2)}).weights
    assert odd.tobytes() == plain.tobytes()
    rows = client.attend("softmax", **inputs, weights={"rows": np.array([0, 2])}).weights
    assert rows.shape == (2, 4, 2, 5)


def test_read_only_and_big_endian_arrays(client: Client) -> None:
    dense = numbers()
    expected = client.attend("softmax", **dense).output.tobytes()
    swapped = {n: a.astype(">f4") for n, a in dense.items()}
    assert client.attend("softmax", **swapped).output.tobytes() == expected
    for array in dense.values():
        array.flags.writeable = False
    assert client.attend("softmax", **dense).output.tobytes() == expected


class Arrayish:
    """An object that numpy converts to an array."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return self._array


class Packed:
    """An object with DLPack only."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("kind", [Arrayish, Packed])
def test_other_arrays_give_numpy_outputs(client: Client, kind: Callable[[Array], Any]) -> None:
    dense = numbers()
    run = client.attend("softmax", **{n: kind(a) for n, a in dense.items()})
    assert type(run.output) is np.ndarray
    assert run.output.tobytes() == client.attend("softmax", **dense).output.tobytes()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale", np.float64(0.5)),
        ("scale", np.float32(0.5)),
        ("causal", np.bool_(True)),
        ("query_offset", np.int64(1)),
    ],
)
def test_parameters_may_be_numpy_scalars(client: Client, name: str, value: Any) -> None:
    """`scale=1 / np.sqrt(D)` is a numpy scalar."""
    inputs = numbers()
    plain: dict[str, Any] = {"causal": True} | {name: value.item()}
    odd: dict[str, Any] = {"causal": True} | {name: value}
    one, other = (client.attend("softmax", **inputs, **p).output for p in (plain, odd))
    assert one.tobytes() == other.tobytes()
