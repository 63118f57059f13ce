"""Linear attention against the reference and exact fractions, with extreme features."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from qkv.attention.variants import linear
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.executor import execute
from qkv.jobs.job import Job
from qkv.jobs.plan import Limits, Plan
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.each import each
from support.references import reference_of
from support.variant_calls import EPS, SIZES, gradients, random_inputs

BOTH: Final = frozenset({"output", "weights"})
OUTPUT: Final = frozenset({"output"})
DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
every_dtype = each("dtype", DTYPES)


@every_dtype
@each("causal", [False, True])
@each("size", [-8, -30, -40, -60, -300, -1e4, 30, 300, 6e4])
def test_equal_features_of_any_size_cancel(dtype: torch.dtype, causal: bool, size: float) -> None:
    """elu(x) + 1 is exactly 0 below -30 in float32; equal keys must still give the plain mean."""
    same = torch.full((1, 1, 5, 4), size, dtype=dtype)
    value = torch.arange(10.0, dtype=dtype).view(1, 1, 5, 2)
    found = linear.attend(linear.Call(same, same, value, causal=causal), BOTH)
    truth = value.double().cumsum(2) / torch.arange(1.0, 6).view(5, 1)
    truth = truth if causal else truth[:, :, -1:].expand_as(truth)
    assert found.output is not None
    close = 16 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
    torch.testing.assert_close(found.output.double(), truth, rtol=close, atol=close)


@each("dtype", [torch.float64, torch.float32])
def test_queries_and_keys_without_a_common_large_feature(dtype: torch.dtype) -> None:
    query = torch.tensor([[[[0.0, -2000.0]]]], dtype=dtype)
    key = torch.tensor([[[[-2000.0, 0.0], [-2000.0, -1.0]]]], dtype=dtype)
    value = torch.tensor([[[[1.0], [3.0]]]], dtype=dtype)
    found = linear.attend(linear.Call(query, key, value), BOTH)
    # e^-2000 + e^-2000 against e^-2000 + e^-2001
    a = 2 / (3 + torch.tensor(-1.0, dtype=torch.float64).exp())
    assert found.output is not None
    close = 8 * torch.finfo(dtype).eps
    assert abs(float(found.output) - float(a + 3 * (1 - a))) <= 3 * close


@each("shift", [0.0, -7.0, -15.0, -25.0])
@each("exponent", [-30, -60, -90, -110])
@each("causal", [False, True])
def test_small_values_with_small_features_keep_their_precision(
    shift: float, exponent: int, causal: bool
) -> None:
    """phi(-25) squared is 2e-22, and its product with 1e-20 underflows in float32."""
    query, key = torch.randn(2, 1, 2, 40, 16) * 0.8 + shift
    value = torch.ldexp(torch.randn(1, 2, 40, 8), torch.tensor(exponent))
    value[..., 0] = 0
    value[..., 1] = 1
    found = linear.attend(linear.Call(query, key, value, causal=causal), OUTPUT)
    truth = reference_of(linear.Call(query, key, value, causal=causal)).output
    size = reference_of(linear.Call(query, key, value.abs(), causal=causal)).output
    assert found.output is not None
    assert truth is not None
    assert size is not None
    assert ((found.output - truth).abs() <= 32 * torch.finfo(torch.float32).eps * size).all()


def test_request_of_another_path_is_not_stacked_with_ordinary_ones() -> None:
    """In one stack, it would move the whole call to its path and change their bits."""

    def job(size: float) -> Job:
        query, key, value = (np.full((1, 1, 3, 4), size, np.float32) for _ in range(3))
        arrays = {"query": query, "key": -key, "value": value}
        tensors = {name: RawTensor.from_numpy(array) for name, array in arrays.items()}
        return Job.new(Plan, "linear", Message({}, tensors), Limits(1 << 20, 1 << 20))

    results = execute([job(1.0), job(40.0), job(2.0)], CpuDevice(), stack=True)
    assert [r.times.stacked_count for r in results] == [2, 1, 2]
    assert [r.batch_size for r in results] == [3, 3, 3]
    for r, size in zip(results, (1.0, 40.0, 2.0), strict=True):
        np.testing.assert_allclose(r.outputs["output"].numpy(), size, rtol=1e-6)


@each("causal", [False, True])
@each("size", [-40.0, -60.0, -300.0, -1e4])
def test_gradients_of_vanishing_features(size: float, causal: bool) -> None:
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


def test_gradients_of_row_sums_that_underflow() -> None:
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
