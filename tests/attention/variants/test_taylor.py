"""Taylor attention against the reference and exact digits, with opposed keys."""

from __future__ import annotations

from decimal import Decimal, localcontext
from typing import Any, Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qkv.attention.variants import taylor
from support.agreement import assert_agrees
from support.drawn_requests import Request, requests
from support.each import each
from support.examples import examples
from support.variant_calls import VARIANTS, gradients

BOTH: Final = frozenset({"output", "weights"})
OUTPUT: Final = frozenset({"output"})
DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EPS: Final = torch.finfo(torch.float64).eps
NARROW_EPS: Final = torch.finfo(torch.float32).eps
every_dtype = each("dtype", DTYPES)
causal_or_not = each("causal", [False, True])


def attended(*tensors: Any, **parameters: Any) -> tuple[Tensor, Tensor]:
    """Returns output and weights.

    The output must have the same bits when it is requested alone.
    """
    found = taylor.attend(taylor.Call(*tensors, **parameters), BOTH)
    alone = taylor.attend(taylor.Call(*tensors, **parameters), OUTPUT)
    assert found.output is not None
    assert found.weights is not None
    assert alone.output is not None
    assert alone.weights is None
    assert torch.equal(alone.output, found.output)
    assert found.output.dtype == tensors[0].dtype
    exact = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    assert found.weights.dtype == exact
    return found.output.double(), found.weights.double()


