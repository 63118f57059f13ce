"""Efficient attention against the reference, with rising keys and extreme numbers."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qkv.attention.variants import efficient
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.executor import execute
from qkv.jobs.job import Job
from qkv.jobs.plan import Limits, Plan
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.each import each
from support.examples import examples
from support.references import reference_of
from support.variant_bounds import efficient_roundings as roundings

BOTH: Final = frozenset({"output", "weights"})
OUTPUT: Final = frozenset({"output"})
DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
every_dtype = each("dtype", DTYPES)
wide_dtypes = each("dtype", [torch.float64, torch.float32])
causal_or_not = each("causal", [False, True])


def exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def attended(*tensors: Any, **parameters: Any) -> tuple[Tensor, Tensor]:
    """Returns output and weights.

    The output must have the same bits when it is requested alone.
    """
    found = efficient.attend(efficient.Call(*tensors, **parameters), BOTH)
    alone = efficient.attend(efficient.Call(*tensors, **parameters), OUTPUT)
    assert found.output is not None
    assert found.weights is not None
    assert alone.output is not None
    assert alone.weights is None
    assert torch.equal(alone.output, found.output)
    assert found.output.dtype == tensors[0].dtype
    assert found.weights.dtype == exact(tensors[0].dtype)
    return found.output.double(), found.weights.double()


@wide_dtypes
@causal_or_not
def test_adding_a_constant_to_a_key_channel_changes_nothing(
    dtype: torch.dtype, causal: bool
) -> None:
    query, key, value = (torch.randn(2, 2, 90, 5, dtype=dtype) for _ in range(3))
    key = (key * 2**10).round() / 2**10  # adding and subtracting the shift is exact
    output, weights = attended(query, key, value, causal=causal)
    shifts = torch.tensor([0.0, 3, -100, 500, -1000], dtype=dtype)
    again = attended(query, key + shifts, value, causal=causal)
    close = 2 * roundings(query, key) * torch.finfo(dtype).eps
    assert ((again[0] - output).abs() <= close * (weights @ value.double().abs())).all()
    torch.testing.assert_close(again[1], weights, rtol=close, atol=0)


@wide_dtypes
@each("length", [5, 16, 50, 300])
def test_keys_that_dominate_all_earlier_keys(dtype: torch.dtype, length: int) -> None:
    """Each key is e^1000 times the one before, so each row is its own value."""
    query, value = torch.randn(1, 2, length, 3, dtype=dtype), torch.randn(1, 2, length, 2)
    key = 1000.0 * torch.arange(length, dtype=dtype)[:, None].expand(1, 2, length, 3)
    output, weights = attended(query, key, value.to(dtype), causal=True)
    close = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(output, value.double(), rtol=close, atol=0)
    identity = torch.eye(length, dtype=torch.float64).expand(1, 2, length, length)
    torch.testing.assert_close(weights, identity, rtol=close, atol=0)
    falling, _ = attended(query, -key, value.to(dtype), causal=True)
    torch.testing.assert_close(
        falling, value.double()[:, :, :1].expand_as(falling), rtol=close, atol=0
    )


@every_dtype
@causal_or_not
@each("least", [False, True])
def test_extreme_queries_and_keys(dtype: torch.dtype, causal: bool, least: bool) -> None:
    """Differences overflow; the largest key gets all weight, and equal keys share it."""
    info = torch.finfo(dtype)
    big = info.smallest_normal if least else info.max
    signs = torch.tensor([[1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]], dtype=dtype)
    value = torch.tensor([[1.0], [2.0], [4.0], [8.0]], dtype=dtype)
    query, value = (signs * big)[None, None], value[None, None]
    output, weights = attended(query, query, value, causal=causal)
    truth = reference_of(efficient.Call(query, query, value, causal=causal))
    close = 32 * torch.finfo(exact(dtype)).eps
    assert truth.weights is not None
    torch.testing.assert_close(weights, truth.weights, rtol=close, atol=0)
    assert ((output - truth.weights @ value.double()).abs() <= (close + info.eps) * 8).all()


@wide_dtypes
@causal_or_not
def test_equal_queries_and_keys_of_any_size(dtype: torch.dtype, causal: bool) -> None:
    value = torch.arange(1.0, 11, dtype=dtype).view(1, 1, 5, 2)
    for size in (1e30, -1e30, 0.0, 1e-30):
        same = torch.full((1, 1, 5, 4), size, dtype=dtype)
        output, _ = attended(same, same, value, causal=causal)
        truth = value.double().cumsum(2) / torch.arange(1.0, 6).view(5, 1)
        truth = truth if causal else truth[:, :, -1:].expand_as(truth)
        torch.testing.assert_close(output, truth, rtol=16 * torch.finfo(dtype).eps, atol=0)


@wide_dtypes
@each("rise", [0.0, 38.0, 250.0, 1000.0])
def test_small_values_keep_their_precision(dtype: torch.dtype, rise: float) -> None:
    """A shift leaves e^-rise of the early keys, and the values are small too."""
    query, key = torch.randn(2, 1, 1, 40, 4, dtype=dtype)
    key = key / 10
    key[:, :, 30:] += rise
    value = torch.rand(1, 1, 40, 3, dtype=dtype) + 1
    value[:, :, 5] = 0.0
    output, _ = attended(query, key, value, causal=True)
    power = 2.0 ** (-120 if dtype == torch.float32 else -1015)
    again, _ = attended(query, key, value * power, causal=True)
    close = 2 * roundings(query, key) * torch.finfo(dtype).eps
    torch.testing.assert_close(again / power, output, rtol=close, atol=0)


@examples(30)
@given(
    sizes=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=6, max_size=6
    )
)
def test_output_is_an_average_for_any_finite_input(sizes: list[float]) -> None:
    query, key, value = torch.tensor(sizes).view(3, 1, 1, 2, 1)
    for dtype in (torch.float32, torch.float64):
        x = [tensor.to(dtype).expand(1, 1, 2, 2) for tensor in (query, key, value)]
        output, weights = attended(*x, causal=True)
        assert output.isfinite().all()
        assert (weights >= 0).all()
        assert (output.abs() <= x[2].double().abs().max()).all()


def test_request_of_another_path_is_not_stacked_with_ordinary_ones() -> None:
    """In one stack, it would move the whole call to its path and change their bits."""

    def job(size: float) -> Job:
        key = np.full((1, 1, 3, 4), size, np.float32)
        key[:, :, 0] = -size
        arrays = {"query": key, "key": key, "value": np.full((1, 1, 3, 4), 2, np.float32)}
        tensors = {name: RawTensor.from_numpy(array) for name, array in arrays.items()}
        message = Message({"parameters": {"causal": True}}, tensors)
        return Job.new(Plan, "efficient", message, Limits(1 << 20, 1 << 20))

    outputs = execute([job(19.0), job(21.0), job(2.0)], CpuDevice(), stack=True)
    assert [r.times.stacked_count for r in outputs] == [2, 1, 2]
    for r, size in zip(outputs, (19.0, 21.0, 2.0), strict=True):
        alone = execute([job(size)], CpuDevice(), stack=True)[0]
        assert np.array_equal(r.outputs["output"].numpy(), alone.outputs["output"].numpy())
