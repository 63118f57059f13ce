"""The mean: four methods against the reference, the tables of seed 002, and extreme numbers."""

from __future__ import annotations

import math
import typing
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qkv.attention.variants import mean
from support.known_requests import assert_problem
from support.seed_tables import AVERAGES, AVERAGING
from support.service import Server, running_server

METHODS: Final[tuple[Any, ...]] = typing.get_args(mean._Method)
DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
BOTH: Final = frozenset({"output", "weights"})
PATH: Final = "/v1/attention/mean"

every_method = pytest.mark.parametrize("method", METHODS)


def roundings(S: int, causal: bool = True, method: str = "cumsum") -> int:
    """Returns the largest number of roundings of the scores' dtype in an average.

    Causal: the sum within a chunk, the sum before it, their sum, and the quotient. Not causal: 16
    rows of a block are added, then 16 such sums and so on, beside 3 others; then the sum of blocks
    and the quotient.
    """
    if method != "cumsum":
        return 1
    rows = min(S, mean._BLOCK)
    levels = max(1, math.ceil(math.log(rows, 16)))
    return 4 if causal else min(rows - 1, 16 * levels + 3) + 2


def assert_right(value: Tensor, lengths: Tensor | None, **parameters: Any) -> None:
    """Compares with the reference, within few roundings of sums and one to the dtype."""
    found = mean.attend(value, lengths, **parameters, outputs=BOTH)
    truth = mean.reference(value, lengths, **parameters)
    assert found.output is not None
    assert found.weights is not None
    assert truth.output is not None
    assert truth.weights is not None
    assert found.output.dtype == value.dtype
    S, double = value.shape[2], torch.finfo(torch.float64)
    mass = truth.weights @ value.double().abs()
    info = torch.finfo(value.dtype)
    bound = info.eps / 2 * truth.output.abs() + info.smallest_normal * info.eps
    bound += (S + 2) * double.eps * mass
    exact, ways = torch.finfo(found.weights.dtype), ("causal", "method")
    own = {name: parameters[name] for name in ways if name in parameters}
    bound += roundings(S, **own) * exact.eps / 2 * mass
    assert ((found.output.double() - truth.output).abs() <= bound).all()
    assert ((found.weights.double() - truth.weights).abs() <= exact.eps * truth.weights).all()


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 5)),
    method=st.sampled_from(METHODS),
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    normalize=st.booleans(),
    padded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_agrees_with_reference(
    shape: tuple[int, ...],
    method: Any,
    dtype: torch.dtype,
    causal: bool,
    normalize: bool,
    padded: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    lengths = None
    if padded:
        lengths = torch.randint(0, shape[2] + 1, shape[:1], generator=generator)
    assert_right(value, lengths, method=method, causal=causal, normalize=normalize)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [128, 129, 160, 512, 513, pytest.param(1100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_lengths_on_both_sides_of_a_segment(
    dtype: torch.dtype, S: int, causal: bool, normalize: bool
) -> None:
    value = torch.randn(2, 5, S, 3, generator=torch.Generator().manual_seed(S)).to(dtype)
    for lengths in (None, torch.tensor([S, S // 2])):
        assert_right(value, lengths, causal=causal, normalize=normalize)
    together = mean.attend(value, causal=causal, outputs=frozenset({"output"})).output
    alone = mean.attend(value[1:, 4:], causal=causal, outputs=frozenset({"output"})).output
    assert together is not None
    assert alone is not None
    assert torch.equal(together[1:, 4:], alone)


@every_method
def test_padding_may_hold_anything(method: Any) -> None:
    value = torch.full((2, 1, 4, 3), torch.nan)
    value[0, :, :2], value[1, :, :0] = 2.0, 1.0
    found = mean.attend(
        value, torch.tensor([2, 0]), causal=True, normalize=True, method=method, outputs=BOTH
    )
    assert found.output is not None
    assert found.output[0].unique().tolist() == [2.0]
    assert found.output[1].unique().tolist() == [0.0]


@every_method
@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_numbers_average_without_overflow(method: Any, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    value = torch.full((1, 1, 100, 1), most, dtype=dtype)
    found = mean.attend(value, method=method, outputs=frozenset({"output"}))
    assert found.output is not None
    assert found.weights is None
    error = (found.output.double() / most - 1).abs().max()
    assert error <= 200 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("S", [2, 31, 64, 700, 2500])
def test_partial_sums_that_overflow_float32(S: int, causal: bool, normalize: bool) -> None:
    """Two of four columns overflow in float32 on the way; the others keep their bits."""
    largest = torch.finfo(torch.float32).max
    value = torch.randn(1, 2, S, 4, generator=torch.Generator().manual_seed(S))
    ordinary = value.clone()
    value[:, 1, :, 0] = largest / 4
    value[:, 1, S // 2 :, 0] *= -1.0
    value[:, 0, :, 2] = (value[:, 0, :, 2] * 1e38).clamp(-largest, largest)
    before, after = (
        mean.attend(v, causal=causal, normalize=normalize, outputs=BOTH).output
        for v in (ordinary, value)
    )
    assert before is not None
    assert after is not None
    truth = mean.reference(value, causal=causal, normalize=normalize)
    assert truth.output is not None
    assert truth.weights is not None
    fits = truth.output.float().isfinite()
    assert torch.equal(after.isfinite(), fits)
    mass = truth.weights @ value.double().abs()
    off = (after.double() - truth.output).abs()
    bound = (roundings(S, causal) + 1) * torch.finfo(torch.float32).eps / 2 * mass
    assert (off <= bound)[fits].all()
    assert torch.equal(after[..., 1::2], before[..., 1::2])


@pytest.mark.parametrize("method", METHODS)
def test_later_value_does_not_change_earlier_rows(method: Any) -> None:
    value = torch.randn(1, 2, 9, 3)
    later = value.clone()
    later[:, :, 5:] = torch.inf
    one, other = (
        mean.attend(v, method=method, outputs=frozenset({"output"})).output for v in (value, later)
    )
    assert one is not None
    assert other is not None
    if method in ("cumsum", "loop"):  # a product with a triangle of ones multiplies inf by 0
        assert torch.equal(one[:, :, :5], other[:, :, :5])


def table(text: str) -> np.ndarray:
    return np.array([row.split() for row in text.strip().splitlines()], np.float64)


@every_method
def test_tables_of_seed_002_through_the_service(server: Server, method: Any) -> None:
    """v1 is the loop, v2 the product, v3 the softmax, and all give the same table."""
    torch.manual_seed(1337)
    x = torch.randn(4, 8, 2)
    body = {"inputs": {"value": x.tolist()}, "parameters": {"method": method}}
    response = server.http.post(PATH, json=body).json()
    output = np.array(response["outputs"]["output"])
    rows = table(AVERAGES).reshape(4, 8, 2)
    np.testing.assert_allclose(output, rows, rtol=0, atol=5.1e-5)
    weights = np.array(response["outputs"]["weights"])
    np.testing.assert_allclose(weights, np.stack([table(AVERAGING)] * 4), rtol=0, atol=5.1e-5)
    assert response["timing"]["backend"] == method


@pytest.mark.parametrize(("causal", "rows"), [(False, [[14, 16]] * 3), (True, None)])
def test_products_with_ones_of_seed_002(
    server: Server, causal: bool, rows: list[list[int]] | None
) -> None:
    body = {
        "inputs": {"value": [[2, 7], [6, 4], [6, 5]]},
        "parameters": {"causal": causal, "normalize": False},
    }
    response = server.http.post(PATH, json=body).json()
    assert response["outputs"]["output"] == (rows or [[2, 7], [8, 11], [14, 16]])


@pytest.mark.slow
@every_method
def test_65536_values_in_little_memory(method: Any) -> None:
    """Wrongly rounded sums would be visible: every mean is 1, and the last sum is 65,536."""
    S = 65536 if method == "cumsum" else 2048
    value = torch.ones(1, 8, S, 64 if method == "cumsum" else 4)
    found = mean.attend(value, method=method, outputs=frozenset({"output"}))
    assert found.output is not None
    assert found.output.unique().tolist() == [1.0]
    sums = mean.attend(value, method=method, normalize=False, outputs=frozenset({"output"}))
    assert sums.output is not None
    assert sums.output[0, 0, -1, 0] == S


def test_meaningless_parameters_are_rejected_by_name(server: Server) -> None:
    inputs = {"value": [[1, 2], [3, 4]]}
    for name in ("scale", "softcap", "window", "dropout", "seed", "query_offset"):
        body = {"inputs": inputs, "parameters": {name: 1}}
        problem = assert_problem(server.http.post(PATH, json=body), 422)
        assert f"mean refuses '{name}'" in problem["detail"]
    body = {"inputs": inputs | {"query": [[1, 2]]}}
    assert "no input 'query'" in assert_problem(server.http.post(PATH, json=body), 422)["detail"]


def test_slow_methods_are_bounded_and_cumsum_is_not() -> None:
    with running_server(max_scores=99) as server:
        body: dict[str, Any] = {"inputs": {"value": [[1.0]] * 10}, "weights": "none"}
        assert server.http.post(PATH, json=body).status_code == 200
        for method in ("loop", "matmul", "softmax"):
            body["parameters"] = {"method": method}
            assert assert_problem(server.http.post(PATH, json=body), 413)["limit"] == 99


def test_layer_projects_the_values(server: Server) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 5, 4, generator=generator)
    weights = {f"W_{r}": torch.randn(4, 6, generator=generator) for r in ("query", "key", "value")}
    body = {
        "inputs": {"x": x.tolist()},
        "layer": {
            "layout": "v1", "heads": 2, "tensors": {n: w.tolist() for n, w in weights.items()}
        },
        "outputs": ["output"],
    }  # fmt: skip
    response = server.http.post(PATH, json=body).json()
    values = x.double() @ weights["W_value"].double()
    truth = values.cumsum(1) / torch.arange(1, 6).view(1, 5, 1)
    found = torch.tensor(response["outputs"]["output"], dtype=torch.float64)
    assert (found - truth).abs().max() <= 16 * torch.finfo(torch.float32).eps * values.abs().max()