@each("dtype", [torch.float64, torch.float32])
@causal_or_not
@each("angle", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
def test_keys_that_oppose_the_query(dtype: torch.dtype, causal: bool, angle: float) -> None:
    """1 + q'.k' cancels; the result is compared with 60 digits, for the rounded inputs."""
    turns = torch.tensor([1.0, -1.5, 0.5, 2.0], dtype=torch.float64) * angle
    key = -torch.stack([turns.cos(), turns.sin()], -1) * torch.tensor([[1.0], [3], [0.1], [7]])
    query = torch.tensor([[1.0, 0.0]] * 4, dtype=torch.float64)
    key, query = key.to(dtype), query.to(dtype)
    value = torch.tensor([[1.0], [-2.0], [4.0], [8.0]], dtype=dtype)
    output, weights = attended(*(x[None, None] for x in (query, key, value)), causal=causal)
    with localcontext(prec=60):
        similar = []
        for x, y in key.tolist():
            along, across = Decimal(x), Decimal(y)
            similar.append(1 + along / (along**2 + across**2).sqrt())
        for i in range(4):
            seen = similar[: i + 1] if causal else similar
            rows = [float(a / sum(seen)) for a in seen]
            truth = torch.tensor(rows + [0.0] * (4 - len(rows)), dtype=torch.float64)
            # roundings of a direction, divided by the smallest angle, which is half of the others
            close = 2 * (8 + 4) * EPS / (angle / 2) + 4 * torch.finfo(dtype).eps
            assert ((weights[0, 0, i] - truth).abs() <= close * truth).all()
            mass = float(truth @ value[:, 0].double().abs())
            assert abs(float(output[0, 0, i]) - float(truth @ value[:, 0].double())) <= close * mass


@pytest.mark.slow
@each("dtype", DTYPES[1:])
@causal_or_not
def test_items_are_recomputed_in_float64_independently(dtype: torch.dtype, causal: bool) -> None:
    """Each item has the bits that it has alone.

    In one, keys oppose the queries. In another, sums of values overflow. Two are ordinary, one of
    them with rows of extreme sizes.
    """
    query, key, value = (torch.randn(4, 2, 300, 16).to(dtype) for _ in range(3))
    query[1], key[1] = query[1, :1, :1], -query[1, :1, :1] + 0.1 * key[1]
    value[2] *= torch.finfo(dtype).max / 8
    key[3] *= 2.0 ** torch.randint(-20, 8, (2, 300, 1))
    lengths = torch.tensor([300, 290, 300, 17])
    together = taylor.attend(taylor.Call(query, key, value, lengths, causal=causal), OUTPUT).output
    assert together is not None
    for b in range(4):
        item: Any = [x[b : b + 1] for x in (query, key, value, lengths)]
        alone = taylor.attend(taylor.Call(*item, causal=causal), OUTPUT).output
        assert alone is not None
        assert torch.equal(alone[0], together[b])
        assert_agrees("taylor", *item, causal=causal)


@every_dtype
@causal_or_not
@each("D", [1, 2, 3, 64])
def test_query_opposed_by_all_keys_gets_zeros(dtype: torch.dtype, causal: bool, D: int) -> None:
    """0/0 at any scale of the rows, except for queries with a key that does not oppose them."""
    direction = torch.randn(D).to(dtype)
    factors = 2.0 ** torch.arange(-4, 4, dtype=dtype)[:, None]
    key = -(direction * factors)
    query, value = direction.expand(8, D), torch.ones(8, 2, dtype=dtype)
    output, weights = attended(*(x[None, None] for x in (query, key, value)), causal=causal)
    assert not output.any()
    assert not weights.any()
    key = key.clone()
    key[5] = 0.0
    output, weights = attended(*(x[None, None] for x in (query, key, value)), causal=causal)
    row = torch.zeros(8, dtype=torch.float64)
    row[5] = 1.0
    close = 8 * (8 + 2 * D + 8)  # of 1 in n, without a recomputed row
    assert ((weights[0, 0, 5:] - row).abs() <= close * EPS).all()
    # without causal the denominator is n / 8, or a rounding less: float32 may be enough
    eps = EPS if causal or dtype == torch.float64 else NARROW_EPS
    assert ((output[0, 0, 5:] - 1).abs() <= close * eps + torch.finfo(dtype).eps).all()
    assert bool(weights[0, 0, :5].any()) == (not causal)


@each("factor", [3.0, 0.1, 1 / 3])
def test_keys_opposed_within_rounding_count_as_opposed(factor: float) -> None:
    query = torch.randn(1, 1, 9, 5, dtype=torch.float64)[:, :, :1]
    output, _ = attended(query, -query * factor, query)
    assert not output.any()


@every_dtype
def test_vectors_without_direction_have_similarity_1(dtype: torch.dtype) -> None:
    query = torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=dtype)
    key = torch.tensor([[0.0, 0.0], [0.0, 5.0], [3.0, 0.0], [-1.0, 0.0]], dtype=dtype)
    value = torch.eye(4, dtype=dtype)
    output, weights = attended(*(x[None, None] for x in (query, key, value)))
    truth = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 2.0, 0.0]], dtype=torch.float64) / 4
    assert torch.equal(weights[0, 0], truth)
    assert torch.equal(output[0, 0], truth)


@pytest.mark.slow
@every_dtype
@causal_or_not
def test_many_keys_that_cancel(dtype: torch.dtype, causal: bool) -> None:
    """Beside a thousand opposed keys, one key without a direction determines the row."""
    key = torch.tensor([-1.0, 0.5], dtype=dtype).expand(1, 1, 1100, 2).clone()
    key[:, :, 7] = 0.0
    value = torch.arange(2200.0).view(1, 1, 1100, 2).remainder(97).to(dtype)
    output, _ = attended(-key[:, :, :1].expand(1, 1, 1100, 2), key, value, causal=causal)
    truth = value.double()[:, :, 7:8].expand(1, 1, 1100, 2).clone()
    if causal:
        truth[:, :, :7] = 0.0
    # up to 1000 keys of at most 97 go into one sum whose denominator is 1
    close = 1000 * EPS * 1000 * 97 + torch.finfo(dtype).eps * truth.abs()
    assert ((output - truth).abs() <= close).all()


