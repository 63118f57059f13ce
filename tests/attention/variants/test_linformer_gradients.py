"""Gradients of Linformer against finite differences, in any dtype, and with padding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qkv.attention.variants import linformer
from support.dtypes import DTYPES
from support.each import each


def differentiable(lengths: Tensor | None, *given: bool) -> list[Any]:
    query, key = torch.randn(2, 4, 3, 5).double(), torch.randn(2, 2, 6, 5).double()
    value = torch.randn(2, 2, 6, 2).double()
    projections = [torch.randn(3, 8).double() if g else None for g in given]
    tensors = [t if t is None else t.requires_grad_() for t in (query, key, value, *projections)]
    return [*tensors, lengths]


@each("dtype", DTYPES)
def test_gradients_in_any_dtype(dtype: torch.dtype) -> None:
    """The truth is autograd through the textbook formula in float64; padding gets zeros."""
    lengths = torch.tensor([6, 2])
    inputs: list[Any] = [t.detach().to(dtype) for t in differentiable(None, True, True)[:5]]
    grad = torch.randn(2, 4, 3, 2).to(dtype)
    query, key, value, E, F = (t.double().requires_grad_() for t in inputs)
    padding = (torch.arange(6) >= lengths[:, None])[:, None, :, None]
    k, v = (x.masked_fill(padding, 0.0).repeat_interleave(2, 1) for x in (key, value))
    P = torch.softmax(query @ (E[:, :6] @ k).mT * 5**-0.5, -1)
    output = P @ (F[:, :6] @ v)
    expected = torch.autograd.grad(output, (query, key, value, E, F), grad.double())
    for i in (1, 2):
        inputs[i] = inputs[i].masked_fill(padding, math.nan)
    query, key, value, E, F = inputs
    found = linformer.backward(linformer.Call(query, key, value, E, F, lengths), grad)
    assert list(found) == ["query", "key", "value", "key_projection", "value_projection"]
    for tensor, truth in zip(found.values(), expected, strict=True):
        assert tensor.dtype == torch.float64
        close = 200 * torch.finfo(torch.float64).eps * float(truth.abs().amax())
        torch.testing.assert_close(tensor, truth, rtol=0, atol=close)
    for name in ("key", "value"):
        assert not found[name].masked_select(padding).any()
    for name in ("key_projection", "value_projection"):
        assert not found[name][:, 6:].any()
    drawn_only = linformer.backward(linformer.Call(query, key, value, None, None, lengths), grad)
    assert list(drawn_only) == ["query", "key", "value"]
