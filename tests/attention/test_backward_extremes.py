"""Closed-form gradients at the ends of the dtypes' ranges, and where sums vanish."""

from __future__ import annotations

from decimal import Decimal, localcontext

import pytest
import torch

from support.gradient_calls import EPS, SIZES, forward_output, gradients, random_inputs


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 1e20), (torch.float32, 1e37), (torch.float64, 1e20), (torch.float64, 1e300)],
)
def test_huge_queries_and_values_have_finite_gradients(dtype: torch.dtype, size: float) -> None:
    """Powers of two in and out change no bit of the gradient, and nothing is NaN."""
    for name in ("sigmoid", "softmax", "linear", "taylor"):
        tensors = random_inputs(name, dtype=dtype)
        tensors["query_BHLD"] *= size
        tensors["query_BHLD"][:, :, 0] = 0.0
        for factor in (1.0, size):
            grad = torch.randn_like(forward_output(name, tensors, {})) * factor
            found = gradients(name, grad, tensors, {"causal": True})
            if (
                name in ("linear", "taylor") or factor == 1.0
            ):  # the slopes times such queries are infinite
                assert all(gradient.isfinite().all() for gradient in found.values()), name
            assert not any(gradient.isnan().any() for gradient in found.values()), name
    tensors = random_inputs("softmax")
    tensors["value_BGSE"] *= 2.0**1000
    grad = torch.randn(3, 4, 3, 2, dtype=torch.float64)
    small = tensors | {"value_BGSE": tensors["value_BGSE"] * 2.0**-1000}
    found = gradients("softmax", grad * 2.0**-1000, tensors, {"scale": -0.3})
    truth = gradients("softmax", grad, small, {"scale": -0.3})
    for n, power in (("query", 0), ("key", 0), ("value", -1000)):
        torch.testing.assert_close(found[n], truth[n] * 2.0**power, rtol=64 * EPS, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [-40.0, -60.0, -300.0, -1e4])
def test_linear_with_vanishing_features(size: float, causal: bool) -> None:
    """For x <= 0, phi is exp, and a constant added to queries or keys changes no gradient."""
    near = random_inputs("linear", dtype=torch.float32)
    for argument in ("query_BHLD", "key_BGSD"):  # in steps that float32 represents at any size
        near[argument] = near[argument].mul(4).round().div(4) - 4
    far = near | {a: near[a] + size for a in ("query_BHLD", "key_BGSD")}
    grad = torch.randn(3, 4, 3, 2)
    found = gradients("linear", grad, far, {"causal": causal})
    truth = gradients("linear", grad, near, {"causal": causal})
    for n, gradient in found.items():
        close = torch.finfo(torch.float32).eps
        torch.testing.assert_close(gradient, truth[n], rtol=4 * close, atol=1e3 * EPS)


def test_linear_with_row_sums_that_underflow() -> None:
    """A late key of another size does not change the gradients of early rows."""
    tensors = random_inputs("linear", SIZES | {"B": 1, "L": 6, "S": 6})
    tensors["key_BGSD"] = -900 - tensors["key_BGSD"].abs()
    tensors["query_BHLD"] = -tensors["query_BHLD"].abs()
    early = {a: t[:, :, :4].clone() for a, t in tensors.items()}
    tensors["key_BGSD"][:, :, 4:] = 50.0
    grad = torch.randn(1, 4, 6, 2, dtype=torch.float64)
    grad[:, :, 4:] = 0.0
    found = gradients("linear", grad, tensors, {"causal": True})
    truth = gradients("linear", grad[:, :, :4], early, {"causal": True})
    for n, gradient in found.items():
        torch.testing.assert_close(gradient[:, :, :4], truth[n], rtol=1e3 * EPS, atol=1e2 * EPS)
        assert not gradient[:, :, 4:].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("angle", [1e-1, 1e-3, 1e-5])
def test_taylor_with_opposed_keys(dtype: torch.dtype, angle: float) -> None:
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
