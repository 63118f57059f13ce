"""The mean: four methods against the reference, the tables of seed 002, and extreme numbers."""

from __future__ import annotations

import typing
from typing import Any, Final

import numpy as np
import pytest
import torch

from qkv.attention.variants import mean
from support.each import each
from support.known_requests import assert_problem
from support.references import reference_of
from support.seed_tables import AVERAGES, AVERAGING
from support.service import Server, running_server
from support.variant_bounds import mean_roundings as roundings
from support.variant_calls import VARIANTS

METHODS: Final[tuple[Any, ...]] = typing.get_args(
    VARIANTS["mean"].parameters.model_fields["method"].annotation
)
DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
BOTH: Final = frozenset({"output", "weights"})
PATH: Final = "/v1/attention/mean"

every_method = each("method", METHODS)


@each("dtype", DTYPES)
@each("causal", [False, True])
@each("S", [128, 129, 513])
def test_item_of_a_long_batch_has_the_bits_of_its_own(
    dtype: torch.dtype, S: int, causal: bool
) -> None:
    value = torch.randn(2, 2, S, 3, generator=torch.Generator().manual_seed(S)).to(dtype)
    together = mean.attend(mean.Call(value, causal=causal), frozenset({"output"})).output
    alone = mean.attend(mean.Call(value[1:, 1:], causal=causal), frozenset({"output"})).output
    assert together is not None
    assert alone is not None
    assert torch.equal(together[1:, 1:], alone)


@each("causal", [False, True])
@each("normalize", [False, True])
@each("S", [2, 31, 64, 700, 2500])
def test_partial_sums_that_overflow_float32(S: int, causal: bool, normalize: bool) -> None:
    """Two of four columns overflow in float32 on the way; the others keep their bits."""
    largest = torch.finfo(torch.float32).max
    value = torch.randn(1, 2, S, 4, generator=torch.Generator().manual_seed(S))
    ordinary = value.clone()
    value[:, 1, :, 0] = largest / 4
    value[:, 1, S // 2 :, 0] *= -1.0
    value[:, 0, :, 2] = (value[:, 0, :, 2] * 1e38).clamp(-largest, largest)
    before, after = (
        mean.attend(mean.Call(v, causal=causal, normalize=normalize), BOTH).output
        for v in (ordinary, value)
    )
    assert before is not None
    assert after is not None
    truth = reference_of(mean.Call(value, causal=causal, normalize=normalize))
    assert truth.output is not None
    assert truth.weights is not None
    fits = truth.output.float().isfinite()
    assert torch.equal(after.isfinite(), fits)
    mass = truth.weights @ value.double().abs()
    off = (after.double() - truth.output).abs()
    bound = (roundings(S, causal) + 1) * torch.finfo(torch.float32).eps / 2 * mass
    assert (off <= bound)[fits].all()
    assert torch.equal(after[..., 1::2], before[..., 1::2])


# a product with a triangle of ones multiplies inf by 0
@pytest.mark.parametrize(
    ("method", "number"),
    [*((method, -1e30) for method in METHODS), ("cumsum", torch.inf), ("loop", torch.inf)],
)
def test_later_value_does_not_change_earlier_rows(method: Any, number: float) -> None:
    value = torch.randn(1, 2, 9, 3)
    later = value.clone()
    later[:, :, 5:] = number
    one, other = (
        mean.attend(mean.Call(v, method=method), frozenset({"output"})).output
        for v in (value, later)
    )
    assert one is not None
    assert other is not None
    assert torch.equal(one[:, :, :5], other[:, :, :5])
    assert not torch.equal(one[:, :, 5:], other[:, :, 5:])


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


@each(("causal", "rows"), [(False, [[14, 16]] * 3), (True, None)])
def test_products_with_ones_of_seed_002(
    server: Server, causal: bool, rows: list[list[int]] | None
) -> None:
    body = {
        "inputs": {"value": [[2, 7], [6, 4], [6, 5]]},
        "parameters": {"causal": causal, "normalize": False},
    }
    response = server.http.post(PATH, json=body).json()
    assert response["outputs"]["output"] == (rows or [[2, 7], [8, 11], [14, 16]])


@every_method
def test_sums_of_65536_values_are_exact(method: Any) -> None:
    """Wrongly rounded sums would be visible: every mean is 1, and the last sum is 65,536."""
    S = 65536 if method == "cumsum" else 1024
    value = torch.ones(1, 1, S, 2)
    found = mean.attend(mean.Call(value, method=method), frozenset({"output"}))
    assert found.output is not None
    assert found.output.unique().tolist() == [1.0]
    sums = mean.attend(mean.Call(value, method=method, normalize=False), frozenset({"output"}))
    assert sums.output is not None
    assert sums.output[0, 0, -1, 0] == S


def test_slow_methods_are_bounded_and_cumsum_is_not() -> None:
    with running_server(max_scores=99) as server:
        body: dict[str, Any] = {"inputs": {"value": [[1.0]] * 10}, "weights": "none"}
        assert server.http.post(PATH, json=body).status_code == 200
        for method in ("loop", "matmul", "softmax"):
            body["parameters"] = {"method": method}
            assert assert_problem(server.http.post(PATH, json=body), 413)["limit"] == 99