@examples(30)
@given(request=requests(VARIANTS["taylor"]), causal=st.booleans(), seed=st.integers(0, 99))
def test_norm_of_a_row_changes_nothing(request: Request, causal: bool, seed: int) -> None:
    tensors = request.named_tensors()
    query, key, value = (tensors[n].nan_to_num(0, 0, 0) for n in ("query", "key", "value"))
    generator = torch.Generator().manual_seed(seed)

    def scaled(x: Tensor) -> Tensor:
        exponents = torch.randint(-60, 60, (*x.shape[:3], 1), generator=generator)
        return x.double() * 2.0**exponents  # exact

    query, key, value = query.double(), key.double(), value.double()
    output, weights = attended(query, key, value, causal=causal)
    again = attended(scaled(query), scaled(key), value, causal=causal)
    assert torch.equal(again[0], output)
    assert torch.equal(again[1], weights)
    assert_agrees("taylor", query * 3, key * 0.7, value, causal=causal)


@every_dtype
@causal_or_not
def test_rows_of_any_size(dtype: torch.dtype, causal: bool) -> None:
    """Huge, tiny and denormal rows have directions too."""
    info = torch.finfo(dtype)
    shape = torch.tensor([[1.0, 0.5, -0.25], [0.25, 1.0, 1.0], [-1.0, 0.5, 0.5]], dtype=dtype)
    value = torch.tensor([[1.0, 2.0], [3.0, 5.0], [-7.0, 11.0]], dtype=dtype)[None, None]
    plain = attended(shape[None, None], shape[None, None], value, causal=causal)
    denormal = info.smallest_normal * info.eps
    for large in (info.max / 2, info.smallest_normal * 4, denormal * 4):
        power = 2.0 ** torch.tensor(large, dtype=torch.float64).log2().floor()
        rows = (shape.double() * power).to(dtype)[None, None]
        for query, key in ((rows, shape[None, None]), (shape[None, None], rows), (rows, rows)):
            found = attended(query, key, value, causal=causal)
            assert torch.equal(found[0], plain[0])
            assert torch.equal(found[1], plain[1])


@each("dtype", [torch.float64, torch.float32])
@each("angle", [1e-1, 1e-3, 1e-5])
def test_gradients_of_opposed_keys(dtype: torch.dtype, angle: float) -> None:
    """Compares with central differences of 80 digits, for the rounded inputs."""
    turns = torch.tensor([1.0, -1.5, 0.5], dtype=torch.float64) * angle
    key = -torch.stack([turns.cos(), turns.sin()], -1) * torch.tensor([[1.0], [3.0], [0.25]])
    query, value = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0], [-2.0], [4.0]])
    rows = [x.to(dtype) for x in (query, key, value)]
    tensors = dict(
        zip(("query_BHLD", "key_BGSD", "value_BGSE"), (x[None, None] for x in rows), strict=True)
    )
    found = gradients("taylor", torch.ones(1, 1, 1, 1, dtype=dtype), tensors, {})
    numbers = [Decimal(x) for row in rows for x in row.flatten().tolist()]

    def output(x: list[Decimal]) -> Decimal:
        similar = []
        for k in range(3):
            a, b = x[2 + 2 * k], x[3 + 2 * k]
            norms = ((x[0] ** 2 + x[1] ** 2) * (a**2 + b**2)).sqrt()
            similar.append(1 + (x[0] * a + x[1] * b) / norms)
        return sum((s * v for s, v in zip(similar, x[8:], strict=True)), Decimal()) / sum(similar)

    with localcontext(prec=80):
        step, slopes = Decimal("1e-25"), []
        for n in range(len(numbers)):
            up, down = ([*numbers[:n], numbers[n] + d, *numbers[n + 1 :]] for d in (step, -step))
            slopes.append(float((output(up) - output(down)) / (2 * step)))
    result = torch.cat([found[n].double().flatten() for n in ("query", "key", "value")])
    truth = torch.tensor(slopes, dtype=torch.float64)
    # roundings of a direction over the least angle, and of sums of terms as large as the largest
    close = 2 * (8 + 4) * EPS / (angle / 2) + 4 * torch.finfo(dtype).eps
    for part in (slice(0, 2), slice(2, 8), slice(8, 11)):
        assert ((result - truth).abs()[part] <= 4 * close * truth[part].abs().max()).all()
